"""Pages outside a store: memory that pages are copied from and into."""

from __future__ import annotations

import abc
from array import array
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of, copy_bytes
from kvplug.transport.block_views import PartPlace
from kvplug.transport.store.format import PageFormat, pieces_format

if TYPE_CHECKING:
    from torch import Tensor

_LOCK_FREE_BYTES: Final = 256 << 10  # rows that are copied without the interpreter's lock, as they are hashed


@attrs.frozen(eq=False)
class PageRows:
    """Rows of bytes in one buffer: one row for each page, all of one length.

    Stores keep pages in rows, and executors read them into rows.

    Raises:
        LayoutError: a row lies partly outside the buffer.
    """

    buffer: memoryview
    """Contiguous bytes."""
    offsets: Sequence[int]
    """Where in the buffer each row begins."""
    nbytes: int
    """Bytes of a row."""

    def __attrs_post_init__(self) -> None:
        if (
            self.offsets
            and not 0 <= min(self.offsets) <= max(self.offsets) <= self.buffer.nbytes - self.nbytes
        ):
            raise LayoutError(
                f"rows of {self.nbytes} bytes at {min(self.offsets)} to {max(self.offsets)} do not lie in"
                f" {self.buffer.nbytes} bytes"
            )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def address(self) -> int:
        """Where the buffer begins in this process's memory. The buffer must stay alive."""
        return address_of(self.buffer)

    @classmethod
    def dense(cls, buffer: memoryview, count: int, nbytes: int) -> PageRows:
        """Return consecutive rows from the buffer's beginning on."""
        return cls(buffer, range(0, count * nbytes, nbytes) if nbytes else (0,) * count, nbytes)

    def row(self, index: int) -> memoryview:
        """Return the bytes of one row."""
        begin = self.offsets[index]
        return self.buffer[begin : begin + self.nbytes]

    def columns(self, begin: int, end: int) -> PageRows:
        """Return bytes ``begin`` to ``end`` of every row."""
        return PageRows(self.buffer, [offset + begin for offset in self.offsets], end - begin)

    def __getitem__(self, part: slice) -> PageRows:
        """Return some of the rows."""
        return PageRows(self.buffer, self.offsets[part], self.nbytes)

    def as_tensor(self) -> Tensor | None:
        """Return the rows as one uint8 tensor [rows, bytes] over the same memory, or ``None`` if they are
        empty or not evenly spaced."""
        import torch

        if not len(self) or not self.nbytes:
            return None
        first = self.offsets[0]
        step = self.offsets[1] - first if len(self) > 1 else self.nbytes
        if step < self.nbytes or any(at != first + index * step for index, at in enumerate(self.offsets)):
            return None
        flat = torch.frombuffer(self.buffer, dtype=torch.uint8, offset=first)
        return flat.as_strided((len(self), self.nbytes), (step, 1))


@attrs.frozen(eq=False)
class PagePlaces:
    """Where consecutive pages lie in this process's memory, for compiled code that copies them."""

    bases: array[int]
    """The address of block 0 for each part of each layer, layer after layer."""
    parts: tuple[PartPlace, ...]
    """How each part of a layer lies in memory, in the order of the format. The same for all layers."""
    ids: array[int]
    """The blocks of the pages' tokens, in order: one list for all parts of all layers, or one list for each
    part of each layer, one after the other."""
    ids_step: int
    """The distance from the ids of one part to those of the next; 0 if all parts share them."""
    block_tokens: int
    """Tokens in a block."""
    page_tokens: int
    """Tokens in a page."""
    first_token: int
    """The token of the first of these blocks at which the first page begins."""
    begins: array[int]
    """For each layer, the first token that may be written, counted like ``first_token``."""
    end: int
    """The end of the tokens that may be written, exclusive."""
    is_whole: bool
    """Whether all tokens have blocks and may be written."""


class PageMemory(abc.ABC):
    """Memory for several pages of one format, which belongs to the caller of a store.

    A store copies from this memory for a put, and into it for a get, in any thread, with a
    :class:`~kvplug.transport.PageCopy`. The store never touches it after the job has settled."""

    format: PageFormat
    """The format of all these pages."""
    device: str = "cpu"
    """Where the memory is, such as "cpu" or "cuda:1". A store that serves CPU memory only never receives
    other memory."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of pages."""

    @abc.abstractmethod
    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        """Copy pages ``first`` and on into ``rows``, one page into each row.

        Args:
            rows: each has the bytes of the given layers.
            layers: consecutive layers; ``None``: all.

        Raises:
            LayoutError: the rows do not fit.
        """

    @abc.abstractmethod
    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        """Copy ``rows`` into pages ``first`` and on: the inverse of :meth:`gather`."""

    def rows(self) -> PageRows | None:
        """Return the pages themselves if their bytes lie in rows, else ``None``.

        A store may read into these rows, and write from them, without an intermediate copy.
        """
        return None

    def places(self) -> PagePlaces | None:
        """Return where the pages lie, for compiled code that copies them, or ``None`` if it cannot.

        Compiled code replaces :meth:`gather` and :meth:`scatter`, so a subclass that overrides them must
        override this method too.
        """
        return None

    def _check(self, first: int, rows: PageRows, layers: range | None) -> range:
        wanted = range(self.format.num_layers) if layers is None else layers
        if not 0 <= first <= first + len(rows) <= len(self):
            raise LayoutError(f"pages {first} to {first + len(rows)} are not among {len(self)} pages")
        if wanted.step != 1 or not 0 <= wanted.start <= wanted.stop <= self.format.num_layers:
            raise LayoutError(f"{wanted} are not consecutive layers out of {self.format.num_layers}")
        if rows.nbytes != len(wanted) * self.format.layer_nbytes:
            raise LayoutError(
                f"rows of {rows.nbytes} bytes do not fit {len(wanted)} layers of"
                f" {self.format.layer_nbytes} bytes"
            )
        return wanted


