"""Creates, seals, checks and maps anonymous memory (memfds). Imports little, because probes use it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import functools
import os
from typing import Final

from kvplug.errors import WireError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_fd_after_fork, no_fork

_SIZE_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_FUTURE_WRITE_SEAL: Final = 0x10  # F_SEAL_FUTURE_WRITE, since Linux 5.1
_NOEXEC_SEAL: Final = 0x8
"""MFD_NOEXEC_SEAL, since Linux 6.3. An administrator may forbid memfds without it."""
_STRICT: Final = b"2"
_MAP_SHARED: Final = 0x01
_MAP_PRIVATE: Final = 0x02
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000


class Memfd:
    """Functions on the descriptor of anonymous memory, which processes pass to each other."""

    @staticmethod
    def create(name: str, nbytes: int = 0) -> int:
        """Return a close-on-exec descriptor of new, zeroed, sealable memory. ``name`` is shown in /proc.

        Raises:
            OSError: the system cannot create the memory.
            OverflowError: no memory can be that large.
        """
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        with no_fork:
            try:
                fd = os.memfd_create(name, flags | _NOEXEC_SEAL)
            except OSError as e:
                if e.errno != errno.EINVAL:
                    raise
                fd = os.memfd_create(name, flags)
            close_fd_after_fork(fd)
        try:
            if nbytes:
                os.ftruncate(fd, nbytes)
                Memfd.allocate(fd, 0, nbytes)
        except BaseException:
            os.close(fd)
            raise
        return fd

    @staticmethod
    def allocate(fd: int, begin: int, nbytes: int) -> None:
        """Allocate this part of the memory now if the kernel might refuse its pages on access (SIGBUS).

        :meth:`create` does this for all of its memory. Only memory that was created empty and extended with
        ``ftruncate`` needs it.

        Raises:
            OSError: there is not enough memory.
        """
        if is_accounted_strictly():
            os.posix_fallocate(fd, begin, nbytes)

    @staticmethod
    def seal(fd: int, *, read_only: bool) -> None:
        """Seal the size, so that no process can shrink memory that another uses: that process would get
        SIGBUS.

        ``read_only``: forbid new writable mappings; existing ones stay writable.

        Raises:
            OSError: the memory is already sealed, or ``read_only`` was given and the kernel is older than
                Linux 5.1.
        """
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS | (_FUTURE_WRITE_SEAL if read_only else 0))

    @staticmethod
    def check(fd: int, nbytes: int, *, writable: bool) -> None:
        """Check that the descriptor is sealed memory of ``nbytes``, which cannot shrink while it is read.

        ``writable``: the caller will map it for writing. Otherwise it must be sealed against new writers.

        Raises:
            WireError: it is not such memory.
            OSError: this process has no descriptor left for the check.
        """
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        except OSError as e:
            raise WireError(f"the received descriptor is not sealable memory: {e}") from e
        found = os.fstat(fd)
        if seals & _SIZE_SEALS != _SIZE_SEALS or found.st_size != nbytes or nbytes <= 0:
            raise WireError(
                f"expected sealed memory of {nbytes} bytes, received {found.st_size} with seals {seals:#x}"
            )
        if writable:
            # Check before mapping: a failed mapping leaves a hole, where another thread's mapping may be
            # placed.
            unwritable = seals & (fcntl.F_SEAL_WRITE | _FUTURE_WRITE_SEAL)
            if unwritable or fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
                raise WireError("the received memory cannot be written")
        elif not seals & _FUTURE_WRITE_SEAL:
            raise WireError("the received memory can be mapped for writing by more processes")
        if found.st_dev != device_of_memory():
            raise WireError("the received memory is of another kind, whose pages can run out during use")

    @staticmethod
    def map(fd: int, address: int, nbytes: int, protection: int) -> None:
        """Map whole pages of shared memory over the caller's own mapping at ``address``.

        ``protection`` is ``mmap.PROT_...``.

        The mapping does not need the descriptor afterwards.

        Raises:
            OSError: the system refuses. The mapping at the address is then undefined.
        """
        _place(address, nbytes, protection, _MAP_SHARED, fd)


@functools.cache  # results are cached, exceptions are not
def device_of_memory() -> int:
    """Return the device number of memfds. All with 4 KiB pages share it; memfds of huge pages do not."""
    fd = Memfd.create("kvplug-probe")
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)


def is_accounted_strictly() -> bool:
    """Whether the kernel may refuse a page on access (SIGBUS), so that all pages must be allocated at
    once."""
    try:
        with open("/proc/sys/vm/overcommit_memory", "rb") as f:
            return f.read(1) == _STRICT
    except OSError as e:
        NamedExhaustion.check(e, "reading how the kernel accounts for memory")
        return False


# -- over addresses that the caller owns -----------------------------------------------------------


def map_zeroes(address: int, nbytes: int, protection: int) -> None:
    """Map zeroed memory that is private to this process; see :meth:`Memfd.map`. Raises OSError."""
    _place(address, nbytes, protection, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def _place(address: int, nbytes: int, protection: int, flags: int, fd: int) -> None:
    if _map(address, nbytes, protection, flags | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# By item: each access makes a new function object, so no other code shares its argtypes.
_map = ctypes.CDLL(None, use_errno=True)["mmap"]
_map.restype = ctypes.c_void_p
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
