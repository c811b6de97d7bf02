"""The two rings of a pipe in one segment, one each way: the words of both, then the bytes of both.

A ring is a ring of bytes; each message begins at a multiple of a cache line.
"""

from __future__ import annotations

import ctypes
from typing import Final

from kvplug.transport import Segment, WireError
from kvplug_shm.memory.copying import RELEASE_GIL_BYTES
from kvplug_shm.memory.words import Words
from kvplug_shm.native.library import LONGEST_NS, in_ns
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.geometry import LINE, NUM_WORDS, PAGE, RingSizes
from kvplug_shm.pipe.message import Header
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd

_ANY: Final = 2**63 - 1
_LARGE: Final = 1024 * 1024
"""With this many bytes of a message left, or more, an end spins for :data:`_WAKE_UP_NS` before it sleeps."""
_WAKE_UP_NS: Final = 1_000_000
"""The time that a sleeping peer may need until it copies: half a millisecond on an idle virtual machine.
Sleeping in the middle of a large message costs two wake-ups, during which nothing is copied."""


class _Ring:
    def __init__(self, segment: Segment, index: int, sizes: RingSizes, spin_s: float) -> None:
        self.sizes = sizes
        self.nbytes = nbytes = sizes.nbytes
        self.spin_s = spin_s
        """How long an end spins before it sleeps."""
        self.words = Words(segment, index * Words.size(NUM_WORDS), NUM_WORDS)
        begin = PAGE + index * -(-nbytes // PAGE) * PAGE
        self.bytes = segment.view[begin : begin + nbytes]
        self._segment = segment  # whose address is good for as long as it is mapped
        self._address = segment.address + begin
        self._steps = self.words.steps
        self._own_spin_ns = min(in_ns(spin_s), LONGEST_NS)

    def _spin_ns(self, left: int, *, patient: bool) -> int:
        """How long to spin for the other end with ``left`` bytes of a message to go."""
        own_ns = self._own_spin_ns
        if not patient or not own_ns or left < RELEASE_GIL_BYTES:
            return 0
        return max(own_ns, _WAKE_UP_NS) if left >= _LARGE else own_ns


class Outgoing(_Ring):
    """The ring that this process writes. ``ring`` 0 is the accepting end's."""

    def __init__(self, segment: Segment, ring: int, sizes: RingSizes, spin_s: float = 0.0) -> None:
        super().__init__(segment, ring, sizes, spin_s)
        self.end = end = WritingEnd(self.words, 1, sizes.nbytes)
        end.state.bytes = self._address
        end.state.window = end.state.least_window = sizes.window
        end.state.at_once = sizes.at_once
        end.state.smallest, end.state.largest = sizes.smallest, sizes.largest
        self._end = end.pointer
        self._at_once, self._half = sizes.at_once, sizes.window // 2
        self._put, self._long_put = self._steps.put, self._steps.long_put

    def room_for(self, count: int) -> int:
        """The room at which the next ``count`` bytes can be written: what is left out before them needs room,
        too.
        """
        return int(self._steps.gap(self._end)) + count

    def room_with(self, unread: int) -> int:
        """The room while so many bytes are unread: what was left out among them takes room, too."""
        state = self.end.state
        gap = -state.jump % self.nbytes
        return self.nbytes - unread - (gap if unread >= state.count - state.jump - gap else 0)

    def unread(self) -> int:
        """How many bytes the reader has not released. Raises WireError if its word is impossible."""
        self.words.check()
        unread = int(self._steps.unread(self._end))
        if unread < 0:
            self.end.room()  # says why
        return unread

    def put(self, header: Header, address: int, limit: int) -> bool:
        """Publish a whole message, if it is not large and there is room, with ``limit`` bytes unread at most.

        Returns whether it was published. Raises WireError if the reader's word is impossible.
        """
        if header.nbytes > self._half:
            return False
        put = self._put if header.nbytes <= self._at_once else self._long_put
        done: int = put(self._end, header.pointer, address, min(limit, _ANY))
        if done < 0:
            self.end.room()  # says why
        return done == 1

    def push(self, prefix: bytes, span: Span, done: int, nbytes: int, *, patient: bool) -> int:
        """Publish as much of a message as possible without sleeping, from byte ``done`` of ``nbytes`` on.

        ``patient``: spin for room. Returns the number of bytes, without the prefix before them. Writes
        nothing if the reader has ended, or if its word is invalid.
        """
        left = nbytes - done
        push = self._steps.push if left < RELEASE_GIL_BYTES else self._steps.long_push
        pushed: int = push(
            self._end,
            prefix,
            len(prefix),
            span.pointer,
            done,
            nbytes,
            self._spin_ns(left, patient=patient),
            LONGEST_NS,
        )
        return pushed


class Incoming(_Ring):
    """The ring that this process reads."""

    def __init__(self, segment: Segment, ring: int, sizes: RingSizes, spin_s: float = 0.0) -> None:
        super().__init__(segment, ring, sizes, spin_s)
        self.end = end = ReadingEnd(self.words, 0, sizes.nbytes)
        end.state.bytes = self._address
        end.state.largest = sizes.largest
        self._end = end.pointer
        self._line = ctypes.create_string_buffer(LINE)
        self._line_at = ctypes.c_void_p(ctypes.addressof(self._line))
        self._peek, self._take = self._steps.peek, self._steps.take

    def next_line(self, spin_s: float = 0.0) -> tuple[int, bytes]:
        """How many bytes have arrived, up to a jump, and a copy of their first line, if it is whole.

        If it is not, spin for ``spin_s`` seconds at most. A copy, since the peer could change the ring
        between two reads. Raises WireError if the writer's word is impossible.
        """
        here: int = self._peek(self._end, self._line_at, 0)
        if 0 <= here < LINE and spin_s:
            here = self._steps.long_peek(self._end, self._line_at, min(in_ns(spin_s), LONGEST_NS))
        if here < 0:
            raise self._invalid()
        return here, self._line.raw if here >= LINE else b""

    def peek(self, nbytes: int) -> bytes:
        """A copy of the first few bytes that have arrived."""
        at = self.end.read % self.nbytes
        stop = at + nbytes
        if stop <= self.nbytes:
            return bytes(self.bytes[at:stop])
        return bytes(self.bytes[at:]) + bytes(self.bytes[: stop - self.nbytes])

    def take(self, address: int, nbytes: int) -> None:
        """Copy the ``nbytes`` after the first line to ``address``, and release line and bytes."""
        self._take(self._end, address, nbytes)

    def pull(
        self,
        span: Span,
        done: int,
        nbytes: int,
        unreleased: int,
        *,
        patient: bool,
        enough: int | None = None,
    ) -> int:
        """Take as much of a message as arrives without sleeping, from byte ``done`` of ``nbytes`` on.

        ``patient``: spin for more. ``enough``: return once so many bytes of the message were taken, counting
        those before ``done``. Returns the number of bytes. If there are any, ``unreleased`` bytes before them
        are released too. Raises WireError if the writer's word is invalid, and reads nothing then.
        """
        left = nbytes - done
        pull = self._steps.pull if left < RELEASE_GIL_BYTES else self._steps.long_pull
        enough = nbytes if enough is None else enough
        spin_ns = self._spin_ns(left, patient=patient)
        taken: int = pull(self._end, span.pointer, done, nbytes, enough, unreleased, spin_ns, LONGEST_NS)
        if taken < 0:
            raise self._invalid()
        return taken

    def _invalid(self) -> WireError:
        """The error for words of the writer that are impossible."""
        try:
            self.end.available()
        except WireError as e:
            return e
        return WireError("the writer states a jump where there is none")
