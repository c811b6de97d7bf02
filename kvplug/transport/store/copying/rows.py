"""Copies between rows of pages and the caller's memory, with the checksums.

Compiled code does both at once where it was built and can reach the memory (pages.c); elsewhere Python does.
What is the same for all steps of a request is prepared once."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of
from kvplug.transport.store.copying.library import IS_GONE, Copies, What, library
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.memory import PageMemory, PageRows
from kvplug.transport.store.results import MissReason


@attrs.frozen(eq=False)
class RowGenerations:
    """What the slots of a request's pages must hold after a copy, where the store may use them again."""

    words: memoryview
    """The memory of all slots, as words."""
    at: array[int]
    """The word of each page's slot, counted in words."""
    expected: array[int]
    """The value that each of these words must have after the copy."""

    def are_there(self, pages: Sequence[int]) -> list[bool]:
        """Whether the slots of these pages still hold them."""
        words, at, expected = self.words, self.at, self.expected
        return [words[at[page]] == expected[page] for page in pages]


class PageLoading:
    """Pages in rows, which are verified and copied into the caller's memory, some layers at a time.

    Threads may share it."""

    def __init__(
        self,
        seal: PageSeal,
        memory: PageMemory,
        first: int,
        headers: Sequence[bytes],
        rows: PageRows,
        layers: range,
        *,
        generations: RowGenerations | None = None,
        native: bool,
    ) -> None:
        """
        Args:
            first: the page of ``memory`` that the first row belongs to.
            headers: of each page; they have passed :meth:`PageSeal.check_header`. An empty one: that page is
                never loaded.
            rows: one for each page.
            layers: those that the rows have.
            generations: of the slots that the rows are in; ``None``: they stay what they are.
            native: whether compiled code may be used.
        """
        self._seal, self._memory, self._first = seal, memory, first
        self._headers, self._rows, self._layers, self._generations = headers, rows, layers, generations
        self._copies = self._prepared() if native else None

    def _prepared(self) -> Copies | None:
        form, rows, layers = self._memory.format, self._rows, self._layers
        compiled = library()
        if compiled is None or rows.nbytes != len(layers) * form.layer_nbytes:
            return None
        places = self._memory.places(self._first, len(rows))
        if places is None:
            return None
        origin = rows.address - layers.start * form.layer_nbytes
        copies = compiled.copies(
            form,
            places,
            array("q", [origin + offset for offset in rows.offsets]),
            self._checksums(form) if self._seal.checksums else None,
        )
        generations = self._generations
        if copies is not None and generations is not None:
            begin, step = address_of(generations.words), generations.words.itemsize
            copies.compare(array("q", [begin + at * step for at in generations.at]), generations.expected)
        return copies

    def _checksums(self, form: PageFormat) -> array[int]:
        at = self._seal.checksums_at(form, range(form.num_layers))
        none = bytes(form.num_layers * len(form.parts) * array("Q").itemsize)
        return array("Q", b"".join([header[at] or none for header in self._headers]))

    def load(self, pages: range, layers: range) -> list[MissReason | None] | None:
        """Verify these layers of these rows, and copy them.

        Returns: for each row why it must not be used; ``None``: all are right, as far as the seal can tell.
            These layers of a row that must not be used are zeros in the caller's memory.
        """
        if self._copies is None:
            return self._load_in_python(pages, layers)
        faults = self._copies.move(What.LOAD, pages, layers)
        if faults is None:
            return None
        found = [
            None if not each else MissReason.EVICTED if each & IS_GONE else MissReason.CORRUPT
            for each in faults
        ]
        self._clear(pages, found, layers)
        return found

    def _clear(self, pages: range, found: Sequence[MissReason | None], layers: range) -> None:
        for page, reason in zip(pages, found, strict=True):
            if reason is not None:
                _write_zeros(self._memory, self._first + page, layers)

    def _load_in_python(self, pages: range, layers: range) -> list[MissReason | None]:
        form, step = self._memory.format, self._memory.format.layer_nbytes
        begin, end = layers.start - self._layers.start, layers.stop - self._layers.start
        rows = self._rows[pages.start : pages.stop].columns(begin * step, end * step)
        found = [
            self._seal.check_layers(form, self._headers[page], layers.start, rows.row(index))
            for index, page in enumerate(pages)
        ]
        self._memory.scatter(self._first + pages.start, rows, layers)
        if self._generations is not None:
            there = self._generations.are_there(pages)
            found = [
                check if is_there else MissReason.EVICTED
                for check, is_there in zip(found, there, strict=True)
            ]
        self._clear(pages, found, layers)
        return found


