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

from kvplug.errors import CapacityError
from kvplug.net.memory import memfd
from kvplug.net.memory.limits import explain_os_error
from kvplug.net.memory.mapping import map_memfd
from kvplug.net.wire.copying import address_of

_MAP_NORESERVE: Final = 0x4000


class Segment:
    """A mapping of shared memory. It is unmapped with the last reference to it and to its views, since
    another thread may still be copying.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self.memory = memory
        self.view = memoryview(memory)
        self.address = address_of(self.view)

    @property
    def nbytes(self) -> int:
        return len(self.memory)

    @classmethod
    def create(cls, name: str, nbytes: int) -> tuple[Segment, int]:
        """New memory, zeroed, and its descriptor, which the caller passes on and closes.

        Raises:
            CapacityError: not enough memory, or no descriptor left.
        """
        fd = -1
        try:
            fd = memfd.create_memfd(f"kvplug-{name}", nbytes)
            memfd.seal_memfd(fd, read_only=False)
            return cls(_mapped(fd, nbytes)), fd
        except BaseException as e:
            if fd >= 0:
                os.close(fd)
            if isinstance(e, OSError | OverflowError):
                raise CapacityError(
                    f"no shared memory of {nbytes} bytes can be made: {explain_os_error(e)}"
                ) from e
            raise

    @classmethod
    def attach(cls, fd: int, nbytes: int) -> Segment:
        """Map memory of another process. The caller still owns the descriptor.

        Raises:
            WireError: it is not sealed memory of this size that can be written.
            CapacityError: it cannot be mapped.
        """
        try:
            memfd.check_memfd(fd, nbytes, writable=True)
            return cls(_mapped(fd, nbytes))
        except OSError as e:
            raise CapacityError(
                f"shared memory of {nbytes} bytes cannot be mapped: {explain_os_error(e)}"
            ) from e

    def give_back(self, at: int, nbytes: int) -> None:
        """Return the whole pages of this part to the system: zeroes that cost nothing until written to.

        Does nothing on a kernel that cannot do it, or that might refuse the pages the next time.
        """
        begin = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (at + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > begin and not memfd.is_accounted_strictly():
            with contextlib.suppress(OSError):
                self.memory.madvise(mmap.MADV_REMOVE, begin, end - begin)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    """Python's own mapping of a file keeps a descriptor (before 3.13), and descriptors are scarce.

    So this makes an anonymous mapping, and replaces it by one of the file. Raises OSError.
    """
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
    map_memfd(fd, address_of(memoryview(memory)), nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
    return memory
