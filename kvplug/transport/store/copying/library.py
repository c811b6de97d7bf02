"""The functions of pages.c, if they were compiled with this package and xxhash's own function can be called.

The callers have checked that rows and pages fit together before they come here; the caches' addresses and
strides are those of tensors, and block ids were checked with their table."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import zlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attrs

from kvplug.net.exhaustion import exhaustion_of
from kvplug.transport.block_views import PartPlace
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.places import PagePlaces

logger = logging.getLogger(__name__)

_FILE: Final = Path(__file__).with_name("_pages.so")
_SOURCE: Final = Path(__file__).with_name("pages.c")
_MAX_AXES: Final = 4
_LOCK_FREE_BYTES: Final = 256 << 10
"""Single pages of this size or larger are copied without the interpreter's lock."""
_POINTER, _I64 = ctypes.c_void_p, ctypes.c_int64
_Axes = _I64 * _MAX_AXES


class _Part(ctypes.Structure):
    """``struct part`` of pages.c."""

    _fields_ = (
        ("offset", _I64),
        ("nbytes", _I64),
        ("block_stride", _I64),
        ("token_stride", _I64),
        ("token_bytes", _I64),
        ("run", _I64),
        ("is_dense", _I64),
        ("num_axes", _I64),
        ("counts", _Axes),
        ("in_cache", _Axes),
        ("in_row", _Axes),
    )


class _Task(ctypes.Structure):
    """``struct task`` of pages.c."""

    _fields_ = (
        ("rows", _POINTER),
        ("num_layers", _I64),
        ("num_parts", _I64),
        ("layer_nbytes", _I64),
        ("parts", _POINTER),
        ("bases", _POINTER),
        ("ids", _POINTER),
        ("block_tokens", _I64),
        ("page_tokens", _I64),
        ("first_token", _I64),
        ("begin", _I64),
        ("end", _I64),
        ("hash", _POINTER),
        ("checksums", _POINTER),
        ("words", _POINTER),
        ("generations", _POINTER),
    )


class What:
    """``enum what`` of pages.c."""

    SAVE: Final = 0
    LOAD: Final = 1
    HASH: Final = 2
    VERIFY: Final = 3


IS_WRONG: Final = 1
IS_GONE: Final = 2


