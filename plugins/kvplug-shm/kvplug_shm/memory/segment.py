"""Memory that two processes of one user share: anonymous, sealed, and freed with the last of them.

A segment is a memfd. It has no name to open, does not count against ``/dev/shm``, and is freed with the last
process that holds it. Its size is sealed before its descriptor is passed on: no process can shrink it under a
reader, whose access would then raise SIGBUS.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
from collections.abc import Callable
from typing import Final

from kvplug import KvplugError, TransportError
from kvplug.net.wire.copying import address_of
from kvplug.transport import NamedExhaustion, WireError, close_after_fork, raise_if_exhausted
from kvplug_shm.memory import memfd

_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE_SEAL: Final = 0x10
_UNWRITABLE: Final = fcntl.F_SEAL_WRITE | _FUTURE_WRITE_SEAL
_STRICT: Final = b"2"
_MAP_FIXED: Final = 0x10
_MAP_NORESERVE: Final = 0x4000
_PRIVATE: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE


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
            ResourceExhaustedError: not enough memory, or no descriptor left.
            TransportError: the system makes none for another reason.
        """
        fd = -1
        try:
            with NamedExhaustion(f"shared memory of {nbytes} bytes"):
                fd = memfd.new(f"kvplug-{name}")
                os.ftruncate(fd, nbytes)
                if _is_accounted_strictly():
                    os.posix_fallocate(fd, 0, nbytes)
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
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
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as e:
            raise WireError(f"what was handed over is no memory that can be sealed: {e}") from e
        found = os.fstat(fd)
        if seals & _SEALS != _SEALS or found.st_size != nbytes or nbytes <= 0:
            raise WireError(
                f"sealed memory of {nbytes} bytes was promised; {found.st_size} came, with seals {seals:#x}"
            )
        # Checked first: a mapping that fails leaves a hole, in which another thread's mapping may be placed.
        if seals & _UNWRITABLE or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
            raise WireError("what was handed over is memory that cannot be written")
        try:
            if found.st_dev != _device_of_memory():
                raise WireError("what was handed over is memory of another kind, which can run out under us")
            return cls(_mapped(fd, nbytes))
        except OSError as e:
            raise_if_exhausted(e, f"mapping shared memory of {nbytes} bytes")
            raise TransportError(f"shared memory of {nbytes} bytes cannot be mapped: {e}") from e

    def give_back(self, at: int, nbytes: int) -> None:
        """Return the whole pages of this part to the system: zeroes that cost nothing until written to.

        Does nothing on a kernel that cannot do it, or that might refuse the pages the next time.
        """
        begin = -(-at // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (at + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        with contextlib.suppress(OSError):
            if end > begin and not _is_accounted_strictly():
                self.memory.madvise(mmap.MADV_REMOVE, begin, end - begin)


class _Mapping(mmap.mmap):
    """Python's own mapping of a file keeps a descriptor (before 3.13), and descriptors are scarce. So this is
    an anonymous mapping, which :meth:`show` replaces.

    In a forked child it is replaced by private memory, so that the child does not hold the parent's. Views of
    it that the child has inherited show zeros: unmapped, they would crash, or show other memory.
    """

    def __new__(cls, nbytes: int) -> _Mapping:
        return super().__new__(cls, -1, nbytes, flags=_PRIVATE)

    def show(self, fd: int) -> None:
        """Show the memory of this descriptor from now on. Raises OSError."""
        self._map(mmap.MAP_SHARED, fd)
        close_after_fork(self)

    def _map(self, flags: int, fd: int) -> None:
        with memoryview(self) as view:
            address = address_of(view)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        if _map(address, len(self), protection, flags | _MAP_FIXED, fd, 0) != address:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def _after_fork_in_child(self) -> None:
        if not self.closed:  # else the addresses may be another mapping's
            self._map(_PRIVATE, -1)


def _mapped(fd: int, nbytes: int) -> mmap.mmap:
    memory = _Mapping(nbytes)
    memory.show(fd)
    return memory


def _system_call() -> Callable[..., int | None]:
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_long,
    ]
    return call


_map = _system_call()


@functools.cache  # of what it returns; what it raises is not kept
def _device_of_memory() -> int:
    """All memfds of 4 KiB pages lie on one device of the kernel's; those of huge pages do not."""
    fd = memfd.new("kvplug-probe")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def _is_accounted_strictly() -> bool:
    """Whether the kernel may refuse a page on access (SIGBUS): then all pages are allocated at once."""
    try:
        with open("/proc/sys/vm/overcommit_memory", "rb") as f:
            return f.read(1) == _STRICT
    except OSError as e:
        raise_if_exhausted(e, "reading how the kernel accounts for memory")
        return False
