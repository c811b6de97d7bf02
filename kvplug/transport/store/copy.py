"""Copies between pages of a caller's memory and rows of bytes, with the checksums.

pages.c copies and hashes at once where it was compiled and can reach the memory; elsewhere Python does both.
What all steps of a request share is prepared once. pages.c checks nothing: caches have the addresses and
strides of tensors, block ids were checked with their table, and rows have the length of their layers."""

from __future__ import annotations

import ctypes
import functools
import importlib
import logging
import zlib
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import attrs

from kvplug.errors import LayoutError
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.wire.copying import address_of
from kvplug.transport.block_views import PartPlace
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.memory import PageMemory, PagePlaces, PageRows
from kvplug.transport.store.results import MissReason

logger = logging.getLogger(__name__)

_FILE: Final = Path(__file__).with_name("_pages.so")
_SOURCE: Final = Path(__file__).with_name("pages.c")
_MAX_AXES: Final = 4
_LOCK_FREE_BYTES: Final = 256 << 10
"""Single pages of this size or larger are copied without the interpreter's lock."""
_SAVE, _LOAD, _HASH, _VERIFY = range(4)
"""``enum what`` of pages.c."""
_IS_GONE: Final = 2
"""A value of ``enum fault``."""
_NO_SEAL: Final = PageSeal(checksums=False)


class _Used(NamedTuple):
    """The arguments of :meth:`PageCopy.use`."""

    first: int
    rows: PageRows
    layers: range


