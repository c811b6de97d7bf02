"""Bytes from one memory into another, without holding up the interpreter's other threads."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

LOCK_FREE_BYTES: Final = 1 << 20
"""From here on the interpreter's lock is let go. Copying less takes under 0.1 ms, and who lets go of the lock
may wait 5 ms for it."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Fill ``target`` with the bytes of ``source``; both are flat and contiguous.

    Raises:
        ValueError: they have not the same number of bytes.
    """
    if source.nbytes != target.nbytes or source.nbytes < LOCK_FREE_BYTES:
        target[:] = source
        return
    with _address(target, _WRITABLE) as there, _address(source, _SIMPLE) as here:
        ctypes.memmove(there, here, source.nbytes)


class _Buffer(ctypes.Structure):
    """CPython's ``Py_buffer``, of its stable ABI."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_SIMPLE, _WRITABLE = 0, 1
# ctypes itself gives the address of a writable buffer only. By item: what is named as an attribute is one
# object for all of the process, and so are its argtypes.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None


@contextmanager
def _address(view: memoryview, flags: int) -> Iterator[int]:
    """Where its bytes lie; they stay there meanwhile."""
    buffer = _Buffer()
    _get_buffer(view, buffer, flags)  # raises BufferError itself
    try:
        yield buffer.buf or 0
    finally:
        _release_buffer(buffer)
