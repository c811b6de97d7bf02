"""A process whose ends get false messages: its addresses are bounded, and what goes wrong outside of calls is
noted; and memory, which is changed under it.

Memory that is taken because a peer announced it cannot be had, and the error shows how the transport handles
that.
"""

from __future__ import annotations

import logging
import mmap
import os
import random
import resource
import struct
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Final, Self

from kvplug import KvplugError
from kvplug_testing import peers
from kvplug_testing.resources import kernel_bytes
from kvplug_testing.tampering.lies import INTEGERS

ROOM_BYTES: Final = 8 << 30
"""Addresses that the process may take beyond what it has when the lies begin. Stacks, and memory that both
ends map, take most of them."""
MOST_GROWN_BYTES: Final = 512 << 20
"""Memory that it may really use beyond that."""
_ENDING_S: Final = 20.0
"""A transport may keep for seconds what a peer that lives on without its connection might still use."""


class Faults(logging.Handler):
    """Errors in threads and in logs that no transport foresaw."""

    def __init__(self) -> None:
        super().__init__()
        self._found: list[str] = []

    def taken(self) -> list[str]:
        """Those since the last call."""
        found, self._found = self._found, []
        return found

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, KvplugError | OSError):
            self._found.append(f"{record.name} logged {type(error).__name__}: {error}"[:500])
        if not is_printable(text := record.getMessage()):
            self._found.append(f"{record.name} logged codes of the peer's: {text[:300]!r}")

    def note(self, args: threading.ExceptHookArgs) -> None:
        self._found.append(f"a thread died: {args.exc_type.__name__}: {args.exc_value}"[:500])


@contextmanager
def faults_noted() -> Iterator[Faults]:
    """While the block runs, in a child process."""
    faults = Faults()
    logging.getLogger().addHandler(faults)
    threading.excepthook = faults.note
    try:
        yield faults
    finally:
        logging.getLogger().removeHandler(faults)


@contextmanager
def bounded(*, is_bounded: bool) -> Iterator[None]:
    """The block, in a child process, takes little memory and leaves nothing behind.

    Raises:
        AssertionError: it did.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if is_bounded:
        resource.setrlimit(resource.RLIMIT_AS, (kernel_bytes("self/status", "VmSize") + ROOM_BYTES, hard))
    used = kernel_bytes("self/status", "VmHWM")
    with peers.nothing_left(_ENDING_S):
        yield
    grown = kernel_bytes("self/status", "VmHWM") - used
    assert grown < MOST_GROWN_BYTES, f"{grown} bytes of memory were used, for messages of far fewer"


def is_printable(text: str) -> bool:
    """Whether a text has no codes for a terminal."""
    return all(line.isprintable() for line in text.splitlines())


# -- memory that one end has handed to the other by its descriptor -------------------------------------


_WORD: Final = struct.Struct("<Q")
_LOOKED_AT: Final = 1 << 16
"""Bytes at the beginning of each used stretch of memory that are looked at."""


class SharedMemory:
    """The memories behind some descriptors, mapped until the block ends."""

    def __init__(self, descriptors: Iterable[int]) -> None:
        self._all: list[tuple[int, mmap.mmap]] = []
        for fd in descriptors:
            with suppress(OSError, ValueError):
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
            with suppress(OSError):
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
    with suppress(OSError):  # nothing more
        while end < len(memory):
            begin = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, begin, os.SEEK_HOLE)
            for at in range(begin, min(end, begin + _LOOKED_AT, len(memory)) - 15, 8):
                if memory[at : at + 16] != bytes(16):
                    yield at
