"""Memory of pages outside a store: where a page's bytes are copied from, and where they go to."""

from __future__ import annotations

import abc
import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.copying import address_of
from kvplug.transport.block_views import BlockViews, PartPlace
from kvplug.transport.store.copies import copy_pieces, copy_tokens, ids_on
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.places import PagePlaces

if TYPE_CHECKING:
    from torch import Tensor

_MOST_PIECES: Final = 8
"""Of a page. More are copied by torch, in whole blocks."""


@attrs.frozen(eq=False)
class PageRows:
    """Rows of bytes in one buffer: one row for each page, all of one length.

    Stores keep pages in rows, and executors read them into rows.

    Raises:
        LayoutError: a row reaches out of the buffer.
    """

    buffer: memoryview
    """Flat bytes, contiguous."""
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
        """Where the buffer begins in this process's memory. It must stay alive."""
        return address_of(self.buffer)

    @classmethod
    def dense(cls, buffer: memoryview, count: int, nbytes: int) -> PageRows:
        """Rows one after the other from the buffer's beginning on."""
        return cls(buffer, range(0, count * nbytes, nbytes) if nbytes else (0,) * count, nbytes)

    def row(self, index: int) -> memoryview:
        """The bytes of one row."""
        begin = self.offsets[index]
        return self.buffer[begin : begin + self.nbytes]

    def columns(self, begin: int, end: int) -> PageRows:
        """Bytes ``begin`` to ``end`` of every row."""
        return PageRows(self.buffer, [offset + begin for offset in self.offsets], end - begin)

    def __getitem__(self, part: slice) -> PageRows:
        """Some of the rows."""
        return PageRows(self.buffer, self.offsets[part], self.nbytes)

    def as_tensor(self) -> Tensor | None:
        """The rows as one uint8 tensor [rows, bytes] over the same memory; ``None`` if they are not evenly
        spaced."""
        import torch

        if not len(self) or not self.nbytes:
            return None
        first = self.offsets[0]
        step = self.offsets[1] - first if len(self) > 1 else self.nbytes
        if step < self.nbytes or any(at != first + index * step for index, at in enumerate(self.offsets)):
            return None
        flat = torch.frombuffer(self.buffer, dtype=torch.uint8, offset=first)
        return flat.as_strided((len(self), self.nbytes), (step, 1))


