"""The compiled part of the core: the functions of pages.c, for :mod:`kvplug.transport.store.copy`.

This module imports little, since the probe of every store loads it.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvplug.errors import UnsupportedError
from kvplug.net.exhaustion import NamedExhaustion

_FILE: Final = Path(__file__).with_name("_pages.so")
_SOURCE: Final = Path(__file__).with_name("pages.c")
_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64


class _Library(NamedTuple):
    """The functions of pages.c."""

    move: Callable[..., int]
    """Releases the interpreter's lock."""
    move_locked: Callable[..., int]
    """The same function, but keeps the interpreter's lock."""
    hash: int
    """Address of xxhash's XXH3_64bits."""
    stream: array[int]
    """``struct hash_stream`` of pages.c: addresses of the functions that hash data in pieces."""


@functools.cache  # does not cache exceptions
def library() -> _Library:
    """Return the compiled functions.

    Raises:
        UnsupportedError: they were not compiled, or cannot be used.
        ResourceExhaustedError: there is no descriptor or memory to load them.
    """
    try:
        return _loaded()
    except (OSError, AttributeError, ImportError) as e:
        NamedExhaustion.check(e, f"loading {_FILE}")
        raise UnsupportedError(
            f"stores need the compiled part of kvplug, {_FILE}, which cannot be used ({e}): install kvplug"
            " again, from a wheel for this platform or with a C compiler"
        ) from e


def _loaded() -> _Library:
    import xxhash

    functions = ctypes.CDLL(str(_FILE))
    source = functions.kvplug_pages_source
    source.restype = ctypes.c_uint32
    if source() != zlib.crc32(_SOURCE.read_bytes()):
        raise ImportError("it was built from a different pages.c")
    # xxhash's extension module exports the C functions that it was built with. Check on samples that the C
    # function gives the same hashes as the Python function.
    hashes = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
    hash_of = hashes.XXH3_64bits
    hash_of.restype, hash_of.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    for sample in (b"", b"kvplug", bytes(range(256)) * 17):
        if hash_of(sample, len(sample)) != xxhash.xxh3_64_intdigest(sample):
            raise ImportError("xxhash's C function XXH3_64bits disagrees with its Python function")
    move, move_locked = functions.kvplug_pages_move, ctypes.PyDLL(str(_FILE)).kvplug_pages_move
    for each in (move, move_locked):
        each.restype = ctypes.c_int
        each.argtypes = (_POINTER, ctypes.c_int, _I64, _I64, _I64, _I64, _POINTER)
    steps = ("createState", "freeState", "64bits_reset", "64bits_update", "64bits_digest")
    stream = array("q", [_address(hashes[f"XXH3_{step}"]) for step in steps])
    return _Library(move, move_locked, _address(hash_of), stream)


def _address(function: Any) -> int:
    address = ctypes.cast(function, _POINTER).value
    assert address
    return address
