"""Pages of one sequence in the blocks of a paged cache."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug.errors import LayoutError
from kvplug.net.streams import DeviceMark
from kvplug.transport.block_views import BlockViews
from kvplug.transport.store.copies import copy_tokens, ids_on
from kvplug.transport.store.copying.library import What, library
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.memory import PageMemory, PageRows
from kvplug.transport.store.places import PagePlaces

if TYPE_CHECKING:
    from torch import Tensor


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
        after: DeviceMark | None = None,
    ) -> None:
        """``count`` pages, from token ``first_token`` of the sequence on.

        Args:
            views: ``[layer][part]``, in the order of the format.
            block_ids: the sequence's block table, from its first block on.
            writable: tokens of the sequence that :meth:`scatter` may write; it leaves the others of the same
                pages as they are. Blocks wholly before them need not exist, whatever their ids. Default: all
                tokens of the pages.
            after: on a device, what must have run there before the blocks are read or written; what the
                thread that calls the store has queued by then, if not given.

        Raises:
            LayoutError: the views are not those of the format; a block id is out of range or comes twice; the
                table is too short.
        """
        if len(views) != form.num_layers or any(len(layer) != len(form.parts) for layer in views):
            raise LayoutError(
                f"views of {len(views)} layers for pages of {form.num_layers} layers with {len(form.parts)}"
                " parts each"
            )
        sample = views[0][0]
        self.format = form
        self.device = str(sample.device)
        self.after = after
        """What must have run on the device before the blocks are read or written; ``None``: nothing."""
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
        used = self._block_ids[max(0, self._writable.start // self._block_size - self._first_block) :]
        if used:
            low, high = min(used), max(used)
            if low < 0 or high >= sample.shape[0]:
                raise LayoutError(
                    f"block {low if low < 0 else high} is out of range: the cache has {sample.shape[0]}"
                    " blocks"
                )
            if len(set(used)) != len(used):
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
        start = self._first_token + first * form.page_tokens
        end = start + num_tokens
        if into_cache:
            start, end = max(start, self._writable.start), min(end, self._writable.stop)
        if start >= end:
            return
        if self._move_compiled(first, rows, layers, into_cache=into_cache):
            return
        dense = rows.as_tensor()
        move = self.mover(first, len(rows), into_cache=into_cache)
        for layer in layers:
            base = (layer - layers.start) * form.layer_nbytes
            for part, (at, nbytes) in enumerate(form.spans):
                view = self._views[layer][part]
                tokens = view.new_empty((num_tokens, *view.shape[2:]))
                columns = slice(base + at, base + at + nbytes)
                if into_cache:
                    _copy_rows(rows, dense, columns, tokens, into_rows=False)
                move(layer, part, tokens)
                if not into_cache:
                    _copy_rows(rows, dense, columns, tokens, into_rows=True)

    def mover(self, first: int, count: int, *, into_cache: bool) -> Callable[[int, int, Tensor], None]:
        """A function that copies one part of one layer of these pages into the cache, or out of it.

        It is called with the numbers of layer and part, and with memory on the cache's device: of as many
        bytes, contiguous, one token after the other. It queues the copy on the current stream.
        """
        self._check_count(first, count)
        begin = self._first_token + first * self.format.page_tokens
        start, end = begin, begin + count * self.format.page_tokens
        if into_cache:
            start, end = max(start, self._writable.start), min(end, self._writable.stop)
        if start >= end:
            return lambda layer, part, memory: None
        at = start // self._block_size - self._first_block
        block_ids = self._block_ids[at : -(-end // self._block_size) - self._first_block]
        ids = ids_on(block_ids, self._views[0][0].device)

        def move(layer: int, part: int, memory: Tensor) -> None:
            view = self._views[layer][part]
            tokens = memory.view(view.dtype).view(-1, *view.shape[2:])[start - begin : end - begin]
            copy_tokens(view, block_ids, ids, start, tokens, into_cache=into_cache)

        return move

    def _move_compiled(self, first: int, rows: PageRows, layers: range, *, into_cache: bool) -> bool:
        """Copy in compiled code. Returns whether that was possible."""
        compiled = library()
        places = None if compiled is None else self.places(first, len(rows))
        if compiled is None or places is None or (not into_cache and rows.buffer.readonly):
            return False
        origin = rows.address - layers.start * self.format.layer_nbytes
        addresses = array("q", [origin + offset for offset in rows.offsets])
        copies = compiled.copies(self.format, places, addresses, None)
        if copies is None:
            return False
        copies.move(What.LOAD if into_cache else What.SAVE, range(len(rows)), layers)
        return True


@attrs.frozen(kw_only=True)
class LayerBlocks:
    """The blocks of some layers of a sequence, where not all layers have the same block table."""

    layers: frozenset[int]
    """Their numbers in the format."""
    block_ids: Sequence[int]
    """The block table, from the sequence's first block on."""
    begin: int = 0
    """The first token that may be written; blocks wholly before it need not exist."""


class GroupedBlocks(PageBlocks):
    """Pages of one sequence in a paged cache with a block table for each group of layers.

    Its blocks may be missing where they are not written: a group with a sliding window has those of the last
    tokens only. What is gathered must be whole."""

    def __init__(
        self,
        form: PageFormat,
        views: Sequence[Sequence[Tensor]],
        tables: Sequence[LayerBlocks],
        first_token: int,
        count: int,
        *,
        writable: range | None = None,
        after: DeviceMark | None = None,
    ) -> None:
        """As :class:`PageBlocks`.

        Raises:
            LayoutError: also if a layer is in no table, or in two.
        """
        layers = sorted(layer for table in tables for layer in table.layers)
        if layers != list(range(form.num_layers)):
            raise LayoutError(f"block tables of layers {layers} for pages of {form.num_layers} layers")
        views = views if isinstance(views, BlockViews) else BlockViews(views)
        super().__init__(form, views, (), 0, 0, after=after)
        end = first_token + count * form.page_tokens
        self._count = count
        self._of_layer: dict[int, PageBlocks] = {}
        for table in tables:
            limits = writable
            if table.begin > first_token:
                given = range(first_token, end) if writable is None else writable
                limits = range(max(given.start, min(table.begin, given.stop)), given.stop)
            blocks = PageBlocks(form, views, table.block_ids, first_token, count, writable=limits)
            self._of_layer |= dict.fromkeys(table.layers, blocks)

    def places(self, first: int, count: int) -> None:
        """``None``: compiled code copies the layers of one block table at a time."""
        self._check_count(first, count)

    def _move(self, first: int, rows: PageRows, layers: range, *, into_cache: bool) -> None:
        step = self.format.layer_nbytes
        for _, run in itertools.groupby(layers, lambda layer: id(self._of_layer[layer])):
            alike = list(run)
            part = range(alike[0], alike[-1] + 1)
            columns = rows.columns((part.start - layers.start) * step, (part.stop - layers.start) * step)
            self._of_layer[part.start]._move(first, columns, part, into_cache=into_cache)

    def mover(self, first: int, count: int, *, into_cache: bool) -> Callable[[int, int, Tensor], None]:
        movers = {
            id(blocks): blocks.mover(first, count, into_cache=into_cache)
            for blocks in self._of_layer.values()
        }

        def move(layer: int, part: int, memory: Tensor) -> None:
            movers[id(self._of_layer[layer])](layer, part, memory)

        return move


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