class PageCopy:
    """Copies pages between a caller's memory and the rows given to :meth:`use`, some layers at a time.

    Threads may share it if each works on different pages or layers.

    >>> from kvplug.transport.store.format import opaque_format
    >>> from kvplug.transport.store.memory import PageBuffers
    >>> pages, rows = PageBuffers.empty(opaque_format(4), 1), PageRows.dense(memoryview(bytearray(4)), 1, 4)
    >>> pages.rows().buffer[:] = b"abcd"
    >>> copy = PageCopy(pages)
    >>> copy.use(0, rows)
    >>> copy.save(range(1))
    [None]
    >>> bytes(rows.buffer)
    b'abcd'
    """

    @attrs.frozen(eq=False)
    class Generations:
        """What the slots of a request's pages must hold after a copy, where the store may reuse slots."""

        words: memoryview
        """The memory of all slots, as words."""
        at: array[int]
        """The word of each page's slot, counted in words."""
        expected: array[int]
        """The value that each of these words must have after the copy."""

        def are_there(self, pages: Sequence[int]) -> list[bool]:
            """Whether the slots of these pages still hold the pages."""
            words, at, expected = self.words, self.at, self.expected
            return [words[at[page]] == expected[page] for page in pages]

    def __init__(
        self,
        memory: PageMemory,
        seal: PageSeal = _NO_SEAL,
        *,
        generations: PageCopy.Generations | None = None,
        native: bool = True,
    ) -> None:
        """
        Args:
            seal: whether pages have checksums; by default they have none.
            generations: those of the slots that the pages' rows lie in, checked by :meth:`load`; ``None`` if
                the slots cannot be reused.
            native: whether compiled code may be used.
        """
        form, count = memory.format, len(memory)
        self._memory, self._seal, self._generations = memory, seal, generations
        self._all_layers = range(form.num_layers)
        self._count = count
        self._rows: list[_Used | None] = []
        self._headers: list[bytes | memoryview] = []
        self._each = form.num_layers * len(form.parts) if seal.checksums else 0
        """Checksums of a page."""
        self._library: _Library | None = None
        self._saves = False
        """Whether compiled code may read the memory."""
        compiled = library() if native and count else None
        places = None if compiled is None else memory.places()
        parts = None if places is None else _parts_of(form, places.parts, places.page_tokens)
        if compiled is not None and places is not None and parts is not None:
            self._library, self._saves = compiled, places.is_whole
            self._prepare(compiled, parts, places)
        if not self._saves:  # Python reads these
            self._rows, self._headers = [None] * count, [b""] * count

    def _prepare(self, compiled: _Library, parts: Any, places: PagePlaces) -> None:
        form, count = self._memory.format, self._count
        self._addresses = array("q", bytes(8 * count))
        self._checksums = array("Q", bytes(8 * count * self._each))
        self._locked_layers = -(-_LOCK_FREE_BYTES // form.layer_nbytes)
        self._kept = [parts, places]
        """Kept alive, since the task points to them."""
        task = _Task(
            rows=self._addresses.buffer_info()[0],
            num_layers=form.num_layers,
            num_parts=len(form.parts),
            layer_nbytes=form.layer_nbytes,
            parts=ctypes.addressof(parts),
            bases=places.bases.buffer_info()[0],
            ids=places.ids.buffer_info()[0],
            ids_step=places.ids_step,
            block_tokens=places.block_tokens,
            page_tokens=places.page_tokens,
            first_token=places.first_token,
            begins=places.begins.buffer_info()[0],
            end=places.end,
        )
        if self._each:
            task.hash, task.checksums = compiled.hash, self._checksums.buffer_info()[0]
        if (generations := self._generations) is not None:
            begin, step = address_of(generations.words), generations.words.itemsize
            words = array("q", [begin + at * step for at in generations.at])
            self._kept.append(words)
            task.words, task.generations = words.buffer_info()[0], generations.expected.buffer_info()[0]
        self._task, self._task_at = task, ctypes.addressof(task)

    def use(
        self,
        first: int,
        rows: PageRows,
        headers: Sequence[bytes | memoryview] = (),
        layers: range | None = None,
    ) -> None:
        """Set the rows of pages ``first`` and on, one row for each page. The rows' memory must stay alive
        while pages are copied.

        Args:
            headers: one for each page, for :meth:`load` and :meth:`verify`; each has passed
                :meth:`PageSeal.check_header`, or is empty if its page is never loaded.
            layers: the consecutive layers that the rows have; ``None``: all.

        Raises:
            LayoutError: there are fewer pages than rows, the length of the rows is not that of the layers,
                or the headers do not fit such pages.
        """
        form, count = self._memory.format, len(rows)
        layers = self._all_layers if layers is None else layers
        self._check(range(first, first + count), layers)
        if rows.nbytes != len(layers) * form.layer_nbytes:
            raise LayoutError(
                f"rows of {rows.nbytes} bytes do not fit {len(layers)} layers of {form.layer_nbytes} bytes"
            )
        pages = slice(first, first + count)
        if not self._saves:
            self._rows[pages] = [_Used(first, rows, layers)] * count
            if headers:
                self._headers[pages] = headers
        if self._library is None or not count:
            return
        origin = rows.address - layers.start * form.layer_nbytes
        self._addresses[pages] = array("q", [origin + offset for offset in rows.offsets])
        if self._each and headers:
            at, none = self._seal.checksums_at(form, self._all_layers), bytes(8 * self._each)
            given = b"".join([header[at] or none for header in headers])
            if len(given) != count * len(none):  # an array of another length would move, and pages.c uses it
                raise LayoutError(f"the {len(headers)} headers given do not fit {count} pages")
            self._checksums[first * self._each : (first + count) * self._each] = array("Q", given)

    def load(self, pages: range, layers: range | None = None) -> list[MissReason | None] | None:
        """Verify these layers of consecutive pages from one call of :meth:`use`, and copy them into the
        memory.

        Returns: for each page why it must not be used, or ``None`` if all are right, as far as the seal can
            tell. A page that must not be used has zeros in these layers.
        """
        layers = self._all_layers if layers is None else layers
        if self._library is None:
            found = self._load_in_python(pages, layers)
        else:
            faults = self._move(self._library, _LOAD, pages, layers)
            if faults is None:
                return None
            found = [
                None if not each else MissReason.EVICTED if each & _IS_GONE else MissReason.CORRUPT
                for each in faults
            ]
        for page, reason in zip(pages, found, strict=True):
            if reason is not None:
                self._write_zeros(page, layers)
        return found

    def _load_in_python(self, pages: range, layers: range) -> list[MissReason | None]:
        rows = self._rows_of(pages, layers)
        found = self._checked(pages, layers, rows)
        self._memory.scatter(pages.start, rows, layers)
        if self._generations is not None:
            there = self._generations.are_there(pages)
            found = [
                check if is_there else MissReason.EVICTED
                for check, is_there in zip(found, there, strict=True)
            ]
        return found

    def _checked(self, pages: range, layers: range, rows: PageRows) -> list[MissReason | None]:
        form = self._memory.format
        return [
            self._seal.check_layers(form, self._headers[page], layers.start, rows.row(index))
            for index, page in enumerate(pages)
        ]

    def _write_zeros(self, page: int, layers: range) -> None:
        """Overwrite bytes that were found to be wrong after they were copied.

        They may be NaN. An engine that recomputes a missed block in chunks reads the whole block after the
        first chunk, and an attention kernel that multiplies masked places by 0 carries NaN into its output.
        """
        nbytes = len(layers) * self._memory.format.layer_nbytes
        self._memory.scatter(page, PageRows.dense(memoryview(bytearray(nbytes)), 1, nbytes), layers)

    def verify(self, pages: range) -> list[MissReason | None]:
        """Return for each page why its row does not match its header, or ``None`` if it does. Does not touch
        the memory."""
        if self._library is None:
            return self._checked(pages, self._all_layers, self._rows_of(pages, self._all_layers))
        if not self._each:
            return [None] * len(pages)
        faults = self._move(self._library, _VERIFY, pages, self._all_layers) or bytes(len(pages))
        return [MissReason.CORRUPT if each else None for each in faults]

    def save(self, pages: range, layers: range | None = None) -> list[bytes | None]:
        """Copy these layers of consecutive pages from one call of :meth:`use` out of the memory.

        Returns: for each page the checksums of all its layers, as :meth:`PageSeal.header` takes them, or
            ``None`` if they were not made.
        """
        layers = self._all_layers if layers is None else layers
        if self._library is None or not self._saves:
            self._memory.gather(pages.start, self._rows_of(pages, layers), layers)
            return [None] * len(pages)
        self._move(self._library, _SAVE, pages, layers)
        return self._made(pages)

    def hash(self, pages: range) -> list[bytes | None]:
        """Return the checksums, as :meth:`save` does, of pages that their rows already have."""
        if self._library is None:
            return [None] * len(pages)
        self._move(self._library, _HASH, pages, self._all_layers)
        return self._made(pages)

    def _made(self, pages: range) -> list[bytes | None]:
        each = self._each
        if not each:
            return [None] * len(pages)
        return [self._checksums[page * each : (page + 1) * each].tobytes() for page in pages]

    def _rows_of(self, pages: range, layers: range) -> PageRows:
        """Return these layers of the rows of these pages."""
        used = self._rows[pages.start]
        assert used is not None, "the rows of these pages were not named"
        index, step = pages.start - used.first, self._memory.format.layer_nbytes
        begin, end = layers.start - used.layers.start, layers.stop - used.layers.start
        return used.rows[index : index + len(pages)].columns(begin * step, end * step)

    def _check(self, pages: range, layers: range) -> None:
        if not 0 <= pages.start <= pages.stop <= self._count or pages.step != 1:
            raise LayoutError(f"{pages} are not consecutive pages out of {self._count}")
        if not 0 <= layers.start <= layers.stop <= self._all_layers.stop or layers.step != 1:
            raise LayoutError(f"{layers} are not consecutive layers out of {self._all_layers.stop}")

    def _move(self, compiled: _Library, what: int, pages: range, layers: range) -> bytes | None:
        """Run operation ``what`` on these layers of these pages.

        Holds the interpreter's lock for one small page: a thread that releases the lock for some microseconds
        may wait 5 ms to get it back.

        Returns: for each page its ``enum fault`` of pages.c, or ``None`` if all are right.
        """
        self._check(pages, layers)
        faults = ctypes.create_string_buffer(len(pages))
        is_small = len(pages) == 1 and len(layers) < self._locked_layers
        is_faulty = (compiled.move_locked if is_small else compiled.move)(
            self._task_at, what, pages.start, len(pages), layers.start, len(layers), ctypes.addressof(faults)
        )
        return faults.raw if is_faulty else None


# -- pages.c --------------------------------------------------------------------------------------

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
        ("ids_step", _I64),
        ("block_tokens", _I64),
        ("page_tokens", _I64),
        ("first_token", _I64),
        ("begins", _POINTER),
        ("end", _I64),
        ("hash", _POINTER),
        ("checksums", _POINTER),
        ("words", _POINTER),
        ("generations", _POINTER),
    )


