"""The kernel's anonymous memory, by descriptor: made, sealed, checked and mapped. Light: probes import it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from typing import Final

from kvplug.errors import WireError
from kvplug.net.exhaustion import NamedExhaustion

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE_SEAL: Final = 0x10  # F_SEAL_FUTURE_WRITE, since Linux 5.1
_NOEXEC_SEAL: Final = 0x8
"""MFD_NOEXEC_SEAL, since Linux 6.3: an administrator may refuse memory that could be executed."""
_STRICT: Final = b"2"
_MAP_SHARED: Final = 0x01
_MAP_PRIVATE: Final = 0x02
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000


class Memfd:
    """Anonymous memory of the kernel, by its descriptor, which processes pass on to each other."""

    @staticmethod
    def create(name: str, nbytes: int = 0) -> int:
        """The descriptor of new memory, zeroed, which can be sealed; close-on-exec. ``name`` is for /proc.

        Raises:
            OSError: the system cannot create it.
            OverflowError: no memory can be that large.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        try:
            fd = os.memfd_create(name, flags | _NOEXEC_SEAL)
        except OSError as e:
            if e.errno != errno.EINVAL:
                raise
            fd = os.memfd_create(name, flags)
        try:
            if nbytes:
                os.ftruncate(fd, nbytes)
                if is_accounted_strictly():
                    os.posix_fallocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def seal(fd: int, *, read_only: bool) -> None:
        """Seal the size: no process can shrink the memory under another, whose access would then raise
        SIGBUS.

        ``read_only``: mappings that are there already can be written, and no new one.

        Raises:
            OSError: it is sealed already, or the kernel is older than Linux 5.1 and ``read_only`` was asked
                for.
        """
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | (_FUTURE_WRITE_SEAL if read_only else 0))

    @staticmethod
    def check(fd: int, nbytes: int, *, writable: bool) -> None:
        """Return if the descriptor is sealed memory of that size, which cannot be taken away under a reader.

        ``writable``: it is to be mapped for writing; else it must be sealed against new writers.

        Raises:
            WireError: it is something else.
            OSError: this process has no descriptor left to check with.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as e:
            raise WireError(f"what was handed over is no memory that can be sealed: {e}") from e
        found = os.fstat(fd)
        if seals & _SIZE_SEALS != _SIZE_SEALS or found.st_size != nbytes or nbytes <= 0:
            raise WireError(
                f"sealed memory of {nbytes} bytes was promised; {found.st_size} came, with seals {seals:#x}"
            )
        if writable:
            # Checked first: a mapping that fails leaves a hole, in which another thread's mapping may be
            # placed.
            unwritable = seals & (fcntl.F_SEAL_WRITE | _FUTURE_WRITE_SEAL)
            if unwritable or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
                raise WireError("what was handed over is memory that cannot be written")
        elif not seals & _FUTURE_WRITE_SEAL:
            raise WireError("what was handed over is memory that more processes could write")
        if found.st_dev != device_of_memory():
            raise WireError("what was handed over is memory of another kind, which can run out under us")

    @staticmethod
    def map(fd: int, address: int, nbytes: int, protection: int) -> None:
        """Map memory, shared, over the caller's own mapping at ``address``: whole pages, ``mmap.PROT_...``.

        The mapping needs the descriptor no more.

        Raises:
            OSError: the system refuses. What is at the address then is undefined.
        """
        _place(address, nbytes, protection, _MAP_SHARED, fd)


@functools.cache  # of what it returns; what it raises is not kept
def device_of_memory() -> int:
    """All memfds of 4 KiB pages lie on one device of the kernel's; those of huge pages do not."""
    fd = Memfd.create("kvplug-probe")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def is_accounted_strictly() -> bool:
    """Whether the kernel may refuse a page on access (SIGBUS): then all pages are allocated at once."""
    try:
        with open("/proc/sys/vm/overcommit_memory", "rb") as f:
            return f.read(1) == _STRICT
    except OSError as e:
        NamedExhaustion.check(e, "reading how the kernel accounts for memory")
        return False


# -- over addresses that are the caller's already ---------------------------------------------------


def map_zeroes(address: int, nbytes: int, protection: int) -> None:
    """The same with memory of this process only, which is zero. Raises OSError."""
    _place(address, nbytes, protection, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def _place(address: int, nbytes: int, protection: int, flags: int, fd: int) -> None:
    if _map(address, nbytes, protection, flags | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# By item: what is named as an attribute is one object for all of the process, and so are its argtypes.
_map = ctypes.CDLL(None, use_errno=True)["mmap"]
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
