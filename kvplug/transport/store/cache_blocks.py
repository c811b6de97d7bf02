"""Pages of one sequence in the blocks of a paged cache."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import attrs

from kvplug.errors import LayoutError
from kvplug.net.streams import DeviceMark
from kvplug.net.wire.tensors import as_bits
from kvplug.transport.block_views import BlockViews, as_elements, block_table, check_distinct
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.memory import PageMemory, PagePlaces

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class PageBlocks(PageMemory):
    """Pages of one sequence in the blocks of a paged cache.

    The cache is given as *views*: one tensor for each part of each layer, with any strides. A view's shape is
    (blocks, tokens in a block, *the rest of the part's shape)."""

    @attrs.frozen(kw_only=True)
    class Group:
        """The blocks of some layers of a sequence, for caches where layers have different block tables."""

        layers: frozenset[int]
        """The layers' numbers in the format."""
        block_ids: Sequence[int]
        """The block table, from the sequence's first block on."""
        begin: int = 0
        """The first token that may be written. Blocks that end before it need not exist."""

    def __init__(
        self,
        form: PageFormat,
        views: Sequence[Sequence[Tensor]],
        block_ids: Sequence[int] | Sequence[PageBlocks.Group],
        first_token: int,
        count: int,
        *,
        writable: range | None = None,
        after: DeviceMark | None = None,
    ) -> None:
        """Describe ``count`` pages, from token ``first_token`` of the sequence on.

        Args:
            views: ``[layer][part]``, in the order of the format.
            block_ids: the sequence's block table, from its first block on, or one table for each group of
                layers. A group with a sliding window needs only the blocks that are written, those of the
                last tokens.
            writable: tokens of the sequence that a load may write; it leaves the pages' other tokens as they
                are. Blocks that end before these tokens need not exist, whatever their ids. Default: all
                tokens of the pages.
            after: device work that must have run before the blocks are read or written. Default: the work
                that the calling thread has queued when it calls the store.

        Raises:
            LayoutError: the views do not fit the format; a layer is in no block table, or in two; a block id
                is out of range or occurs twice; a table is too short.
        """
        if len(views) != form.num_layers or any(len(layer) != len(form.parts) for layer in views):
            raise LayoutError(
                f"the views of {len(views)} layers do not fit pages of {form.num_layers} layers with"
                f" {len(form.parts)} parts each"
            )
        num_blocks, block_size = views[0][0].shape[:2]
        self.format = form
        self.device = str(views[0][0].device)
        self.after = after
        """Device work that must have run before the blocks are read or written, if any was given."""
        self._views = views if isinstance(views, BlockViews) else BlockViews(views)
        self._count = count
        self._block_size: int = block_size
        self._first_token = first_token
        self._first_block = first_token // block_size
        end = first_token + count * form.page_tokens
        self._writable = range(first_token, end) if writable is None else writable
        self._end = min(end, self._writable.stop)
        """The end of the tokens that are written. Tokens from this one on may have no blocks."""
        every = range(form.num_layers)
        groups = cast("Sequence[PageBlocks.Group]", block_ids)
        if not (block_ids and isinstance(block_ids[0], PageBlocks.Group)):
            ids = cast("Sequence[int]", block_ids)
            groups = [PageBlocks.Group(layers=frozenset(every), block_ids=ids)]
        layers = sorted(layer for group in groups for layer in group.layers)
        if layers != list(every):
            raise LayoutError(f"the block tables cover layers {layers}; pages have {form.num_layers} layers")
        self._is_grouped = len(groups) > 1
        self._tables: list[array[int]] = [array("q")] * form.num_layers
        """For each layer, the blocks of the pages' tokens."""
        self._begins = array("q", every)
        """For each layer, the first token that is written."""
        for group in groups:
            table, begin = self._checked(group.block_ids, group.begin, num_blocks)
            for layer in group.layers:
                self._tables[layer], self._begins[layer] = table, begin
        self._is_whole = self._end == end and max(self._begins) == first_token

    def _checked(self, block_ids: Sequence[int], begin: int, num_blocks: int) -> tuple[array[int], int]:
        """Check a block table. Return its blocks of the pages' tokens, and the first written token."""
        size, first, end, given = self._block_size, self._first_block, self._end, self._writable
        begin = max(self._first_token, given.start, min(begin, given.stop))
        if len(block_ids) * size < end:
            raise LayoutError(f"{len(block_ids)} blocks of {size} tokens do not reach to token {end}")
        unused = max(0, begin // size - first)
        table = block_table(block_ids[first : -(-end // size)], num_blocks, unused)
        check_distinct(table[unused:])
        return table, begin

    def __len__(self) -> int:
        return self._count

    def places(self) -> PagePlaces:
        form = self.format
        parts, token_bytes = self._views.parts
        if [nbytes for _, nbytes in form.spans] != [nbytes * form.page_tokens for nbytes in token_bytes]:
            raise LayoutError(
                f"views whose parts have {list(token_bytes)} bytes per token do not fit pages of {form.parts}"
            )
        ids, ids_step = self._tables[0], 0
        if self._is_grouped:
            ids, ids_step = array("q"), len(ids)
            for table in self._tables:
                ids.extend(table * len(form.parts))
        origin = self._first_block * self._block_size
        return PagePlaces(
            parts,
            ids,
            ids_step,
            begins=array("q", [begin - origin for begin in self._begins]),
            end=self._end - origin,
            block_tokens=self._block_size,
            page_tokens=form.page_tokens,
            first_token=self._first_token - origin,
            is_whole=self._is_whole,
        )

    @property
    def block_bytes(self) -> int:
        size = self._block_size
        is_aligned = self.format.page_tokens == size and self._first_token % size == 0
        is_plain = self._is_whole and not self._is_grouped and is_aligned
        nbytes = self._views.block_bytes if is_plain else 0
        return nbytes if nbytes * len(self.format.parts) == self.format.layer_nbytes else 0

    def blocks(self, pages: Sequence[int], layers: range) -> tuple[BlockViews, Sequence[int]]:
        table = self._tables[0]
        return self._views.as_bytes(layers), [table[page] for page in pages]

    def mover(self, first: int, count: int, *, into_cache: bool) -> Callable[[int, int, Tensor], None]:
        """Return a function that copies one part of one layer of these pages into the cache, or out of it.

        Its arguments are the layer's number, the part's number, and contiguous memory of the same size on the
        cache's device, one token after the other. It queues the copy on the current stream.
        """
        begin = self._first_token + first * self.format.page_tokens
        end = begin + count * self.format.page_tokens
        stop = min(end, self._end) if into_cache else end
        device = self._views[0][0].device
        known: dict[tuple[int, int], tuple[array[int], Tensor]] = {}

        def move(layer: int, part: int, memory: Tensor) -> None:
            start = max(begin, self._begins[layer]) if into_cache else begin
            if start >= stop:
                return
            table = self._tables[layer]
            found = known.get((id(table), start))
            if found is None:
                at = start // self._block_size - self._first_block
                block_ids = table[at : -(-stop // self._block_size) - self._first_block]
                found = known[id(table), start] = block_ids, ids_on(block_ids, device)
            view = self._views[layer][part]
            tokens = memory.view(-1).view(view.dtype).view(-1, *view.shape[2:])[start - begin : stop - begin]
            copy_tokens(view, *found, start, tokens, into_cache=into_cache)

        return move

    def _block_range(self, pages: range) -> slice:
        """Return where the tables list the pages' blocks. The first and last may belong to them in part."""
        first, tokens, size = self._first_token, self.format.page_tokens, self._block_size
        begin, end = first + pages.start * tokens, first + pages.stop * tokens
        return slice(begin // size - self._first_block, -(-end // size) - self._first_block)

    def _has_whole_blocks(self, pages: range) -> bool:
        first, tokens, size = self._first_token, self.format.page_tokens, self._block_size
        return not ((first + pages.start * tokens) % size or (first + pages.stop * tokens) % size)


def fits_rows(blocks: PageBlocks) -> bool:
    """Whether :func:`gather_rows` can gather these pages: each is made of whole blocks, and its parts begin
    at multiples of their elements."""
    form = blocks.format
    sizes = [view.element_size() for view in blocks._views[0]]
    is_aligned = not any(
        begin % size or form.layer_nbytes % size for (begin, _), size in zip(form.spans, sizes, strict=True)
    )
    return is_aligned and blocks._is_whole and blocks._has_whole_blocks(range(1))


def have_same_views(first: PageBlocks, second: PageBlocks) -> bool:
    """Whether both are in the same views of a cache."""
    return first._views is second._views


def gather_rows(sources: Sequence[tuple[PageBlocks, range]], rows: Tensor, pitch: int) -> None:
    """Queue copies of pages out of a cache into rows on its device, one page in each. For each layer this
    takes a single operation if the parts of the layer are equally spaced.

    Args:
        sources: some pages of several sequences with the same views, which :func:`fits_rows` allows.
        rows: all bytes of a storage with at least as many rows.
        pitch: the bytes from one row to the next.

    Raises:
        LayoutError: the views do not fit the format. Some copies may be queued.
    """
    import torch

    form, views, block_size = sources[0][0].format, sources[0][0]._views, sources[0][0]._block_size
    num_pages, per_page = sum(len(pages) for _, pages in sources), form.page_tokens // block_size
    ids_of = _ids_by_layer(sources)
    for layer in range(form.num_layers):
        ids, stacked = ids_of(layer), views.stacked[layer]
        if stacked is None:
            each, spans = [as_bits(view)[None] for view in views[layer]], form.spans
        else:
            each, spans = [stacked], ((0, form.layer_nbytes),)
        for blocks, (begin, nbytes) in zip(each, spans, strict=True):
            num_parts, _, *shape = blocks.shape
            strides = [math.prod(shape[axis:]) for axis in range(len(shape) + 1)]
            itemsize = blocks.element_size()
            if num_parts * per_page * strides[0] * itemsize != nbytes:
                raise LayoutError(
                    f"views of shape {[*blocks.shape]} in layer {layer} do not fit {form.parts}"
                )
            into = rows.view(blocks.dtype).as_strided(
                (num_parts, num_pages, per_page, *shape),
                (per_page * strides[0], pitch // itemsize, *strides),
                (layer * form.layer_nbytes + begin) // itemsize,
            )
            if per_page == 1:
                torch.index_select(blocks, 1, ids, out=into[:, :, 0])
            else:
                torch.ops.aten.index.Tensor_out(blocks, [None, ids.view(num_pages, per_page)], out=into)


def _ids_by_layer(sources: Sequence[tuple[PageBlocks, range]]) -> Callable[[int], Tensor]:
    """Return a function that returns the block ids of a layer of all pages, on their device."""
    known: dict[tuple[int, ...], Tensor] = {}
    device = sources[0][0]._views[0][0].device

    def ids_of(layer: int) -> Tensor:
        tables = tuple(id(blocks._tables[layer]) for blocks, _ in sources)
        if tables not in known:
            block_ids = array("q")
            for blocks, pages in sources:
                block_ids += blocks._tables[layer][blocks._block_range(pages)]
            known[tables] = ids_on(block_ids, device)
        return known[tables]

    return ids_of


def gatherer(sources: Sequence[tuple[PageBlocks, range]]) -> Callable[[int, Sequence[Tensor]], None]:
    """Return a function that copies one layer of pages out of a cache, page after page.

    Its arguments are the layer's number, and contiguous memory on the cache's device for each part of all
    pages. It queues the copies on the current stream: a single one if all pages are whole blocks of the same
    views, the parts of a layer are equally spaced, and the parts of the memory are contiguous.

    Args:
        sources: some pages of several sequences of one format, on one device.
    """
    import torch

    form, views = sources[0][0].format, sources[0][0]._views
    if not all(blocks._views is views and blocks._has_whole_blocks(pages) for blocks, pages in sources):
        movers = [
            (blocks.mover(pages.start, len(pages), into_cache=False), len(pages)) for blocks, pages in sources
        ]

        def move(layer: int, parts: Sequence[Tensor]) -> None:
            first = 0
            for move_pages, count in movers:
                for part, (_, nbytes) in enumerate(form.spans):
                    memory = parts[part][first * nbytes : (first + count) * nbytes]
                    move_pages(layer, part, memory)
                first += count

        return move
    ids_of = _ids_by_layer(sources)

    def gather(layer: int, parts: Sequence[Tensor]) -> None:
        stacked, ids = views.stacked[layer], ids_of(layer)
        if stacked is not None and _is_one_piece(parts):
            nbytes = sum(map(len, parts))
            into = parts[0].as_strided((nbytes,), (1,)).view(stacked.dtype)
            shape = len(parts), len(ids), *stacked.shape[2:]
            torch.index_select(stacked, 1, ids, out=into.view(shape))
            return
        for view, memory in zip(views[layer], parts, strict=True):
            bits = as_bits(view)
            torch.index_select(bits, 0, ids, out=memory.view(bits.dtype).view(len(ids), *bits.shape[1:]))

    return gather


def _is_one_piece(parts: Sequence[Tensor]) -> bool:
    """Whether these tensors of bytes follow one another in memory without gaps."""
    return all(
        before.data_ptr() + len(before) == after.data_ptr() for before, after in itertools.pairwise(parts)
    )


def ids_on(block_ids: array[int], device: torch.device) -> Tensor:
    """Return block ids as an index tensor: on a CPU it shares their memory, on a GPU it is copied without
    waiting."""
    import torch

    ids = torch.frombuffer(block_ids, dtype=torch.int64)
    if device.type == "cuda":  # a copy from pageable memory would make the host wait for the whole stream
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


def copy_tokens(
    view: Tensor, block_ids: array[int], ids: Tensor, start: int, tokens: Tensor, *, into_cache: bool
) -> None:
    """Copy bits of any dtype between a cache and ``tokens``, in at most three operations: a part of the first
    block, all whole blocks at once, and a part of the last block.

    Args:
        view: the cache, [blocks, tokens in a block, *rest], any strides.
        block_ids: the blocks of the tokens, from the block of the first token on. Not checked.
        ids: the same ids, as :func:`ids_on` makes them for the cache's device.
        start: the first token's number in its sequence, which gives its place in the first block.
        tokens: [tokens, *rest], of the cache's dtype and device; need not be contiguous.
        into_cache: whether to copy from ``tokens`` into the cache; if not, copy from the cache to ``tokens``.
    """
    import torch

    # copied as integers: the bits do not change, and torch cannot index most float8 and unsigned types
    wide = as_elements(view, axes=2), as_elements(tokens[None], axes=2)
    if wide[0] is not None and wide[1] is not None:
        view, tokens = wide[0], wide[1][0]
    else:
        view, tokens = as_bits(view), as_bits(tokens)
    block_size, num_tokens = view.shape[1], tokens.shape[0]
    offset = start % block_size
    head = min(-offset % block_size, num_tokens)
    whole, tail = divmod(num_tokens - head, block_size)
    first = 0
    if head:
        in_cache, outside = view[block_ids[0], offset : offset + head], tokens[:head]
        in_cache.copy_(outside) if into_cache else outside.copy_(in_cache)
        first = 1
    if whole:
        index = ids[first : first + whole]
        # splitting a dimension gives a view, whatever the strides
        outside = tokens[head : num_tokens - tail].view(whole, *view.shape[1:])
        if into_cache:
            view.index_copy_(0, index, outside)
        else:
            torch.index_select(view, 0, index, out=outside)
    if tail:
        in_cache, outside = view[block_ids[-1], :tail], tokens[num_tokens - tail :]
        in_cache.copy_(outside) if into_cache else outside.copy_(in_cache)