class _Library(NamedTuple):
    """The functions of pages.c."""

    move: Callable[..., int]
    """Releases the interpreter's lock."""
    move_locked: Callable[..., int]
    """The same function, but keeps the interpreter's lock."""
    hash: int
    """Address of xxhash's XXH3_64bits."""


def library() -> _Library | None:
    """Return the compiled functions, or ``None`` if they were not built or cannot be used, which is logged.
    If only a descriptor or memory is missing to load them, the next call tries again."""
    try:
        return _loaded()
    except (OSError, AttributeError, ImportError) as e:
        if NamedExhaustion.of(e, f"loading {_FILE}") is None:
            _warn_once(str(e))
        return None


@functools.cache  # logs each text once
def _warn_once(why: str) -> None:
    logger.warning("%s cannot be used (%s); using Python instead", _FILE, why)


@functools.cache  # does not cache exceptions
def _loaded() -> _Library | None:
    if not _FILE.exists():
        return None
    import xxhash

    functions = ctypes.CDLL(str(_FILE))
    source = functions.kvplug_pages_source
    source.restype = ctypes.c_uint32
    if source() != zlib.crc32(_SOURCE.read_bytes()):
        raise ImportError("it was built from another pages.c")
    # xxhash's module contains the functions of the C library. Samples show that the one found is the same.
    hash_of = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__).XXH3_64bits
    hash_of.restype, hash_of.argtypes = ctypes.c_uint64, (ctypes.c_char_p, ctypes.c_size_t)
    for sample in (b"", b"kvplug", bytes(range(256)) * 17):
        if hash_of(sample, len(sample)) != xxhash.xxh3_64_intdigest(sample):
            raise ImportError("xxhash's XXH3_64bits is another function than its Python one")
    move, move_locked = functions.kvplug_pages_move, ctypes.PyDLL(str(_FILE)).kvplug_pages_move
    for each in (move, move_locked):
        each.restype = ctypes.c_int
        each.argtypes = (_POINTER, ctypes.c_int, _I64, _I64, _I64, _I64, _POINTER)
    address = ctypes.cast(hash_of, _POINTER).value
    assert address
    return _Library(move, move_locked, address)


@functools.lru_cache(maxsize=64)
def _parts_of(form: PageFormat, places: tuple[PartPlace, ...], page_tokens: int) -> Any:
    """Return an array of ``struct part``, or ``None`` if a part has too many axes or another size."""
    found = (_Part * len(places))()
    for index, ((offset, nbytes), place) in enumerate(zip(form.spans, places, strict=True)):
        token_bytes, axes = place.run_bytes, list[tuple[int, int, int]]()
        for count, stride in reversed(place.axes):
            axes.append((stride, count, token_bytes))
            token_bytes *= count
        if len(axes) > _MAX_AXES or token_bytes * page_tokens != nbytes:
            return None
        part = found[index]
        part.offset, part.nbytes = offset, nbytes
        part.block_stride, part.token_stride = place.block_stride, place.token_stride
        part.token_bytes, part.run = token_bytes, place.run_bytes
        part.is_dense = not axes and place.token_stride == token_bytes
        part.num_axes = len(axes)
        for at, (stride, count, step) in enumerate(sorted(axes, reverse=True)):
            # the axis with the largest stride in the cache is outermost
            part.in_cache[at], part.counts[at], part.in_row[at] = stride, count, step
    return found
