"""The memory of a store: shared memory that this process writes and others only read.

It is one memfd, which takes one descriptor and is mapped whole. The kernel provides memory when it is first
written. Segments are equal parts, which are taken into use one by one.

Each slot ends with a word, its *generation*: another number for each page that was ever in the slot, and 0
while the slot is free or being filled. A reader in another process compares it after its last copy."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import TYPE_CHECKING, Final

from kvplug import CapacityError
from kvplug.transport import Memfd, NamedExhaustion, Segment, close_after_fork, pin_memory

if TYPE_CHECKING:
    import torch

WORD: Final = 8
"""Bytes of a generation."""
_NAME: Final = "kvplug-host"

_new_lock = threading.Lock


class Segments:
    """``count`` segments of ``nbytes`` each, one after the other.

    Raises:
        ResourceExhaustedError, CapacityError: the system has no such memory.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self.total_bytes = count * nbytes
        self._fd = -1
        try:
            with NamedExhaustion(
                f"shared memory of {self.total_bytes} bytes", CapacityError, (OSError, OverflowError)
            ):
                self._fd = Memfd.create(_NAME)
                os.ftruncate(self._fd, self.total_bytes)
                memory = Segment.map(self._fd, self.total_bytes, writable=True)
        except BaseException:
            if self._fd >= 0:
                os.close(self._fd)
            raise
        with contextlib.suppress(OSError):  # Linux before 5.1: other processes then refuse to map it
            Memfd.seal(self._fd, read_only=True)
        self._memory: Segment | None = memory
        self.view = memory.view
        self._words = self.view.cast("Q")
        # Numbers that cannot be guessed: what a page holds is never taken for a generation.
        self._next = secrets.randbits(62)
        close_after_fork(self)

    def allocate(self, number: int) -> None:
        """Take a segment into use.

        Raises:
            ResourceExhaustedError, CapacityError: the system has not the memory.
        """
        if self._memory is None:
            raise CapacityError("the memory of the store is closed")
        with NamedExhaustion(f"shared memory of {self.nbytes} bytes for pages", CapacityError):
            Memfd.allocate(self._fd, number * self.nbytes, self.nbytes)

    def descriptor(self) -> int:
        """A copy of the memory's descriptor, which the caller closes.

        Raises:
            OSError: this process has no descriptor left, or the memory is closed.
        """
        return os.dup(self._fd)

    def pin(self, number: int, device: torch.device) -> None:
        """Pin a segment for the device, until the memory is unmapped. Takes long.

        Raises:
            RuntimeError: it cannot be pinned.
        """
        memory = self._memory
        if memory is not None:
            unpin = pin_memory(memory.address + number * self.nbytes, self.nbytes, device)
            memory.call_before_unmapping(unpin)

    # -- generations ---------------------------------------------------------------------------

    def next_generation(self) -> int:
        """A number that no page has had."""
        self._next = (self._next + 1) & (2**63 - 1) or 1
        return self._next

    def set_generation(self, at: int, generation: int) -> None:
        """The slot whose word is at ``at`` holds a page, whole."""
        if words := self._words:
            words[at // WORD] = generation

    def clear_generation(self, at: int) -> None:
        """The slot holds no page from now on: readers see that before anything that is written after it."""
        words = self._words
        if not words:
            return  # closed
        words[at // WORD] = 0
        # A full fence: copies of large pages store past the caches, out of the order of other stores.
        # Acquiring a lock is one locked instruction; a new one, which no other thread can hold.
        _new_lock().acquire()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the descriptor. The memory lives on with its views, and with readers that map it."""
        fd, self._fd = self._fd, -1
        self.view = self._words = memoryview(b"")
        self._memory = None
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _after_fork_in_child(self) -> None:
        self.close()
