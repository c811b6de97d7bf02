"""Pages outside a store: memory that pages are copied from and into."""

from __future__ import annotations

import abc
import functools
from array import array
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of
from kvplug.transport.block_views import BlockViews, struct_part
from kvplug.transport.store.format import PageFormat, pieces_format

_NOTHING: Final = nullcontext()


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
        """Return consecutive rows, the first of them at the buffer's beginning."""
        return cls(buffer, range(0, count * nbytes, nbytes) if nbytes else (0,) * count, nbytes)

    def views(self, begins: Sequence[int], nbytes: int) -> BlockViews:
        """Return views of pieces of the rows, for a pipe. The id of a block is the offset of its row.

        Args:
            begins: where in a row the piece of each view begins.
            nbytes: bytes of each piece.
        """
        import torch

        flat = torch.frombuffer(self.buffer, dtype=torch.uint8)
        count = len(flat) - self.nbytes + 1
        return BlockViews([(flat.as_strided((count, nbytes), (1, 1), begin),) for begin in begins])

    def row(self, index: int) -> memoryview:
        """Return the bytes of one row."""
        begin = self.offsets[index]
        return self.buffer[begin : begin + self.nbytes]

    def __getitem__(self, part: slice) -> PageRows:
        """Return some of the rows."""
        return PageRows(self.buffer, self.offsets[part], self.nbytes)


@attrs.frozen(eq=False)
class PagePlaces:
    """Where consecutive pages lie in this process's memory, for compiled code that copies them. The defaults
    are for pages that each count as one block of one token."""

    parts: array[int]
    """:func:`struct_part` of each part of each layer, layer after layer."""
    ids: array[int]
    """The blocks of the pages' tokens, in order: one list for all parts of all layers, or one list for each
    part of each layer, one after the other."""
    ids_step: int
    """The distance from the ids of one part to those of the next; 0 if all parts share them."""
    begins: array[int]
    """For each layer, the first token that may be written, counted like ``first_token``."""
    end: int
    """The end of the tokens that may be written, exclusive."""
    block_tokens: int = 1
    """Tokens in a block."""
    page_tokens: int = 1
    """Tokens in a page."""
    first_token: int = 0
    """The token at which the first page begins, counted from the first token of the first block."""
    is_whole: bool = True
    """Whether all tokens have blocks, so that the pages can be read."""
    is_writable: bool = True
    """Whether the pages can be written."""


