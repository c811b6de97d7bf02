"""Memory of pages that lie in several pieces each: keys here, values there, every layer elsewhere."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of, copy_bytes
from kvplug.transport.block_views import PartPlace
from kvplug.transport.store.format import MAX_PARTS, PageFormat, Part
from kvplug.transport.store.memory import PageMemory, PageRows
from kvplug.transport.store.places import PagePlaces

_LOCK_FREE_BYTES: Final = 256 << 10


def pieces_format(sizes: Sequence[int]) -> PageFormat:
    """The format of pages that consist of opaque pieces with these lengths in bytes, one after the other.

    >>> pieces_format([8, 2]).nbytes
    10
    >>> many = pieces_format([8, 2] * 100)
    >>> many.num_layers, len(many.parts)
    (4, 50)

    Raises:
        LayoutError: there is no piece, or more than 64 of which no repeated pattern covers all.
    """
    sizes = tuple(sizes)
    for num_layers in range(1, len(sizes) + 1):
        step = len(sizes) // num_layers
        if len(sizes) % num_layers == 0 and step <= MAX_PARTS and sizes == sizes[:step] * num_layers:
            parts = (
                Part(name=f"piece{index}", dtype="uint8", shape=(nbytes,), token_axis=None)
                for index, nbytes in enumerate(sizes[:step])
            )
            return PageFormat(page_tokens=0, num_layers=num_layers, parts=tuple(parts))
    raise LayoutError(
        f"pages of {len(sizes)} pieces: allowed are 1 to {MAX_PARTS}, or more whose lengths repeat"
    )


class PagePieces(PageMemory):
    """Pages in pieces that lie anywhere in this process's memory, in the format :func:`pieces_format`.

    >>> one, other = (memoryview(bytearray(2)) for _ in range(2))
    >>> page = PagePieces([(one, other)])
    >>> page.scatter(0, PageRows.dense(memoryview(b"abcd"), 1, 4))
    >>> bytes(one), bytes(other)
    (b'ab', b'cd')
    """

    def __init__(self, pages: Sequence[Sequence[memoryview]]) -> None:
        """``pages``: of each its pieces, contiguous bytes. They keep their memory alive.

        Raises:
            LayoutError: there is no page, its pieces do not make a format, or are not contiguous bytes, or
                those of another page have other lengths.
        """
        if not pages:
            raise LayoutError("pages in pieces have at least one page")
        self._pages = [[_bytes_of(piece) for piece in page] for page in pages]
        sizes = [piece.nbytes for piece in self._pages[0]]
        for page in self._pages:
            if [piece.nbytes for piece in page] != sizes:
                raise LayoutError(
                    f"all pages have pieces of the same lengths; got {sizes} and"
                    f" {[piece.nbytes for piece in page]}"
                )
        self.format = pieces_format(sizes)

    def __len__(self) -> int:
        return len(self._pages)

    @cached_property
    def _addresses(self) -> list[list[int]] | None:
        """Of each piece of each page; ``None``: one may not be written."""
        if any(piece.readonly for page in self._pages for piece in page):
            return None
        return [[address_of(piece) for piece in page] for page in self._pages]

    def places(self, first: int, count: int) -> PagePlaces | None:
        self._check_count(first, count)
        if not count or self._addresses is None:
            return None
        addresses = self._addresses[first : first + count]
        lowest = min(addresses)
        offsets = array("q")
        for page in addresses:
            apart = page[0] - lowest[0]
            if any(at - base != apart for at, base in zip(page, lowest, strict=True)):
                return None  # its pieces are not as far from each other as those of the other pages
            offsets.append(apart)
        # each page is one block, and all of it one token
        parts = tuple(PartPlace(1, nbytes, (nbytes,), (1,), 1) for _, nbytes in self.format.spans)
        return PagePlaces(array("q", lowest), parts, offsets, 1, 1, 0, range(count))

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._copy(first, rows, layers, into_rows=True)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._copy(first, rows, layers, into_rows=False)

    def _copy(self, first: int, rows: PageRows, layers: range | None, *, into_rows: bool) -> None:
        wanted, step = self._check(first, rows, layers), len(self.format.parts)
        for index in range(len(rows)):
            row, at = rows.row(index), 0
            for piece in self._pages[first + index][wanted.start * step : wanted.stop * step]:
                part = row[at : at + piece.nbytes]
                at += piece.nbytes
                if into_rows:
                    copy_bytes(part, piece, _LOCK_FREE_BYTES)
                else:
                    copy_bytes(piece, part, _LOCK_FREE_BYTES)


def _bytes_of(view: memoryview) -> memoryview:
    if view.itemsize != 1 or view.ndim != 1 or not view.contiguous:
        raise LayoutError(f"a piece of a page is contiguous bytes; got {view.format!r} of {view.shape}")
    return view if view.format == "B" else view.cast("B")
