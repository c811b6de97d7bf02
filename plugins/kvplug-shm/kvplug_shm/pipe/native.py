"""The two rings of a pipe, with the compiled steps."""

from __future__ import annotations

import ctypes
from typing import Final

from kvplug_shm.memory.copying import LETS_GO_FROM
from kvplug_shm.memory.segment import Segment
from kvplug_shm.native.ends import NativeReadingEnd, NativeWritingEnd
from kvplug_shm.native.library import Library
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.head import Head
from kvplug_shm.pipe.rings import LINE, Incoming, Outgoing, Pieces

_MOST_NS: Final = 5_000_000
"""How long one call may take that moves many pieces: then deadlines are looked at, and signals handled."""


class NativeOutgoing(Outgoing):
    """The ring that this process writes."""

    def __init__(self, library: Library, segment: Segment, ring: int, nbytes: int, spin_s: float) -> None:
        super().__init__(segment, ring, nbytes)
        self.end = end = NativeWritingEnd(library, self.words, 1, nbytes)
        end.state.bytes = self.address
        self._end = end.pointer
        self._spin_ns = int(spin_s * 1e9)
        self._put, self._push, self._long_push = library.put, library.push, library.long_push

    def put(self, head: Head, address: int, limit: int) -> bool:
        done = self._put(self._end, head.pointer, address, limit)
        if done < 0:
            self.end.room()  # says why
        return done == 1

    def push(self, prefix: bytes, span: Span, done: int, nbytes: int, pieces: Pieces) -> int:
        """Publish as much of a message as gets in without sleeping, from byte ``done`` of ``nbytes`` on.

        How many bytes that were, without the prefix, which goes before them. What nobody reads, and what the
        reader's word cannot mean, is not written.
        """
        if nbytes - done < LETS_GO_FROM:
            push, spin_ns = self._push, 0
        else:
            push, spin_ns = self._long_push, self._spin_ns
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
            _MOST_NS,
        )


class NativeIncoming(Incoming):
    """The ring that this process reads."""

    def __init__(self, library: Library, segment: Segment, ring: int, nbytes: int, spin_s: float) -> None:
        super().__init__(segment, ring, nbytes)
        self.end = end = NativeReadingEnd(library, self.words, 0, nbytes)
        end.state.bytes = self.address
        self._end = end.pointer
        self._spin_ns = int(spin_s * 1e9)
        self._line = ctypes.create_string_buffer(LINE)
        self._line_at = ctypes.c_void_p(ctypes.addressof(self._line))
        self._peek, self._take = library.peek, library.take
        self._pull, self._long_pull = library.pull, library.long_pull

    def next_line(self) -> tuple[int, bytes]:
        here = self._peek(self._end, self._line_at)
        if here < LINE:
            return super().next_line() if here < 0 else (here, b"")
        return here, self._line.raw

    def take(self, address: int, nbytes: int) -> None:
        self._take(self._end, address, nbytes)

    def pull(self, span: Span, done: int, nbytes: int, unreleased: int, largest: int) -> int:
        """Take as much of a message as comes without sleeping, from byte ``done`` of ``nbytes`` on.

        How many bytes that were. If any, ``unreleased`` bytes before them are given back too. What
        the writer's word cannot mean is not read.
        """
        if nbytes - done < LETS_GO_FROM:
            pull, spin_ns = self._pull, 0
        else:
            pull, spin_ns = self._long_pull, self._spin_ns
        return pull(self._end, span.pointer, done, nbytes, unreleased, largest, spin_ns, _MOST_NS)


def outgoing(segment: Segment, ring: int, nbytes: int, library: Library | None, spin_s: float) -> Outgoing:
    """With the compiled steps, where there are any."""
    if library is None:
        return Outgoing(segment, ring, nbytes)
    return NativeOutgoing(library, segment, ring, nbytes, spin_s)


def incoming(segment: Segment, ring: int, nbytes: int, library: Library | None, spin_s: float) -> Incoming:
    """With the compiled steps, where there are any."""
    if library is None:
        return Incoming(segment, ring, nbytes)
    return NativeIncoming(library, segment, ring, nbytes, spin_s)
