"""Mapping memory over addresses that are the caller's already."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Final

_MAP_SHARED: Final = 0x01
_MAP_PRIVATE: Final = 0x02
_MAP_FIXED: Final = 0x10
_MAP_ANONYMOUS: Final = 0x20
_MAP_NORESERVE: Final = 0x4000


def map_memfd(fd: int, address: int, nbytes: int, protection: int) -> None:
    """Map memory, shared, over the caller's own mapping at ``address``: whole pages, ``mmap.PROT_...``.

    The mapping needs the descriptor no more.

    Raises:
        OSError: the system refuses. What is at the address then is undefined.
    """
    _place(address, nbytes, protection, _MAP_SHARED, fd)


def map_zeroes(address: int, nbytes: int, protection: int) -> None:
    """The same with memory of this process only, which is zero. Raises OSError."""
    _place(address, nbytes, protection, _MAP_PRIVATE | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def _place(address: int, nbytes: int, protection: int, flags: int, fd: int) -> None:
    if _map(address, nbytes, protection, flags | _MAP_FIXED, fd, 0) != address:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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