class PageMemory(abc.ABC):
    """Memory for several pages of one format, which belongs to the caller of a store.

    A store copies from it (:meth:`gather`) while it puts, and into it (:meth:`scatter`) while it gets, in any
    thread. It never touches it after the job has settled."""

    format: PageFormat

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of pages."""

    @abc.abstractmethod
    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        """Copy pages ``first`` and on into ``rows``, one page a row.

        Args:
            rows: have the bytes of the given layers each.
            layers: consecutive; ``None``: all of them.

        Raises:
            LayoutError: the rows do not fit.
        """

    @abc.abstractmethod
    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        """The inverse of :meth:`gather`: into pages ``first`` and on."""

    def rows(self) -> PageRows | None:
        """The pages themselves, where their bytes already lie in rows; ``None``: they do not.

        A store may then read into them, or write from them, without a copy in between.
        """
        return None

    def places(self, first: int, count: int) -> PagePlaces | None:
        """Where pages ``first`` and on lie, for compiled code that copies them; ``None``: it cannot.

        Raises:
            LayoutError: there are fewer pages.
        """
        return None

    def _check_count(self, first: int, count: int) -> None:
        if not 0 <= first <= first + count <= len(self):
            raise LayoutError(f"pages {first} to {first + count} of {len(self)}")

    def _check(self, first: int, rows: PageRows, layers: range | None) -> range:
        wanted = range(self.format.num_layers) if layers is None else layers
        self._check_count(first, len(rows))
        if wanted.step != 1 or not 0 <= wanted.start <= wanted.stop <= self.format.num_layers:
            raise LayoutError(f"{wanted} of {self.format.num_layers} layers")
        if rows.nbytes != len(wanted) * self.format.layer_nbytes:
            raise LayoutError(
                f"rows of {rows.nbytes} bytes for {len(wanted)} layers of {self.format.layer_nbytes} bytes"
            )
        return wanted


class PageBuffers(PageMemory):
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
        """Raises LayoutError: the rows have not the length of a page."""
        if rows.nbytes != form.nbytes:
            raise LayoutError(f"rows of {rows.nbytes} bytes for pages of {form.nbytes}")
        self.format = form
        self._rows = rows

    @classmethod
    def empty(cls, form: PageFormat, count: int) -> PageBuffers:
        """New memory for ``count`` pages."""
        return cls(form, PageRows.dense(memoryview(bytearray(count * form.nbytes)), count, form.nbytes))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> PageRows:
        return self._rows

    def places(self, first: int, count: int) -> PagePlaces | None:
        self._check_count(first, count)
        form, rows = self.format, self._rows[first : first + count]
        if not count or rows.buffer.readonly:
            return None
        address = rows.address
        bases = array("q")
        for layer in range(form.num_layers):
            bases.extend(address + layer * form.layer_nbytes + at for at, _ in form.spans)
        # each page is one block, and all of it one token
        parts = tuple(PartPlace(1, nbytes, (nbytes,), (1,), 1) for _, nbytes in form.spans)
        return PagePlaces(bases, parts, array("q", rows.offsets), 1, 1, 0, range(count))

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        mine = self._mine(first, rows, layers)
        for index in range(len(rows)):
            rows.row(index)[:] = mine.row(index)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        mine = self._mine(first, rows, layers)
        for index in range(len(rows)):
            mine.row(index)[:] = rows.row(index)

    def _mine(self, first: int, rows: PageRows, layers: range | None) -> PageRows:
        wanted, step = self._check(first, rows, layers), self.format.layer_nbytes
        return self._rows[first : first + len(rows)].columns(wanted.start * step, wanted.stop * step)


class PageBlocks(PageMemory):
    """Pages of one sequence in the blocks of a paged cache.

    The cache is seen through *views*: for each layer one tensor for each part of the format, with any
    strides. Its shape is (blocks, tokens in a block), and then the rest of the part's shape."""

    def __init__(
        self,
        form: PageFormat,
        views: Sequence[Sequence[Tensor]],
        block_ids: Sequence[int],
        first_token: int,
        count: int,
        *,
        writable: range | None = None,
    ) -> None:
        """``count`` pages, from token ``first_token`` of the sequence on.

        Args:
            views: ``[layer][part]``, in the order of the format.
            block_ids: the sequence's block table, from its first block on.
            writable: tokens of the sequence that :meth:`scatter` may write; it leaves the others of the same
                pages as they are. Default: all tokens of the pages.

        Raises:
            LayoutError: the views are not those of the format; a block id is out of range or comes twice; the
            table is
                too short.
        """
        if len(views) != form.num_layers or any(len(layer) != len(form.parts) for layer in views):
            raise LayoutError(
                f"views of {len(views)} layers for pages of {form.num_layers} layers with {len(form.parts)}"
                " parts each"
            )
        sample = views[0][0]
        self._in_memory: list[list[tuple[int, int]]] | None = None
        """Where the blocks lie, once that was looked up."""
        self.format = form
        self._views = views if isinstance(views, BlockViews) else BlockViews(views)
        self._count = count
        self._block_size = sample.shape[1]
        end = first_token + count * form.page_tokens
        if writable is not None:
            end = min(end, writable.stop)
        self._first_token = first_token
        self._first_block = first_token // self._block_size
        self._writable = range(first_token, end) if writable is None else writable
        used = block_ids[self._first_block : -(-end // self._block_size)]
        if len(block_ids) * self._block_size < end:
            raise LayoutError(
                f"{len(block_ids)} blocks of {self._block_size} tokens do not reach to token {end}"
            )
        try:
            self._block_ids = array("q", used)
        except (TypeError, OverflowError) as e:
            raise LayoutError(f"block ids are integers of 64 bits: {e}") from e
        if self._block_ids:
            low, high = min(self._block_ids), max(self._block_ids)
            if low < 0 or high >= sample.shape[0]:
                raise LayoutError(
                    f"block {low if low < 0 else high} is out of range: the cache has {sample.shape[0]}"
                    " blocks"
                )
            if len(set(self._block_ids)) != len(self._block_ids):
                raise LayoutError("a block comes twice in one sequence's table")

    def __len__(self) -> int:
        return self._count

    def places(self, first: int, count: int) -> PagePlaces | None:
        self._check_count(first, count)
        known = self._views.places
        if known is None or not count:
            return None
        page_tokens, block_tokens = self.format.page_tokens, self._block_size
        start = self._first_token + first * page_tokens
        end = start + count * page_tokens
        origin = start // block_tokens * block_tokens
        begin = origin // block_tokens - self._first_block
        return PagePlaces(
            *known,
            self._block_ids[begin : -(-end // block_tokens) - self._first_block],
            block_tokens,
            page_tokens,
            start - origin,
            range(max(start, self._writable.start) - origin, min(end, self._writable.stop) - origin),
        )

    def gather(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._move(first, rows, self._check(first, rows, layers), into_cache=False)

    def scatter(self, first: int, rows: PageRows, layers: range | None = None) -> None:
        self._move(first, rows, self._check(first, rows, layers), into_cache=True)

    def _move(self, first: int, rows: PageRows, layers: range, *, into_cache: bool) -> None:
        if not len(rows) or not layers:
            return
        form = self.format
        num_tokens = len(rows) * form.page_tokens
        first_token = self._first_token + first * form.page_tokens
        start, end = first_token, first_token + num_tokens
        if into_cache:
            start, end = max(start, self._writable.start), min(end, self._writable.stop)
        if start >= end:
            return
        is_whole = end - start == num_tokens
        if is_whole and self._move_pieces(start, rows, layers, into_cache=into_cache):
            return
        dense = rows.as_tensor()
        begin = start // self._block_size - self._first_block
        block_ids = self._block_ids[begin : -(-end // self._block_size) - self._first_block]
        ids = ids_on(block_ids, self._views[0][0].device)
        for layer in layers:
            base = (layer - layers.start) * form.layer_nbytes
            for view, (at, nbytes) in zip(self._views[layer], form.spans, strict=True):
                tokens = view.new_empty((num_tokens, *view.shape[2:]))
                part = tokens[start - first_token : end - first_token]
                columns = slice(base + at, base + at + nbytes)
                if into_cache:
                    _copy_rows(rows, dense, columns, tokens, into_rows=False)
                    copy_tokens(view, block_ids, ids, start, part, into_cache=True)
                else:
                    copy_tokens(view, block_ids, ids, start, part, into_cache=False)
                    _copy_rows(rows, dense, columns, tokens, into_rows=True)

    def _move_pieces(self, start: int, rows: PageRows, layers: range, *, into_cache: bool) -> bool:
        """Copy straight between rows and blocks that are one piece of memory each, in as many pieces as pages
        have blocks. Returns whether they are."""
        form, block_size = self.format, self._block_size
        tokens = math.gcd(start, form.page_tokens, block_size)
        per_page = form.page_tokens // tokens
        if per_page > _MOST_PIECES or (not into_cache and rows.buffer.readonly):
            return False
        if self._in_memory is None:
            self._in_memory = _rows_in_memory(self._views)
        if not self._in_memory:
            return False
        where = [
            (self._block_ids[token // block_size - self._first_block], token % block_size)
            for token in range(start, start + len(rows) * form.page_tokens, tokens)
        ]
        memory = rows.address
        offsets: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
        for layer in layers:
            base = (layer - layers.start) * form.layer_nbytes
            for (address, stride), (at, nbytes) in zip(self._in_memory[layer], form.spans, strict=True):
                token_bytes = nbytes // form.page_tokens
                piece = tokens * token_bytes
                if (stride, token_bytes) not in offsets:
                    in_cache = [block * stride + token * token_bytes for block, token in where]
                    steps = range(0, per_page * piece, piece)
                    in_rows = [offset + step for offset in rows.offsets for step in steps]
                    offsets[stride, token_bytes] = in_cache, in_rows
                in_cache, in_rows = offsets[stride, token_bytes]
                if into_cache:
                    copy_pieces(address, in_cache, memory + base + at, in_rows, piece)
                else:
                    copy_pieces(memory + base + at, in_rows, address, in_cache, piece)
        return True


def _rows_in_memory(views: Sequence[Sequence[Tensor]]) -> list[list[tuple[int, int]]]:
    """For each layer and part the address of block 0, and how many bytes further each next one is.

    Empty: not in this processor's memory, or a block is no single piece of it.
    """
    found = []
    for layer in views:
        for view in layer:
            if view.device.type != "cpu" or not view[:1].is_contiguous():
                return []
        found.append([(view.data_ptr(), view.stride(0) * view.element_size()) for view in layer])
    return found


def _copy_rows(
    rows: PageRows, dense: Tensor | None, columns: slice, tokens: Tensor, *, into_rows: bool
) -> None:
    """Between columns of the rows and tokens, which are as many bytes, one page after the other."""
    import torch

    flat = tokens.view(-1).view(torch.uint8).view(len(rows), -1)
    if dense is not None:
        part = dense[:, columns]
        part.copy_(flat) if into_rows else flat.copy_(part)
        return
    for index in range(len(rows)):
        part = torch.frombuffer(rows.row(index)[columns], dtype=torch.uint8)
        part.copy_(flat[index]) if into_rows else flat[index].copy_(part)
