"""Copies between pages of a caller's memory and rows of bytes, with the checksums.

pages.c copies and hashes in one pass. :class:`PageCopy` prepares once what all steps of a request share.
pages.c checks nothing: addresses and strides come from tensors, block ids were checked with their table, and
:meth:`PageCopy.use` checks the length of the rows."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from typing import Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of
from kvplug.transport.store.compiled import library
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.memory import PageMemory, PageRows
from kvplug.transport.store.results import MissReason

_LOCK_FREE_BYTES: Final = 256 << 10
"""Single pages of this size or larger are copied without the interpreter's lock."""
_SAVE, _LOAD, _HASH, _CHECK = range(4)
"""``enum what`` of pages.c."""
_IS_GONE: Final = 2
"""A value of ``enum fault``."""
_NO_SEAL: Final = PageSeal(checksums=False)


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
        """The generations that the slots of a request's pages must have after a copy; for stores that may
        reuse slots."""

        words: memoryview
        """The memory of all slots, as words."""
        at: array[int]
        """The index in ``words`` of each page's generation."""
        expected: array[int]
        """The value that each of these words must have after the copy."""

        def are_there(self, pages: Sequence[int]) -> list[bool]:
            """Whether each of these pages is still in its slot."""
            words, at, expected = self.words, self.at, self.expected
            return [words[at[page]] == expected[page] for page in pages]

    def __init__(
        self,
        memory: PageMemory,
        seal: PageSeal = _NO_SEAL,
        *,
        generations: PageCopy.Generations | None = None,
    ) -> None:
        """
        Args:
            seal: whether pages have checksums; by default they have none.
            generations: those of the slots that the pages' rows lie in, checked by :meth:`load`; ``None`` if
                the slots cannot be reused.

        Raises:
            LayoutError: the memory cannot be copied from or into.
            UnsupportedError: kvplug's compiled part is missing.
        """
        form, count = memory.format, len(memory)
        self._memory, self._seal, self._generations = memory, seal, generations
        self._all_layers = range(form.num_layers)
        self._count = count
        self._library = library()
        self._places = places = memory.places()
        self._each = form.num_layers * len(form.parts) if seal.checksums else 0
        """Number of checksums of a page."""
        self._addresses = array("q", bytes(8 * count))
        self._checksums = array("Q", bytes(8 * count * self._each))
        self._locked_layers = -(-_LOCK_FREE_BYTES // form.layer_nbytes)
        self._words = array("q")
        if generations is not None:
            begin, step = address_of(generations.words), generations.words.itemsize
            self._words = array("q", [begin + at * step for at in generations.at])
        # struct task
        self._task = array(
            "q",
            [
                _at(self._addresses),
                form.num_layers,
                len(form.parts),
                form.layer_nbytes,
                _at(places.parts),
                _at(places.ids),
                places.ids_step,
                places.block_tokens,
                places.page_tokens,
                places.first_token,
                _at(places.begins),
                places.end,
                self._library.hash if self._each else 0,
                _at(self._library.stream),
                _at(self._checksums),
                0 if generations is None else _at(self._words),
                0 if generations is None else _at(generations.expected),
            ],
        )
        self._task_at = _at(self._task)

    def use(
        self,
        first: int,
        rows: PageRows,
        headers: Sequence[bytes | memoryview] = (),
        layers: range | None = None,
    ) -> None:
        """Set the rows of the pages from ``first`` on, one row for each page. The rows' memory must stay
        alive while pages are copied.

        Args:
            headers: one for each page, for :meth:`load`; each has passed
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
        origin = rows.address - layers.start * form.layer_nbytes
        self._addresses[pages] = array("q", [origin + offset for offset in rows.offsets])
        if self._each and headers:
            if len(headers) != count:
                raise LayoutError(f"the {len(headers)} headers given do not fit {count} pages")
            self.expect(first, headers)

    def load(self, pages: range, layers: range | None = None) -> list[MissReason | None] | None:
        """Verify these layers of consecutive pages in rows set by one :meth:`use`, and copy them into the
        memory.

        Returns: for each page why it must not be used (or ``None``); ``None`` if all are right, as far as the
            seal can tell. A page that must not be used has zeros in these layers.

        Raises:
            LayoutError: the memory is read-only.
        """
        layers = self._all_layers if layers is None else layers
        if not self._places.is_writable:
            raise LayoutError("the memory of these pages is read-only")
        with self._memory.hold(pages):
            faults = self._move(_LOAD, pages, layers)
            if faults is None:
                return None
            found: list[MissReason | None] = []
            for page, fault in zip(pages, faults, strict=True):
                if fault:
                    self.clear(page, layers)
                found.append(
                    MissReason.EVICTED if fault & _IS_GONE else MissReason.CORRUPT if fault else None
                )
        return found

    def clear(self, page: int, layers: range) -> None:
        """Write zeros over these layers of a page whose bytes are wrong or incomplete.

        Such bytes may be NaN. An engine that recomputes a missed block in chunks reads the whole block after
        the first chunk, and an attention kernel that multiplies masked places by 0 outputs NaN.
        """
        nbytes = len(layers) * self._memory.format.layer_nbytes
        zeros, copy = memoryview(bytearray(nbytes)), PageCopy(self._memory)
        copy.use(page, PageRows.dense(zeros, 1, nbytes), layers=layers)
        copy._move(_LOAD, range(page, page + 1), layers)

    def expect(self, first: int, headers: Sequence[bytes | memoryview]) -> None:
        """Set the headers of the pages from ``first`` on, for :meth:`check`; they are like those of
        :meth:`use`.

        Raises:
            LayoutError: a header does not have as many checksums as a page of this memory.
        """
        form, count = self._memory.format, len(headers)
        self._check(range(first, first + count), self._all_layers)
        at, none = self._seal.checksums_at(form, self._all_layers), bytes(8 * self._each)
        given = b"".join([header[at] or none for header in headers])
        if len(given) != count * len(none):  # with another length the array would move, and pages.c uses it
            raise LayoutError(f"the {len(headers)} headers given do not fit {count} pages")
        self._checksums[first * self._each : (first + count) * self._each] = array("Q", given)

    def check(self, pages: range, layers: range) -> list[MissReason | None] | None:
        """Verify these layers of consecutive pages that were received straight into the memory, not in rows.
        The memory's :attr:`PageMemory.block_bytes` must not be 0.

        Returns: as :meth:`load`. A page that must not be used has zeros in these layers.
        """
        faults = self._move(_CHECK, pages, layers) if self._each else None
        if faults is None:
            return None
        for page, fault in zip(pages, faults, strict=True):
            if fault:
                self.clear(page, layers)
        return [MissReason.CORRUPT if fault else None for fault in faults]

    def save(self, pages: range, layers: range | None = None) -> list[bytes | None]:
        """Copy these layers of consecutive pages out of the memory, into rows set by one :meth:`use`.

        Returns: for each page the checksums of all its layers, as :meth:`PageSeal.header` takes them, or
            ``None`` if the seal has no checksums.

        Raises:
            LayoutError: some tokens of the pages have no blocks.
        """
        if not self._places.is_whole:
            raise LayoutError("some tokens of these pages have no blocks, so that the pages cannot be read")
        with self._memory.hold(pages):
            self._move(_SAVE, pages, self._all_layers if layers is None else layers)
        return self._made(pages)

    def hash(self, pages: range) -> list[bytes | None]:
        """Return the checksums, as :meth:`save` does, of pages that are already in their rows."""
        self._move(_HASH, pages, self._all_layers)
        return self._made(pages)

    def _made(self, pages: range) -> list[bytes | None]:
        each = self._each
        if not each:
            return [None] * len(pages)
        return [self._checksums[page * each : (page + 1) * each].tobytes() for page in pages]

    def _check(self, pages: range, layers: range) -> None:
        if not 0 <= pages.start <= pages.stop <= self._count or pages.step != 1:
            raise LayoutError(f"{pages} are not consecutive pages out of {self._count}")
        if not 0 <= layers.start <= layers.stop <= self._all_layers.stop or layers.step != 1:
            raise LayoutError(f"{layers} are not consecutive layers out of {self._all_layers.stop}")

    def _move(self, what: int, pages: range, layers: range) -> bytes | None:
        """Run operation ``what`` on these layers of these pages.

        Holds the interpreter's lock for one small page: a thread that releases the lock for some microseconds
        may wait 5 ms to get it back.

        Returns: for each page its ``enum fault`` of pages.c, or ``None`` if all are right.
        """
        self._check(pages, layers)
        faults = ctypes.create_string_buffer(len(pages))
        is_small = len(pages) == 1 and len(layers) < self._locked_layers
        move = self._library.move_locked if is_small else self._library.move
        is_faulty = move(self._task_at, what, pages.start, len(pages), layers.start, len(layers), faults)
        return faults.raw if is_faulty else None


def _at(numbers: array[int]) -> int:
    """Return the address of an array, which must stay alive and keep its length."""
    return numbers.buffer_info()[0]
