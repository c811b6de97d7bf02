"""Anonymous, sealed memory that two processes of one user share, freed when the last of them ends.

A segment is a memfd. It has no name to open, does not count against ``/dev/shm``, and is freed with the last
process that holds it. Its size is sealed before its descriptor is passed on. Otherwise one process could
shrink it, and another process that reads the lost part would get SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from typing import Final, Self

from kvplug.errors import TransportError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.memory import memfd
from kvplug.net.wire.copying import address_of

_MAP_NORESERVE: Final = 0x4000
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
_REFUSALS: Final = (OSError, OverflowError)


class Segment:
    """A mapping of shared memory. It is unmapped when the last reference to it or a view is dropped, since
    another thread may still be copying.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        """The mapping."""
        self.view = memoryview(memory)
        """All of its bytes, writable."""
        self.address = address_of(self.view)
        """The address of its first byte in this process."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.memory)

    @classmethod
    def create(cls, name: str, nbytes: int) -> tuple[Segment, int]:
        """Create zeroed memory. Returns it with its descriptor, which the caller passes on and closes.

        Raises:
            ResourceExhaustedError: there is not enough memory, or no descriptor is left.
            TransportError: the system refused for another reason.
        """
        what = f"shared memory of {nbytes} bytes cannot be created"
        with NamedExhaustion(what, TransportError, _REFUSALS), contextlib.ExitStack() as undo:
            fd = memfd.Memfd.create(f"kvplug-{name}", nbytes)
            undo.callback(os.close, fd)
            memfd.Memfd.seal(fd, read_only=False)
            made = cls(_Mapping.of(fd, nbytes))
            undo.pop_all()
        return made, fd

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map another process's memory. The caller still owns the descriptor.

        Raises:
            WireError: it is not sealed, writable memory of this size.
            ResourceExhaustedError: the address space is too small, or no descriptor is left.
            TransportError: it cannot be mapped for another reason.
        """
        with NamedExhaustion(f"shared memory of {nbytes} bytes cannot be mapped", TransportError, _REFUSALS):
            memfd.Memfd.check(fd, nbytes, writable=True)
            return cls(_Mapping.of(fd, nbytes))

    @classmethod
    def map(cls, fd: int, nbytes: int, *, writable: bool) -> Segment:
        """Map memory that the caller has created, or has checked with :meth:`Memfd.check`. The caller still
        owns the descriptor. The kernel may use huge pages.

        If not ``writable``, a write ends this process, although the view seems writable.

        Raises:
            ResourceExhaustedError: the address space is too small.
            TransportError: it cannot be mapped for another reason.
        """
        with NamedExhaustion(f"shared memory of {nbytes} bytes cannot be mapped", TransportError, _REFUSALS):
            made = cls(_Mapping.of(fd, nbytes, _READ_WRITE if writable else mmap.PROT_READ))
        with contextlib.suppress(OSError):  # only a hint
            made.memory.madvise(mmap.MADV_HUGEPAGE)
        return made

    def call_before_unmapping(self, call: Callable[[], object]) -> None:
        """Call a function before the memory is unmapped, in any thread; not in forked children. It must not
        raise."""
        assert isinstance(self.memory, _Mapping)
        self.memory.before_unmapping += (call,)

    def give_back(self, at: int, nbytes: int) -> None:
        """Return the whole pages of this part to the system. They then read as zeros, and use memory again
        once written.

        Does nothing if the kernel does not support this or might refuse the pages on the next access.
        """
        begin = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (at + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            if end > begin and not memfd.is_accounted_strictly():
                self.memory.madvise(mmap.MADV_REMOVE, begin, end - begin)


class _Mapping(mmap.mmap):
    """A mapping of a memfd that keeps no descriptor open.

    Before Python 3.13, each file mapping of :mod:`mmap` keeps one open, and descriptors are scarce. So
    :meth:`of` makes an anonymous mapping, and maps the memfd over it.

    In a forked child, private memory replaces it, so that the child does not keep the parent's memory alive.
    Views that the child inherited then show zeros. If the memory were unmapped, reading them would crash or
    show other memory.
    """

    before_unmapping: tuple[Callable[[], object], ...] = ()

    @classmethod
    def of(cls, fd: int, nbytes: int, protection: int = _READ_WRITE) -> Self:
        """Map the memory of ``fd``. Raises OSError."""
        made = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        memfd.Memfd.map(fd, made._address(), nbytes, protection)
        close_after_fork(made)
        return made

    def __del__(self) -> None:
        for call in self.before_unmapping:
            call()

    def _address(self) -> int:
        with memoryview(self) as view:
            return address_of(view)

    def _after_fork_in_child(self) -> None:
        self.before_unmapping = ()
        if not self.closed:  # otherwise another mapping may have the addresses
            memfd.map_zeroes(self._address(), len(self), _READ_WRITE)
