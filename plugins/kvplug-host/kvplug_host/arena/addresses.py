"""Addresses that are reserved once, and over which shared memory is mapped piece by piece."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Sequence
from typing import Final

from kvplug.net.wire.copying import address_of
from kvplug.transport import Memfd, NamedExhaustion, close_after_fork

_MAP_NORESERVE: Final = 0x4000


class _Reserved(mmap.mmap):
    """Addresses of this process. A forked child does not have them, and must not unmap what lies there."""

    before_unmapping: Sequence[Callable[[], object]] = ()

    def __del__(self) -> None:
        for call in self.before_unmapping:
            call()

    def _after_fork_in_child(self) -> None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))  # never freed in the child


class AddressSpace:
    """``nbytes`` consecutive addresses, of which parts are mapped later.

    They are unmapped with the last reference to the views, since another thread may still be copying. They
    are not there in forked children.

    Raises:
        ResourceExhaustedError: this process has not that many addresses left.
    """

    def __init__(self, nbytes: int) -> None:
        with NamedExhaustion(f"addresses for {nbytes} bytes"):
            memory = _Reserved(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
            memory.madvise(mmap.MADV_DONTFORK)
        close_after_fork(memory)
        self._memory = memory
        self.view = memoryview(memory)
        """Flat bytes. Parts that are not mapped yet must not be used."""
        self._address = address_of(self.view)
        self.before_unmapping: list[Callable[[], object]] = []
        """Called when the memory is about to be unmapped, in any thread. Must not raise."""
        memory.before_unmapping = self.before_unmapping

    def place(self, fd: int, at: int, nbytes: int, *, writable: bool) -> None:
        """Map shared memory at ``at``. Whole pages. Needs the descriptor no more.

        Not writable: writing there ends the process, although the view could be written.

        Raises:
            ResourceExhaustedError, OSError: the system does not map it.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        with NamedExhaustion(f"mapping {nbytes} bytes"):
            Memfd.map(fd, self._address + at, nbytes, protection)
            self._memory.madvise(mmap.MADV_DONTFORK, at, nbytes)  # not inherited from what was there
        with contextlib.suppress(OSError):  # only a hint
            self._memory.madvise(mmap.MADV_HUGEPAGE, at, nbytes)
