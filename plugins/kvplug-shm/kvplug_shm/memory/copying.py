"""Bytes into shared memory and out of it.

A slice assignment holds the interpreter's lock and has the smaller fixed cost; memmove, through ctypes, lets
the lock go, so that an engine's other threads run during a large copy.
"""

from __future__ import annotations

import ctypes
from typing import Final

LETS_GO_FROM: Final = 256 * 1024
"""Bytes from which memmove is called. It costs 1.6 microseconds more, a third of a copy of this size. With
pieces of this size a thread of torch operations beside the copy got 73,000 of its 102,000 a second, and
30,000 where the lock was held. With smaller pieces a thread that never lets the lock go by itself stops the
copy: it keeps it for 5 ms each time (64 KiB: 0.04 GB/s, against 4.7 with the lock held)."""


class _Buffer(ctypes.Structure):
    """Py_buffer, as far as it is the same in every Python: a stable ABI since 3.11."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("owner", ctypes.py_object),
        ("nbytes", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


# By item: what is named as an attribute is one object for all of the process, and so are its argtypes.
_get = ctypes.pythonapi["PyObject_GetBuffer"]
_get.argtypes = [ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int]
_release = ctypes.pythonapi["PyBuffer_Release"]
_release.argtypes = [ctypes.POINTER(_Buffer)]
_release.restype = None
_move = ctypes.memmove
_Byte = ctypes.c_char


def address_of(view: memoryview) -> int:
    """Where the bytes of a contiguous view begin, also of one that cannot be written.

    Raises:
        BufferError: the view is not contiguous.
    """
    if not view.readonly and view.nbytes and view.contiguous:
        return ctypes.addressof(_Byte.from_buffer(view))  # a third of the time
    found = _Buffer()
    _get(view, found, 0)
    address = found.address
    _release(found)
    return address or 0


def into(view: memoryview, offset: int, source: memoryview) -> None:
    """Copy ``source`` to ``offset`` of ``view``; both are flat bytes."""
    nbytes = len(source)
    target = view[offset : offset + nbytes]
    if nbytes < LETS_GO_FROM:
        target[:] = source
    else:
        _copy(target, source)


def out_of(view: memoryview, offset: int, target: memoryview) -> None:
    """Fill ``target`` with what lies at ``offset`` of ``view``; both are flat bytes."""
    nbytes = len(target)
    source = view[offset : offset + nbytes]
    if nbytes < LETS_GO_FROM:
        target[:] = source
    else:
        _copy(target, source)


def _copy(target: memoryview, source: memoryview) -> None:
    if target.readonly or target.nbytes != source.nbytes:
        raise ValueError(f"{source.nbytes} bytes cannot be copied to {target.nbytes}")
    _move(address_of(target), address_of(source), source.nbytes)
