"""The memory of a store: segments of shared memory that this process writes, and others only read.

The segments lie one after the other in one address space, so that a place is one number. Each slot ends with
a word, its *generation*: another number for each page that was ever in the slot, and 0 while the slot is free
or being filled. A reader in another process compares it after its last copy."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from typing import TYPE_CHECKING, Final

from kvplug import CapacityError, KvplugError
from kvplug.net.wire.copying import address_of
from kvplug.transport import Memfd, NamedExhaustion, close_after_fork, pin_memory
from kvplug_host.arena.addresses import AddressSpace

if TYPE_CHECKING:
    import torch

WORD: Final = 8
"""Bytes of a generation."""
_NAME: Final = "kvplug-host"

_new_lock = threading.Lock


class Segments:
    """Up to ``count`` segments of ``nbytes`` each; :meth:`grow` makes the next one.

    Raises:
        CapacityError: there are not enough addresses.
    """

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes
        self._space: AddressSpace | None = AddressSpace(count * nbytes)
        self.view = self._space.view
        self._words = self.view.cast("Q")
        self._descriptors: list[int] = []
        self.can_be_mapped = True
        """Whether the kernel can seal memory so that others only read it (Linux 5.1 and later)."""
        # Numbers that cannot be guessed: what a page holds is never taken for a generation.
        self._next = secrets.randbits(62)
        close_after_fork(self)

    @property
    def num_grown(self) -> int:
        """How many segments there are."""
        return len(self._descriptors)

    def grow(self) -> None:
        """Make the next segment.

        Raises:
            ResourceExhaustedError, CapacityError: the system has not the memory.
        """
        if self._space is None:
            raise CapacityError("the memory of the store is closed")
        fd = -1
        try:
            fd = Memfd.create(_NAME, self.nbytes)
            self._space.place(fd, len(self._descriptors) * self.nbytes, self.nbytes, writable=True)
            try:
                Memfd.seal(fd, read_only=True)
            except OSError:
                self.can_be_mapped = False
            self._descriptors.append(fd)
        except BaseException as e:
            if fd >= 0:
                os.close(fd)
            what = f"shared memory of {self.nbytes} bytes for pages"
            NamedExhaustion.check(e, what)
            if isinstance(e, OSError | OverflowError) and not isinstance(e, KvplugError):
                raise CapacityError(f"no {what}: {e}") from e
            raise

    def descriptor(self, number: int) -> int:
        """A copy of a segment's descriptor, which the caller closes.

        Raises:
            IndexError: there is no such segment.
            OSError: this process has no descriptor left.
        """
        return os.dup(self._descriptors[number])

    def pin(self, number: int, device: torch.device) -> None:
        """Pin a segment for the device, until the memory is unmapped. Takes long.

        Raises:
            RuntimeError: it cannot be pinned.
        """
        space = self._space
        if space is not None:
            unpin = pin_memory(address_of(space.view) + number * self.nbytes, self.nbytes, device)
            space.before_unmapping.append(unpin)

    # -- generations ---------------------------------------------------------------------------

    def next_generation(self) -> int:
        """A number that no page has had."""
        self._next = (self._next + 1) & (2**63 - 1) or 1
        return self._next

    def set_generation(self, at: int, generation: int) -> None:
        """The slot whose word is at ``at`` holds a page, whole."""
        if self._descriptors:
            self._words[at // WORD] = generation

    def clear_generation(self, at: int) -> None:
        """The slot holds no page from now on: readers see that before anything that is written after it."""
        if not self._descriptors:
            return  # closed
        self._words[at // WORD] = 0
        # A full fence: copies of large pages store past the caches, out of the order of other stores.
        # Acquiring a lock is one locked instruction; a new one, which no other thread can hold.
        _new_lock().acquire()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the descriptors. The memory lives on with its views, and with readers that map it."""
        descriptors, self._descriptors = self._descriptors, []
        self.view = self._words = memoryview(b"")
        self._space = None
        for fd in descriptors:
            with contextlib.suppress(OSError):
                os.close(fd)

    def _after_fork_in_child(self) -> None:
        self.close()