class PageReading:
    """Pages that are read one at a time, each into a row of its own, where they are verified and copied into
    the caller's memory.

    Threads may share it, each with other pages."""

    def __init__(self, seal: PageSeal, memory: PageMemory, *, native: bool = True) -> None:
        """``native``: whether compiled code may be used."""
        form, count = memory.format, len(memory)
        self._seal, self._memory = seal, memory
        self._each = form.num_layers * len(form.parts) if seal.checksums else 0
        self._layers = range(form.num_layers)
        self._copies: Copies | None = None
        compiled = library() if native and count else None
        places = memory.places(0, count) if compiled is not None else None
        if compiled is not None and places is not None:
            sums = array("Q", bytes(8 * count * self._each)) if seal.checksums else None
            self._copies = compiled.copies(form, places, array("q", bytes(8 * count)), sums)

    def load(self, page: int, header: bytes | memoryview, row: memoryview) -> MissReason | None:
        """Copy one page, and verify it.

        Args:
            header: has passed :meth:`PageSeal.check_header`.
            row: all of the page's bytes.

        Returns: why the page must not be used, as far as the seal can tell. Then its memory is zeros, or as
            it was before.

        Raises:
            LayoutError: the row is not as long as a page.
        """
        form, copies = self._memory.format, self._copies
        if copies is None:
            reason = self._seal.check_layers(form, header, 0, row)
            if reason is None:
                self._memory.scatter(page, PageRows.dense(row, 1, len(row)))
            return reason
        if len(row) != form.nbytes:
            raise LayoutError(f"a row of {len(row)} bytes for a page of {form.nbytes}")
        copies.addresses[page] = address_of(row)
        if copies.checksums is not None:
            expected = bytes(header[self._seal.checksums_at(form, self._layers)])
            if len(expected) != 8 * self._each:
                return MissReason.FORMAT
            copies.checksums[page * self._each : (page + 1) * self._each] = array("Q", expected)
        if copies.move(What.LOAD, range(page, page + 1), self._layers) is None:
            return None
        _write_zeros(self._memory, page, self._layers)
        return MissReason.CORRUPT


def _write_zeros(memory: PageMemory, page: int, layers: range) -> None:
    """Overwrite wrong bytes, which were copied before they were found to be wrong.

    Read as numbers they may be NaN. An attention kernel that multiplies masked places by 0 carries them into
    its output: an engine that computes a missed block again, in chunks, reads all of it after the first one.
    """
    nbytes = len(layers) * memory.format.layer_nbytes
    memory.scatter(page, PageRows.dense(memoryview(bytearray(nbytes)), 1, nbytes), layers)


def verify_rows(
    seal: PageSeal, form: PageFormat, headers: Sequence[bytes], rows: PageRows, *, native: bool
) -> list[MissReason | None]:
    """Why the bytes in each row are not those of the page with this header; ``None`` where they are.

    ``headers`` have passed :meth:`PageSeal.check_header`; ``native``: whether compiled code may be used.
    """
    compiled = library() if native and seal.checksums and headers else None
    if compiled is None:
        return [seal.check_layers(form, header, 0, rows.row(index)) for index, header in enumerate(headers)]
    layers, origin = range(form.num_layers), rows.address
    at = seal.checksums_at(form, layers)
    expected = array("Q", b"".join([header[at] for header in headers]))
    copies = compiled.copies(form, None, array("q", [origin + offset for offset in rows.offsets]), expected)
    assert copies is not None, "rows that are only hashed need no places"
    faults = copies.move(What.VERIFY, range(len(rows)), layers) or bytes(len(rows))
    return [MissReason.CORRUPT if each else None for each in faults]