class PageMemory(abc.ABC):
    """Memory for several pages of one format, which belongs to the caller of a store.

    A store copies from this memory for a put, and into it for a get, in any thread, with a
    :class:`~kvplug.transport.PageCopy`. The store never touches it after the job has settled."""

    format: PageFormat
    """The format of all these pages."""
    device: str = "cpu"
    """Where the memory is, such as "cpu" or "cuda:1". A store itself receives only memory on "cpu"; staging
    serves the rest."""

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of pages."""

    @abc.abstractmethod
    def places(self) -> PagePlaces:
        """Return where the pages lie.

        Raises:
            LayoutError: they are not in this processor's memory, or compiled code cannot copy their layout.
        """

    def hold(self, pages: range) -> AbstractContextManager[object]:
        """Return a context in which these pages are copied. The memory must stay valid in it. On entry, a
        subclass may wait for its memory, or raise an error if the memory is gone."""
        return _NOTHING

    def rows(self) -> PageRows | None:
        """Return the pages themselves if their bytes lie in rows, else ``None``."""
        return None

    @property
    def block_bytes(self) -> int:
        """The bytes of each block that :meth:`blocks` returns, a divisor of a layer's bytes; 0 if a pipe
        cannot receive pages straight into this memory."""
        return 0

    def blocks(self, pages: Sequence[int], layers: range) -> tuple[BlockViews, Sequence[int]]:
        """Return these layers of these pages as views and block ids for :meth:`Pipe.recv_blocks`. Each view
        has the next :attr:`block_bytes` of the layers, and a block for each page.

        Raises:
            LayoutError: the pages cannot be received as blocks: :attr:`block_bytes` is 0.
        """
        raise LayoutError(f"pages in {type(self).__name__} are not received as blocks")


class PageBuffers(PageMemory):
    """Pages that lie in rows of one buffer.

    >>> from kvplug.transport.store.format import opaque_format
    >>> pages = PageBuffers.empty(opaque_format(4), 2)
    >>> pages.rows().row(1)[:] = b"abcd"
    >>> bytes(pages.rows().buffer)
    b'\\x00\\x00\\x00\\x00abcd'
    """

    def __init__(self, form: PageFormat, rows: PageRows) -> None:
        """Raises LayoutError: the length of the rows is not that of a page."""
        if rows.nbytes != form.nbytes:
            raise LayoutError(f"rows of {rows.nbytes} bytes do not fit pages of {form.nbytes} bytes")
        self.format = form
        self._rows = rows
        self._views: dict[range, BlockViews] = {}

    @classmethod
    def empty(cls, form: PageFormat, count: int) -> PageBuffers:
        """Allocate memory for ``count`` pages."""
        return cls(form, PageRows.dense(memoryview(bytearray(count * form.nbytes)), count, form.nbytes))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> PageRows:
        return self._rows

    @property
    def block_bytes(self) -> int:
        return 0 if self._rows.buffer.readonly else self.format.layer_nbytes

    def blocks(self, pages: Sequence[int], layers: range) -> tuple[BlockViews, Sequence[int]]:
        rows, step, views = self._rows, self.format.layer_nbytes, self._views.get(layers)
        if views is None:
            views = self._views[layers] = rows.views([layer * step for layer in layers], step)
        return views, [rows.offsets[page] for page in pages]

    def places(self) -> PagePlaces:
        rows, address = self._rows, self._rows.address
        ids = array("q", [address + offset for offset in rows.offsets])
        return PagePlaces(
            _parts_in_row(self.format),
            ids,
            0,
            begins_of(self.format),
            len(rows),
            is_writable=not rows.buffer.readonly,
        )


class ReservedPages(PageBuffers):
    """Memory of a store for pages that a device copies there, see :meth:`Store._reserve`."""

    pitch: int
    """The bytes from one row to the next where rows are adjacent, a multiple of 16. The store owns the bytes
    between them, and allows zeros to be written there, so that one copy writes many rows."""
    piece_bytes: int
    """No copy may reach over a multiple of this in the buffer: the driver knows such pieces one by one."""


class PagePieces(PageMemory):
    """Pages in pieces anywhere in this process's memory, in the format that ``pieces_format`` makes."""

    def __init__(self, pages: Sequence[Sequence[memoryview]]) -> None:
        """``pages``: the pieces of each page, as contiguous bytes. The views keep their memory alive.

        Raises:
            LayoutError: there are no pages, ``pieces_format`` refuses the pieces, they are not contiguous
                bytes, or pages have pieces of different lengths.
        """
        if not pages:
            raise LayoutError("at least one page is needed")
        self._pages = pages
        sizes = [piece.nbytes for piece in pages[0]]
        for page in pages:
            for piece in page:
                if piece.itemsize != 1 or piece.ndim != 1 or not piece.contiguous:
                    raise LayoutError(
                        "a piece of a page must be contiguous bytes; got"
                        f" {piece.format!r} of shape {piece.shape}"
                    )
            if [piece.nbytes for piece in page] != sizes:
                raise LayoutError(
                    f"all pages must have pieces of the same lengths; got {sizes} and"
                    f" {[piece.nbytes for piece in page]}"
                )
        self.format = pieces_format(sizes)

    def __len__(self) -> int:
        return len(self._pages)

    def places(self) -> PagePlaces:
        addresses = array("q", [address_of(piece) for pieces in zip(*self._pages) for piece in pieces])
        return PagePlaces(
            _parts_anywhere(self.format),
            addresses,
            len(self),
            begins_of(self.format),
            len(self),
            is_writable=not any(piece.readonly for page in self._pages for piece in page),
        )


def begins_of(form: PageFormat) -> array[int]:
    """Return :attr:`PagePlaces.begins` of pages that are written from their first byte on."""
    return array("q", bytes(8 * form.num_layers))


def flat_parts(bases: Iterable[tuple[int, int, int]]) -> array[int]:
    """Return :attr:`PagePlaces.parts` of parts that are contiguous in each page. ``bases``: for each part the
    address in page 0, the distance from one page to the next, and the bytes of the part."""
    return array(
        "q", [field for base, step, nbytes in bases for field in struct_part(base, step, nbytes, nbytes)]
    )


@functools.lru_cache(maxsize=64)
def _parts_in_row(form: PageFormat) -> array[int]:
    """Return the parts of pages that are contiguous; a page's id is its address."""
    return flat_parts(
        (layer * form.layer_nbytes + at, 1, nbytes)
        for layer in range(form.num_layers)
        for at, nbytes in form.spans
    )


@functools.lru_cache(maxsize=64)
def _parts_anywhere(form: PageFormat) -> array[int]:
    """Return the parts of pages whose ids are the addresses of the parts."""
    return flat_parts((0, 1, nbytes) for _ in range(form.num_layers) for _, nbytes in form.spans)
