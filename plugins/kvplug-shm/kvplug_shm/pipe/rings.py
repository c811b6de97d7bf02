"""The two rings of a pipe in one segment, one each way: the words of both, then the bytes of both.

A ring is a ring of bytes; each message begins at a multiple of a cache line.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import torch

from kvplug.transport import Segment
from kvplug_shm.memory.copying import RELEASE_GIL_BYTES
from kvplug_shm.memory.words import Words
from kvplug_shm.pipe.geometry import (
    LINE,
    LONGEST_LOOK_S,
    NUM_WORDS,
    PAGE,
    SMALLEST_COST,
    Pieces,
    lines,
)
from kvplug_shm.pipe.header import Header
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd

# The same function twice: one releases the interpreter's lock, the other has the smaller fixed cost.
_let_go = ctypes.memmove
_keep: ctypes._CFunctionType = ctypes.PYFUNCTYPE(
    ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)


class _Ring:
    def __init__(self, segment: Segment, index: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.words = Words(segment, index * Words.size(NUM_WORDS), NUM_WORDS)
        begin = PAGE + index * -(-nbytes // PAGE) * PAGE
        self.bytes = segment.view[begin : begin + nbytes]
        self._segment = segment  # whose address is good for as long as it is mapped
        self.address = segment.address + begin
        self._tensor: torch.Tensor | None = None  # over the bytes, made when first needed

    def parts(self, count: int, nbytes: int) -> Iterator[torch.Tensor]:
        """The bytes of the stream from ``count`` on, as views of the ring: one, or two at the ring's end."""
        if self._tensor is None:
            self._tensor = torch.frombuffer(self.bytes, dtype=torch.uint8)
        at = count % self.nbytes
        first = min(nbytes, self.nbytes - at)
        yield self._tensor[at : at + first]
        if first < nbytes:
            yield self._tensor[: nbytes - first]


class Outgoing(_Ring):
    """The ring that this process writes. ``ring`` 0 is the accepting end's."""

    def __init__(self, segment: Segment, ring: int, nbytes: int) -> None:
        super().__init__(segment, ring, nbytes)
        self.end = WritingEnd(self.words, 1, nbytes)

    def put(self, header: Header, address: int, pieces: Pieces, limit: int) -> bool:
        """Publish a whole small message, if there is room, with ``limit`` bytes unread at most.

        Returns whether it was published; a large one never is. Raises WireError if the reader's word is
        impossible.
        """
        end, prefix, nbytes = self.end, header.prefix, header.nbytes
        if nbytes > pieces.at_once:
            return False
        taken = len(prefix) + lines(nbytes)
        room = end.room()
        unread = self.nbytes - room
        if taken > room or (unread + max(SMALLEST_COST, nbytes) > limit if unread else end.over(0)):
            return False
        self.write(end.sent, prefix)
        if nbytes:
            self.copy(end.sent + len(prefix), address, nbytes)
        end.publish(taken)
        return True

    def write(self, count: int, data: bytes) -> None:
        """Copy small ``data`` to byte ``count`` of the stream, wrapping around at the ring's end."""
        at = count % self.nbytes
        stop = at + len(data)
        if stop <= self.nbytes:
            self.bytes[at:stop] = data
        else:
            first = self.nbytes - at
            self.bytes[at:] = data[:first]
            self.bytes[: stop - self.nbytes] = data[first:]

    def copy(self, count: int, source: int, nbytes: int) -> None:
        """The same, for ``nbytes`` at the address ``source``."""
        at = count % self.nbytes
        move = _keep if nbytes < RELEASE_GIL_BYTES else _let_go
        first = min(nbytes, self.nbytes - at)
        move(self.address + at, source, first)
        if first < nbytes:
            move(self.address, source + first, nbytes - first)


class Incoming(_Ring):
    """The ring that this process reads."""

    def __init__(self, segment: Segment, ring: int, nbytes: int) -> None:
        super().__init__(segment, ring, nbytes)
        self.end = ReadingEnd(self.words, 0, nbytes)

    def next_line(self, spin_s: float = 0.0) -> tuple[int, bytes]:
        """The number of bytes that have arrived, and a copy of their first line, if it is whole.

        If it is not, spin for ``spin_s`` seconds at most. A copy, since the peer could change the ring
        between two reads. Raises WireError if the writer's word is impossible.
        """
        end = self.end
        here = end.available()
        if here < LINE and spin_s and end.spin(LINE, min(spin_s, LONGEST_LOOK_S)):
            here = end.available()
        return here, b"" if here < LINE else self.peek(end.read, LINE)

    def take(self, address: int, nbytes: int) -> None:
        """Copy the ``nbytes`` after the first line to ``address``, and release line and bytes."""
        if nbytes:
            self.copy(self.end.read + LINE, address, nbytes)
        self.end.release(LINE + lines(nbytes))

    def peek(self, count: int, nbytes: int) -> bytes:
        """A copy of a few bytes from byte ``count`` of the stream on."""
        at = count % self.nbytes
        stop = at + nbytes
        if stop <= self.nbytes:
            return bytes(self.bytes[at:stop])
        return bytes(self.bytes[at:]) + bytes(self.bytes[: stop - self.nbytes])

    def copy(self, count: int, target: int, nbytes: int) -> None:
        """Copy ``nbytes`` from byte ``count`` of the stream on to the address ``target``."""
        at = count % self.nbytes
        move = _keep if nbytes < RELEASE_GIL_BYTES else _let_go
        first = min(nbytes, self.nbytes - at)
        move(target, self.address + at, first)
        if first < nbytes:
            move(target + first, self.address, nbytes - first)