def _from_memory(
    memory: PageMemory, first: int, addresses: array[int], checksums: array[int] | None
) -> Copies | None:
    """Copies of whole pages of ``memory``, from page ``first`` on, into rows; ``None``: Python must do."""
    count, compiled = len(addresses), library()
    places = memory.places(first, count) if count else None
    if compiled is None or places is None or len(places.writable) != count * places.page_tokens:
        return None
    return compiled.copies(memory.format, places, addresses, checksums)


class PageFilling:
    """Pages of the caller's memory, which are copied into rows layer by layer, without checksums."""

    def __init__(self, source: PageMemory, first: int, rows: PageRows, *, native: bool) -> None:
        """
        Args:
            first: the page of ``source`` that the first row is for.
            native: whether compiled code may be used.
        """
        self.source = source
        """The memory of the pages."""
        self.first = first
        """The page of ``source`` that the first row is for."""
        self._rows = rows
        self._copies: Copies | None = None
        if native and rows.nbytes == source.format.nbytes:
            origin = rows.address
            addresses = array("q", [origin + offset for offset in rows.offsets])
            self._copies = _from_memory(source, first, addresses, None)

    def fill(self, layers: range) -> None:
        """Copy these layers.

        Raises:
            LayoutError: they are not consecutive layers of the format.
        """
        form = self.source.format
        if not 0 <= layers.start <= layers.stop <= form.num_layers or layers.step != 1:
            raise LayoutError(f"{layers} of {form.num_layers} layers")
        if self._copies is not None:
            self._copies.move(What.SAVE, range(len(self._rows)), layers)
            return
        step = form.layer_nbytes
        self.source.gather(self.first, self._rows.columns(layers.start * step, layers.stop * step), layers)


class PageSaving:
    """Pages of the caller's memory, which are copied into rows, some at a time. Threads may share it."""

    def __init__(self, seal: PageSeal, memory: PageMemory, *, native: bool = True) -> None:
        """``native``: whether compiled code may be used."""
        self._memory = memory
        self._copies: Copies | None = None
        self._each = 0
        """Checksums of a page."""
        if native:
            form, count = memory.format, len(memory)
            self._each = form.num_layers * len(form.parts) if seal.checksums else 0
            made = array("Q", bytes(8 * count * self._each)) if seal.checksums else None
            self._copies = _from_memory(memory, 0, array("q", bytes(8 * count)), made)

    def save(self, first: int, rows: PageRows) -> Sequence[bytes | None]:
        """Copy whole pages, from page ``first`` on, into the rows: one page each.

        Returns: for each page its checksums, as :meth:`PageSeal.header` takes them.
        """
        if self._copies is None:
            self._memory.gather(first, rows)
            return [None] * len(rows)
        return self._moved(self._copies, What.SAVE, first, rows)

    def hash(self, first: int, rows: PageRows) -> Sequence[bytes | None]:
        """The same of rows that have the pages already."""
        return (
            [None] * len(rows) if self._copies is None else self._moved(self._copies, What.HASH, first, rows)
        )

    def _moved(self, copies: Copies, what: int, first: int, rows: PageRows) -> Sequence[bytes | None]:
        pages, address = range(first, first + len(rows)), rows.address
        for page, offset in zip(pages, rows.offsets, strict=True):
            copies.addresses[page] = address + offset
        copies.move(what, pages, range(self._memory.format.num_layers))
        if copies.checksums is None:
            return [b""] * len(rows)
        each = self._each
        return [copies.checksums[page * each : (page + 1) * each].tobytes() for page in pages]
