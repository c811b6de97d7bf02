"""The two rings of a pipe, with the compiled steps."""

from __future__ import annotations

import ctypes
from typing import Final

from kvplug.transport import Segment
from kvplug_shm.memory.copying import RELEASE_GIL_BYTES
from kvplug_shm.native.ends import LONGEST_NS, NativeReadingEnd, NativeWritingEnd, in_ns
from kvplug_shm.native.library import Library
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import LINE, Pieces
from kvplug_shm.pipe.header import Header
from kvplug_shm.pipe.rings import Incoming, Outgoing

_ANY: Final = 2**63 - 1
_LARGE: Final = 1024 * 1024
"""With this many bytes of a message left, or more, an end spins for :data:`_WAKE_UP_NS` before it sleeps."""
_WAKE_UP_NS: Final = 1_000_000
"""The time that a sleeping peer may need until it copies: half a millisecond on an idle virtual machine.
Sleeping in the middle of a large message costs two wake-ups, during which nothing is copied."""


def _spin_ns(configured_ns: int, left: int) -> int:
    """How long an end spins for the other one with ``left`` bytes of a message to go; 0 if it never spins."""
    return max(configured_ns, _WAKE_UP_NS) if configured_ns and left >= _LARGE else configured_ns


class NativeOutgoing(Outgoing):
    """The ring that this process writes."""

    def __init__(self, library: Library, segment: Segment, ring: int, nbytes: int, spin_s: float) -> None:
        super().__init__(segment, ring, nbytes)
        self.end = end = NativeWritingEnd(library, self.words, 1, nbytes)
        end.state.bytes = self.address
        self._end = end.pointer
        self._spin_ns = min(in_ns(spin_s), LONGEST_NS)
        self._half = nbytes // 2
        self._put, self._long_put = library.put, library.long_put
        self._push, self._long_push = library.push, library.long_push

    def put(self, header: Header, address: int, pieces: Pieces, limit: int) -> bool:
        limit = min(limit, _ANY)
        if header.nbytes <= pieces.at_once:
            done = self._put(self._end, header.pointer, address, limit)
        elif header.nbytes <= self._half:
            done = self._long_put(self._end, header.pointer, address, limit, pieces.smallest, pieces.largest)
        else:
            return False
        if done < 0:
            self.end.room()  # says why
        return done == 1

    def push(
        self, prefix: bytes, span: Span, done: int, nbytes: int, pieces: Pieces, *, patient: bool
    ) -> int:
        """Publish as much of a message as possible without sleeping, from byte ``done`` of ``nbytes`` on.

        ``patient``: spin for room. Returns the number of bytes, without the prefix before them. Writes
        nothing if the reader has ended, or if its word is invalid.
        """
        small = nbytes - done < RELEASE_GIL_BYTES
        push = self._push if small else self._long_push
        spin_ns = _spin_ns(self._spin_ns, nbytes - done) if patient and not small else 0
        return push(
            self._end,
            prefix,
            len(prefix),
            span.pointer,
            done,
            nbytes,
            pieces.smallest,
            pieces.largest,
            spin_ns,
            LONGEST_NS,
        )


class NativeIncoming(Incoming):
    """The ring that this process reads."""

    def __init__(self, library: Library, segment: Segment, ring: int, nbytes: int, spin_s: float) -> None:
        super().__init__(segment, ring, nbytes)
        self.end = end = NativeReadingEnd(library, self.words, 0, nbytes)
        end.state.bytes = self.address
        self._end = end.pointer
        self._spin_ns = min(in_ns(spin_s), LONGEST_NS)
        self._line = ctypes.create_string_buffer(LINE)
        self._line_at = ctypes.c_void_p(ctypes.addressof(self._line))
        self._peek, self._long_peek, self._take = library.peek, library.long_peek, library.take
        self._pull, self._long_pull = library.pull, library.long_pull

    def next_line(self, spin_s: float = 0.0) -> tuple[int, bytes]:
        here = self._peek(self._end, self._line_at, 0)
        if 0 <= here < LINE and spin_s:
            here = self._long_peek(self._end, self._line_at, min(in_ns(spin_s), LONGEST_NS))
        if here < LINE:
            return super().next_line() if here < 0 else (here, b"")
        return here, self._line.raw

    def take(self, address: int, nbytes: int) -> None:
        self._take(self._end, address, nbytes)

    def pull(
        self,
        span: Span,
        done: int,
        nbytes: int,
        unreleased: int,
        largest: int,
        *,
        patient: bool,
        enough: int | None = None,
    ) -> int:
        """Take as much of a message as arrives without sleeping, from byte ``done`` of ``nbytes`` on.

        ``patient``: spin for more. ``enough``: return once so many bytes of the message were taken, counting
        those before ``done``. Returns the number of bytes. If there are any, ``unreleased`` bytes before them
        are released too. Reads nothing if the writer's word is invalid.
        """
        small = nbytes - done < RELEASE_GIL_BYTES
        pull = self._pull if small else self._long_pull
        spin_ns = _spin_ns(self._spin_ns, nbytes - done) if patient and not small else 0
        enough = nbytes if enough is None else enough
        return pull(self._end, span.pointer, done, nbytes, enough, unreleased, largest, spin_ns, LONGEST_NS)


def outgoing(segment: Segment, ring: int, nbytes: int, library: Library | None, spin_s: float) -> Outgoing:
    """The rings with the compiled steps, if they are built."""
    if library is None:
        return Outgoing(segment, ring, nbytes)
    return NativeOutgoing(library, segment, ring, nbytes, spin_s)


def incoming(segment: Segment, ring: int, nbytes: int, library: Library | None, spin_s: float) -> Incoming:
    """The rings with the compiled steps, if they are built."""
    if library is None:
        return Incoming(segment, ring, nbytes)
    return NativeIncoming(library, segment, ring, nbytes, spin_s)
