"""Sleeping on a word of shared memory, and waking the sleepers (futex(2)).

ctypes releases the interpreter's lock during the call, so that the process's other threads run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
from collections.abc import Callable
from typing import Final

# Numbers of the system call: asm/unistd_64.h, asm-generic/unistd.h.
_NUMBERS: Final = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 0, 1  # not FUTEX_PRIVATE: the word is shared between processes
_EVERYBODY: Final = 0x7FFFFFFF
_IN_VAIN: Final = frozenset({errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})
_LONGEST_S: Final = 1e6


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _system_call() -> Callable[..., int]:
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    call.argtypes = [
        ctypes.c_long,
        ctypes.c_void_p,
        ctypes.c_int,
        ctypes.c_uint32,
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_uint32,
    ]
    return call


_call = _system_call()
# A 32-bit Python on a 64-bit kernel has other numbers.
_number = _NUMBERS.get(platform.machine(), -1) if sys.maxsize > 2**32 else -1


def is_there() -> bool:
    """Whether this machine's number of the call is known."""
    return _number >= 0


def wait(address: int, seen: int, seconds: float | None) -> None:
    """Sleep until woken, for ``seconds`` at most; not at all unless the word's low 32 bits equal ``seen``'s.

    Also returns on a signal. Raises OSError if the address cannot be that of a word.
    """
    limit = None
    if seconds is not None:
        seconds = min(max(seconds, 0.0), _LONGEST_S)
        whole = int(seconds)
        limit = ctypes.byref(_Timespec(whole, int((seconds - whole) * 1e9)))
    if _call(_number, address, _WAIT, seen & 0xFFFFFFFF, limit, None, 0) < 0:
        number = ctypes.get_errno()
        if number not in _IN_VAIN:
            raise OSError(number, os.strerror(number))


def wake(address: int) -> int:
    """Wake all sleepers on the word at ``address``. Returns how many there were."""
    return _call(_number, address, _WAKE, _EVERYBODY, None, None, 0)