class Copies:
    """The copies of one request, some layers of some rows at a time. Threads may share it."""

    def __init__(
        self,
        library: Library,
        form: PageFormat,
        parts: Any,
        places: PagePlaces | None,
        addresses: array[int],
        checksums: array[int] | None,
    ) -> None:
        """
        Args:
            parts: what :meth:`Library.copies` has found for these places.
            addresses: of the first layer of each row. May be changed later.
            checksums: of each part of each layer of each row; ``None``: there are none.
        """
        self.addresses = addresses
        self.checksums = checksums
        self._move, self._move_locked = library.move, library.move_locked
        self._locked_layers = -(-_LOCK_FREE_BYTES // form.layer_nbytes)
        self._kept = [parts, places, addresses, checksums]
        self._task = _Task(
            rows=addresses.buffer_info()[0],
            num_layers=form.num_layers,
            num_parts=len(form.parts),
            layer_nbytes=form.layer_nbytes,
            parts=ctypes.addressof(parts),
        )
        if places is not None:
            self._task.bases = places.bases.buffer_info()[0]
            self._task.ids = places.block_ids.buffer_info()[0]
            self._task.block_tokens, self._task.page_tokens = places.block_tokens, places.page_tokens
            self._task.first_token = places.first_token
            self._task.begin, self._task.end = places.writable.start, places.writable.stop
        if checksums is not None:
            self._task.hash, self._task.checksums = library.hash, checksums.buffer_info()[0]
        self._at = ctypes.addressof(self._task)

    def compare(self, words: array[int], generations: array[int]) -> None:
        """After each copy of a row, compare the word at its address with its generation."""
        self._kept += [words, generations]
        self._task.words = words.buffer_info()[0]
        self._task.generations = generations.buffer_info()[0]

    def move(self, what: int, rows: range, layers: range) -> bytes | None:
        """Do what :class:`What` says with these layers of these rows.

        One small row is moved with the interpreter's lock held: a thread that releases it for some
        microseconds may wait 5 ms for it.

        Returns: for each row :data:`IS_WRONG` and :data:`IS_GONE`; ``None``: they are all right.
        """
        faults = ctypes.create_string_buffer(len(rows))
        is_small = len(rows) == 1 and len(layers) < self._locked_layers
        is_faulty = (self._move_locked if is_small else self._move)(
            self._at, what, rows.start, len(rows), layers.start, len(layers), ctypes.addressof(faults)
        )
        return faults.raw if is_faulty else None


@attrs.frozen
class Library:
    """The compiled copies."""

    move: Callable[..., int]
    """Releases the interpreter's lock."""
    move_locked: Callable[..., int]
    """The same, and keeps it."""
    hash: int
    """Address of xxhash's XXH3_64bits."""

    def copies(
        self,
        form: PageFormat,
        places: PagePlaces | None,
        addresses: array[int],
        checksums: array[int] | None,
    ) -> Copies | None:
        """Prepare copies between rows and these places; without places rows are only hashed.

        Returns: ``None``: these places are not served.
        """
        if places is None:
            parts = _spans_of(form)
        else:
            parts = _parts_of(form, places.parts, places.page_tokens)
        return None if parts is None else Copies(self, form, parts, places, addresses, checksums)


def library() -> Library | None:
    """``None``: it was not built, or cannot be used, which is logged. Where only a descriptor or memory is
    missing to load it, the next call tries again."""
    try:
        return _loaded()
    except _UnbuiltError:
        return None
    except (OSError, AttributeError, ImportError, _UnusableError) as e:
        if exhaustion_of(e, f"loading {_FILE}") is None:
            _say_once(str(e))
        return None


class _UnbuiltError(Exception):
    """The compiled copies are not there."""


class _UnusableError(Exception):
    """The compiled copies are there and cannot be used."""


@functools.cache  # of texts, not of results
def _say_once(why: str) -> None:
    logger.warning("%s cannot be used (%s); using Python instead", _FILE, why)


@functools.cache  # of what it returns; what it raises is not kept
def _loaded() -> Library:
    if not _FILE.exists():
        raise _UnbuiltError
    import xxhash

    functions = ctypes.CDLL(str(_FILE))
    source = functions.kvplug_pages_source
    source.restype = ctypes.c_uint32
    if source() != zlib.crc32(_SOURCE.read_bytes()):
        raise _UnusableError("it was built from another pages.c")
    # xxhash's module has the functions of the C library in it. They are tried before they are believed.
    hash_of = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__).XXH3_64bits
    hash_of.restype, hash_of.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    for sample in (b"", b"kvplug", bytes(range(256)) * 17):
        if hash_of(sample, len(sample)) != xxhash.xxh3_64_intdigest(sample):
            raise _UnusableError("xxhash's XXH3_64bits is another function than its Python one")
    move, move_locked = functions.kvplug_pages_move, ctypes.PyDLL(str(_FILE)).kvplug_pages_move
    for each in (move, move_locked):
        each.restype = ctypes.c_int
        each.argtypes = (_POINTER, ctypes.c_int, _I64, _I64, _I64, _I64, _POINTER)
    address = ctypes.cast(hash_of, _POINTER).value
    assert address
    return Library(move, move_locked, address)


@functools.lru_cache(maxsize=64)
def _parts_of(form: PageFormat, places: tuple[PartPlace, ...], page_tokens: int) -> Any:
    """An array of ``struct part``; ``None``: a part has too many axes, or the cache has other sizes."""
    found = (_Part * len(places))()
    for index, ((offset, nbytes), place) in enumerate(zip(form.spans, places, strict=True)):
        token_bytes = nbytes // page_tokens
        run = step = place.itemsize
        axes: list[tuple[int, int, int]] = []
        for count, stride in zip(reversed(place.counts), reversed(place.strides), strict=True):
            if count == 1:
                continue
            if not axes and stride == run:
                run *= count
            else:
                axes.append((stride, count, step))
            step *= count
        if len(axes) > _MAX_AXES or step * page_tokens != nbytes:
            return None
        axes.sort(reverse=True)  # what is furthest apart in the cache is outermost
        part = found[index]
        part.offset, part.nbytes = offset, nbytes
        part.block_stride, part.token_stride = place.block_stride, place.token_stride
        part.token_bytes, part.run = token_bytes, run
        part.is_dense = not axes and place.token_stride == token_bytes
        part.num_axes = len(axes)
        for at, (stride, count, step) in enumerate(axes):
            part.in_cache[at], part.counts[at], part.in_row[at] = stride, count, step
    return found


@functools.lru_cache(maxsize=64)
def _spans_of(form: PageFormat) -> Any:
    """The same of rows that are only hashed."""
    found = (_Part * len(form.parts))()
    for part, (offset, nbytes) in zip(found, form.spans, strict=True):
        part.offset, part.nbytes = offset, nbytes
    return found