class FlatPages(PageMemory):
    """Pages whose bytes are in the order of the format, each in one or several pieces of memory."""

    @abc.abstractmethod
    def _pieces(self, page: int) -> Sequence[memoryview]:
        """Return the pieces of one page, in order."""

    def _places(self, bases: array[int], ids: array[int], ids_step: int = 0) -> PagePlaces:
        """Return the places of pages that count as one block of one token each."""
        form, count = self.format, len(self)
        parts = tuple(PartPlace(1, nbytes, nbytes, ()) for _, nbytes in form.spans)
        begins = array("q", bytes(8 * form.num_layers))
        return PagePlaces(bases, parts, ids, ids_step, 1, 1, 0, begins, count, is_whole=True)

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        for row, mine in self._parts(first, rows, layers):
            copy_bytes(row, mine, _LOCK_FREE_BYTES)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        for row, mine in self._parts(first, rows, layers):
            copy_bytes(mine, row, _LOCK_FREE_BYTES)

    def _parts(
        self, first: int, rows: PageRows, layers: range | None
    ) -> Iterator[tuple[memoryview, memoryview]]:
        """Yield pairs of equal bytes of these layers: a stretch of a row, and its place in a piece."""
        wanted, step = self._check(first, rows, layers), self.format.layer_nbytes
        begin, end = wanted.start * step, wanted.stop * step
        for index in range(len(rows)):
            row, at = rows.row(index), 0
            for piece in self._pieces(first + index):
                low, high = max(begin, at), min(end, at + len(piece))
                if low < high:
                    yield row[low - begin : high - begin], piece[low - at : high - at]
                at += len(piece)


class PageBuffers(FlatPages):
    """Pages that lie in rows of one buffer.

    >>> from kvplug.transport.store.format import opaque_format
    >>> pages = PageBuffers.empty(opaque_format(4), 2)
    >>> pages.rows().row(1)[:] = b"abcd"
    >>> copied = PageBuffers.empty(pages.format, 1)
    >>> pages.gather(1, copied.rows())
    >>> bytes(copied.rows().row(0))
    b'abcd'
    """

    def __init__(self, form: PageFormat, rows: PageRows) -> None:
        """Raises LayoutError: the length of the rows is not that of a page."""
        if rows.nbytes != form.nbytes:
            raise LayoutError(f"rows of {rows.nbytes} bytes do not fit pages of {form.nbytes} bytes")
        self.format = form
        self._rows = rows

    @classmethod
    def empty(cls, form: PageFormat, count: int) -> PageBuffers:
        """Allocate memory for ``count`` pages."""
        return cls(form, PageRows.dense(memoryview(bytearray(count * form.nbytes)), count, form.nbytes))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> PageRows:
        return self._rows

    def places(self) -> PagePlaces | None:
        form, rows = self.format, self._rows
        if rows.buffer.readonly:
            return None
        address = rows.address
        bases = array("q")
        for layer in range(form.num_layers):
            bases.extend(address + layer * form.layer_nbytes + at for at, _ in form.spans)
        return self._places(bases, array("q", rows.offsets))

    def _pieces(self, page: int) -> Sequence[memoryview]:
        return (self._rows.row(page),)


class PagePieces(FlatPages):
    """Pages in pieces anywhere in this process's memory, in the format that ``pieces_format`` makes.

    >>> one, other = (memoryview(bytearray(2)) for _ in range(2))
    >>> page = PagePieces([(one, other)])
    >>> page.scatter(0, PageRows.dense(memoryview(b"abcd"), 1, 4))
    >>> bytes(one), bytes(other)
    (b'ab', b'cd')
    """

    def __init__(self, pages: Sequence[Sequence[memoryview]]) -> None:
        """``pages``: the pieces of each page, as contiguous bytes. The views keep their memory alive.

        Raises:
            LayoutError: there are no pages, the pieces do not make a format or are not contiguous bytes, or
                pages have pieces of different lengths.
        """
        if not pages:
            raise LayoutError("at least one page is needed")
        self._pages = [[_bytes_of(piece) for piece in page] for page in pages]
        sizes = [piece.nbytes for piece in self._pages[0]]
        for page in self._pages:
            if [piece.nbytes for piece in page] != sizes:
                raise LayoutError(
                    f"all pages must have pieces of the same lengths; got {sizes} and"
                    f" {[piece.nbytes for piece in page]}"
                )
        self.format = pieces_format(sizes)

    def __len__(self) -> int:
        return len(self._pages)

    def places(self) -> PagePlaces | None:
        if any(piece.readonly for page in self._pages for piece in page):
            return None
        addresses = array("q", [address_of(piece) for pieces in zip(*self._pages) for piece in pieces])
        return self._places(array("q", bytes(8 * len(self._pages[0]))), addresses, len(self))

    def _pieces(self, page: int) -> Sequence[memoryview]:
        return self._pages[page]


def _bytes_of(view: memoryview) -> memoryview:
    if view.itemsize != 1 or view.ndim != 1 or not view.contiguous:
        raise LayoutError(
            f"a piece of a page must be contiguous bytes; got {view.format!r} of shape {view.shape}"
        )
    return view if view.format == "B" else view.cast("B")
