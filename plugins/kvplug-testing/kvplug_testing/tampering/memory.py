"""Memory that one end has handed to the other by its descriptor: the relay sees it, and may change it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
from collections.abc import Iterable, Iterator
from typing import Final

import attrs

from kvplug import KvplugError
from kvplug_testing.tampering.lies import INTEGERS, false_frame, frames_in

_WORD: Final = struct.Struct("<Q")
_LOOKED_AT: Final = 1 << 16
"""Bytes at the beginning of each used stretch of memory that are looked at."""


@attrs.frozen
class _Shared:
    fd: int
    memory: mmap.mmap

    def used(self) -> Iterator[tuple[int, bytes]]:
        """(position, bytes) of the beginning of each stretch that was written to."""
        at, size = 0, len(self.memory)
        while at < size:
            try:
                begin = os.lseek(self.fd, at, os.SEEK_DATA)
                end = os.lseek(self.fd, begin, os.SEEK_HOLE)
            except OSError:  # nothing more, or a system that does not say
                begin, end = at, size
            if (begin == at == 0 and end == size) or begin < end:
                yield begin, bytes(self.memory[begin : min(end, begin + _LOOKED_AT)])
            if end >= size:
                return
            at = end


class SharedMemory:
    """The memories behind some descriptors, mapped until it is closed."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._all: list[_Shared] = []
        for fd in descriptors:
            with contextlib.suppress(OSError, ValueError):
                self._all.append(_Shared(fd, mmap.mmap(fd, os.fstat(fd).st_size)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def close(self) -> None:
        for each in self._all:
            each.memory.close()

    def can_shrink(self) -> bool:
        """Whether one end can shrink memory under the other, whose next access would be its end."""
        for each in self._all:
            with contextlib.suppress(OSError):
                os.ftruncate(each.fd, len(each.memory) - mmap.PAGESIZE)
                return True
        return False

    def tamper(self, rng: random.Random) -> str:
        """Change one thing; returns what, in words."""
        shared = rng.choice(self._all)
        stretches = [*shared.used()]
        frames = [(at + begin, data[begin:end]) for at, data in stretches for begin, end in frames_in(data)]
        if frames and rng.random() < 0.4:
            at, frame = rng.choice(frames)
            with contextlib.suppress(KvplugError):
                false, words = false_frame(frame, rng)
                shared.memory[at : at + len(false)] = false
                return f"byte {at} of the memory: {words}"
        words_at = [at + word for at, data in stretches for word in _words_in(data)]
        at = rng.choice(words_at) if words_at else 0
        old = _WORD.unpack_from(shared.memory, at)[0]
        bit = 1 << rng.randrange(64)
        new = rng.choice((*INTEGERS, 2**64 - 1, old + 1, old - 1, old + 2, old ^ bit)) % 2**64
        _WORD.pack_into(shared.memory, at, new)
        return f"byte {at} of the memory: {old} becomes {new}"


def _words_in(data: bytes) -> Iterator[int]:
    """Positions of the words that are not 0, and of those next to them."""
    for at in range(0, len(data) - 15, 8):
        if data[at : at + 16] != bytes(16):
            yield at
