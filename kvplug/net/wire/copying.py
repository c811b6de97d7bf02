"""Copies bytes between memories without holding up the interpreter's other threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final, TypeAlias

CopyBytes: TypeAlias = Callable[[memoryview, memoryview], None]
"""Fills its first argument with the bytes of the second, as :func:`copy_bytes` does."""
LOCK_FREE_BYTES: Final = 1 << 20
"""Copies of this size or larger release the interpreter's lock. A smaller one takes under 0.1 ms, and a
thread that releases the lock may wait 5 ms to get it back."""


def copy_bytes(target: memoryview, source: memoryview, lock_free_bytes: int = LOCK_FREE_BYTES) -> None:
    """Fill ``target`` with the bytes of ``source``; both are flat and contiguous.

    Raises:
        ValueError: their numbers of bytes differ.
        TypeError: ``target`` is read-only.
    """
    if source.nbytes != target.nbytes or target.readonly or source.nbytes < lock_free_bytes:
        target[:] = source
    else:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def address_of(view: memoryview) -> int:
    """Return the address of a contiguous view's bytes, even if it is read-only. The view must stay alive.

    Raises:
        BufferError: the view is not contiguous.
    """
    if not view.readonly and view.nbytes and view.contiguous:
        return ctypes.addressof(_Byte.from_buffer(view))  # three times as fast
    buffer = _Buffer()
    _get_buffer(view, buffer, _SIMPLE)  # raises BufferError
    address: int | None = buffer[0]
    _release_buffer(buffer)
    return address or 0


_Buffer: Final = ctypes.c_void_p * 16
"""Space for CPython's ``Py_buffer``, which is part of the stable ABI. Its first word is the address."""
_SIMPLE: Final = 0
_Byte: Final = ctypes.c_char
# ctypes itself gives the address of writable buffers only. By item: each access makes a new function object,
# so no other code shares its argtypes.
_get_buffer = ctypes.pythonapi["PyObject_GetBuffer"]
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_release_buffer = ctypes.pythonapi["PyBuffer_Release"]
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None
