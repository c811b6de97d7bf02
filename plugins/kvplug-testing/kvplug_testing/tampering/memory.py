"""Memory that one end has handed to the other by its descriptor: the relay sees it, and may change it."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
from collections.abc import Iterable, Iterator
from typing import Final, Self

from kvplug_testing.tampering.lies import INTEGERS

_WORD: Final = struct.Struct("<Q")
_LOOKED_AT: Final = 1 << 16
"""Bytes at the beginning of each used stretch of memory that are looked at."""


class SharedMemory:
    """The memories behind some descriptors, mapped until the block ends."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._all: list[tuple[int, mmap.mmap]] = []
        for fd in descriptors:
            with contextlib.suppress(OSError, ValueError):
                self._all.append((fd, mmap.mmap(fd, os.fstat(fd).st_size)))

    def __bool__(self) -> bool:
        return bool(self._all)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for _fd, memory in self._all:
            memory.close()

    def can_shrink(self) -> bool:
        """Whether one end can shrink memory under the other, whose next access would be its end."""
        for fd, memory in self._all:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, len(memory) - mmap.PAGESIZE)
                return True
        return False

    def tamper(self, rng: random.Random) -> str:
        """Change one word; returns a description."""
        fd, memory = rng.choice(self._all)
        at = rng.choice([*_words(fd, memory)] or [0])
        old = _WORD.unpack_from(memory, at)[0]
        new = rng.choice((*INTEGERS, old + 1, old - 1, old + 2, old ^ 1 << rng.randrange(64))) % 2**64
        _WORD.pack_into(memory, at, new)
        return f"byte {at} of the memory: {old} becomes {new}"


def _words(fd: int, memory: mmap.mmap) -> Iterator[int]:
    """Positions of the words that are not 0, and of those before them, at the beginning of each stretch that
    was written to.
    """
    end = 0
    with contextlib.suppress(OSError):  # nothing more
        while end < len(memory):
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            for at in range(begin, min(end, begin + _LOOKED_AT, len(memory)) - 15, 8):
                if memory[at : at + 16] != bytes(16):
                    yield at
