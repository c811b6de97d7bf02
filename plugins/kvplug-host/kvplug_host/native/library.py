"""The functions of pages.c, if they were compiled with this package and xxhash's own function can be called.

:func:`kvplug_host.copying.load` and ``save`` have checked that rows and pages fit together before they come
here; the caches' addresses and strides are those of tensors, and block ids were checked with their table."""

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

from kvplug.transport import PageFormat, PagePlaces, PageRows, PartPlace, exhaustion_of

logger = logging.getLogger(__name__)

_FILE: Final = Path(__file__).with_name("_pages.so")
_SOURCE: Final = Path(__file__).with_name("pages.c")
_MAX_AXES: Final = 4
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
        ("row_offsets", _POINTER),
        ("num_rows", _I64),
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
        ("is_wrong", _POINTER),
    )


@attrs.frozen
class Library:
    """The compiled copies. Both release the interpreter's lock."""

    _move: Callable[[Any, int], None]
    _hash: int
    """Address of xxhash's XXH3_64bits."""

    def load(
        self, form: PageFormat, rows: PageRows, places: PagePlaces, layers: range, expected: bytes
    ) -> list[bool] | None:
        """Verify rows of these layers, and copy them to their places.

        Args:
            expected: the checksums of each row, one after the other; empty: nothing is verified.

        Returns: for each row whether a checksum is another; ``None``: these places are not served.
        """
        parts = _parts_of(form, places.parts, places.page_tokens)
        if parts is None:
            return None
        wrong = bytearray(len(rows))
        checksums = array("Q", expected)
        task, kept = self._task(form, rows, places, layers, parts)
        if checksums:
            task.hash, task.checksums = self._hash, checksums.buffer_info()[0]
            task.is_wrong = ctypes.addressof((ctypes.c_char * len(wrong)).from_buffer(wrong))
        self._move(ctypes.byref(task), 1)
        del kept
        return list(map(bool, wrong))

    def save(
        self, form: PageFormat, rows: PageRows, places: PagePlaces, *, checksums: bool
    ) -> list[bytes] | None:
        """Copy whole pages from their places into the rows.

        Returns: the checksums of each row, if they are wanted, else as many empty strings; ``None``: these
            places are not served.
        """
        parts = _parts_of(form, places.parts, places.page_tokens)
        if parts is None:
            return None
        each = form.num_layers * len(form.parts) if checksums else 0
        made = array("Q", bytes(8 * each * len(rows)))
        task, kept = self._task(form, rows, places, range(form.num_layers), parts)
        if checksums:
            task.hash, task.checksums = self._hash, made.buffer_info()[0]
        self._move(ctypes.byref(task), 0)
        del kept
        all_bytes = made.tobytes()
        return [all_bytes[at * each * 8 : (at + 1) * each * 8] for at in range(len(rows))]

    def _task(
        self, form: PageFormat, rows: PageRows, places: PagePlaces, layers: range, parts: Any
    ) -> tuple[_Task, tuple[Any, ...]]:
        """The task without checksums, and what must live as long as it does."""
        offsets = array("q", rows.offsets)
        bases = places.bases
        task = _Task(
            rows=rows.address,
            row_offsets=offsets.buffer_info()[0],
            num_rows=len(rows),
            num_layers=len(layers),
            num_parts=len(form.parts),
            layer_nbytes=form.layer_nbytes,
            parts=ctypes.addressof(parts),
            bases=bases.buffer_info()[0] + layers.start * len(form.parts) * bases.itemsize,
            ids=places.block_ids.buffer_info()[0],
            block_tokens=places.block_tokens,
            page_tokens=places.page_tokens,
            first_token=places.first_token,
            begin=places.writable.start,
            end=places.writable.stop,
        )
        return task, (offsets, bases, parts, places, rows)


def library() -> Library | None:
    """``None``: it was not built, or cannot be used, which is logged. Where only a descriptor or memory is
    missing to load it, the next call tries again."""
    try:
        return _loaded() if _FILE.exists() else None
    except (OSError, AttributeError, ImportError, _UnusableError) as e:
        if exhaustion_of(e, f"loading {_FILE}") is None:
            _say_once(str(e))
        return None


class _UnusableError(Exception):
    """The compiled copies are there and cannot be used."""


@functools.cache  # of texts, not of results
def _say_once(why: str) -> None:
    logger.warning("%s cannot be used (%s); using Python instead", _FILE, why)


@functools.cache  # of what it returns; what it raises is not kept
def _loaded() -> Library:
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
    move = functions.kvplug_pages_move
    move.restype, move.argtypes = None, (_POINTER, ctypes.c_int)
    address = ctypes.cast(hash_of, _POINTER).value
    assert address
    return Library(move, address)


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
