"""Memory that two processes of one user share: anonymous, sealed, and freed with the last of them.

A segment is a memfd. It has no name to open, does not count against ``/dev/shm``, and is freed with the last
process that holds it. Its size is sealed before its descriptor is passed on: no process can shrink it under a
reader, whose access would then raise SIGBUS.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Final

from kvplug.errors import KvplugError, TransportError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.memory import memfd
from kvplug.net.wire.copying import address_of

_MAP_NORESERVE: Final = 0x4000
_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE


class Segment:
    """A mapping of shared memory. It is unmapped with the last reference to it and to its views, since
    another thread may still be copying.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        """The mapping."""
        self.view = memoryview(memory)
        """All of its bytes, which may be written."""
        self.address = address_of(self.view)
        """Of its first byte in this process."""

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return len(self.memory)

    @classmethod
    def create(cls, name: str, nbytes: int) -> tuple[Segment, int]:
        """New memory, zeroed, and its descriptor, which the caller passes on and closes.

        Raises:
            ResourceExhaustedError: not enough memory, or no descriptor left.
            TransportError: the system makes none for another reason.
        """
        fd = -1
        try:
            with NamedExhaustion(f"shared memory of {nbytes} bytes"):
                fd = memfd.Memfd.create(f"kvplug-{name}", nbytes)
                memfd.Memfd.seal(fd, read_only=False)
                return cls(_mapped(fd, nbytes)), fd
        except BaseException as e:
            if fd >= 0:
                os.close(fd)
            if isinstance(e, OSError | OverflowError) and not isinstance(e, KvplugError):
                raise TransportError(f"no shared memory of {nbytes} bytes can be made: {e}") from e
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map memory of another process. The caller still owns the descriptor.

        Raises:
            WireError: it is not sealed memory of this size that can be written.
            ResourceExhaustedError: there are not enough addresses, or no descriptor is left.
            TransportError: it cannot be mapped for another reason.
        """
        try:
            memfd.Memfd.check(fd, nbytes, writable=True)
            return cls(_mapped(fd, nbytes))
        except OSError as e:
            NamedExhaustion.check(e, f"mapping shared memory of {nbytes} bytes")
            raise TransportError(f"shared memory of {nbytes} bytes cannot be mapped: {e}") from e

    def give_back(self, at: int, nbytes: int) -> None:
        """Return the whole pages of this part to the system: zeroes that cost nothing until written to.

        Does nothing on a kernel that cannot do it, or that might refuse the pages the next time.
        """
        begin = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (at + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            if end > begin and not memfd.is_accounted_strictly():
                self.memory.madvise(mmap.MADV_REMOVE, begin, end - begin)


class _Mapping(mmap.mmap):
    """Python's own mapping of a file keeps a descriptor (before 3.13), and descriptors are scarce. So this is
    an anonymous mapping, which :meth:`show` replaces.

    In a forked child it is replaced by private memory, so that the child does not hold the parent's. Views of
    it that the child has inherited show zeros: unmapped, they would crash, or show other memory.
    """

    def __new__(cls, nbytes: int) -> _Mapping:
        return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)

    def show(self, fd: int) -> None:
        """Show the memory of this descriptor from now on. Raises OSError."""
        memfd.Memfd.map(fd, self._address(), len(self), _READ_WRITE)
        close_after_fork(self)

    def _address(self) -> int:
        with memoryview(self) as view:
            return address_of(view)

    def _after_fork_in_child(self) -> None:
        if not self.closed:  # else the addresses may be another mapping's
            memfd.map_zeroes(self._address(), len(self), _READ_WRITE)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    memory = _Mapping(nbytes)
    memory.show(fd)
    return memory
