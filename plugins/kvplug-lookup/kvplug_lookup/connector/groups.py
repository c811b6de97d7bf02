"""The KV cache groups of a model: maps the layers of a page to blocks.

A page has the layers of all groups, in the order of the forward pass. So pages do not depend on how an engine
groups its layers, and a prompt's pages can be loaded up to any of them: a page always has the KV that layers
with a sliding window need. A load writes only the parts of a page that the request has blocks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplug import UnsupportedError
from kvplug.engine import NO_BLOCK, BlockIds, KVCacheConfig, KVLayout, LayoutError, PageBlocks
from kvplug.transport import DeviceMark, PageFormat

if TYPE_CHECKING:
    from torch import Tensor


class Groups:
    """The groups of one engine's cache.

    Raises:
        UnsupportedError: groups have different block layouts, so a page cannot hold the layers of all groups.
    """

    def __init__(self, cache: KVCacheConfig) -> None:
        self.layer_names = cache.forward_order
        """Layers of all groups, in the order of a page."""
        number = {name: at for at, name in enumerate(self.layer_names)}
        self._layers = [frozenset(number[name] for name in group.layer_names) for group in cache.groups]
        self._windows = [group.window for group in cache.groups]
        self.layout: KVLayout = cache.groups[0].layout
        for at, group in enumerate(cache.groups):
            if group.layout != self.layout:
                raise UnsupportedError(
                    f"connector 'lookup' keeps the layers of all KV cache groups in one page, and blocks of"
                    f" group {at} ({group.layout}) differ from those of group 0 ({self.layout})"
                )

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.layout.block_size

    @property
    def has_windows(self) -> bool:
        """Whether the engine frees some blocks of a request while it runs."""
        return any(window is not None for window in self._windows)

    def check_page(self, page_tokens: int) -> None:
        """Check that no group frees the beginning of a page before its end is computed.

        Raises:
            LayoutError: a group does.
        """
        for window in self._windows:
            if window is not None and page_tokens > max(window, self.block_size):
                raise LayoutError(
                    f"pages of {page_tokens} tokens: layers with a window of {window} tokens free the first"
                    f" blocks of a page before its last ones are computed; at most"
                    f" {max(window, self.block_size)}"
                )

    # -- tables --------------------------------------------------------------------------------

    def tables(self, block_ids: BlockIds, end: int) -> BlockIds:
        """The blocks of the first ``end`` tokens."""
        count = -(-end // self.block_size)
        return tuple(tuple(table[:count]) for table in block_ids)

    def begins(self, block_ids: BlockIds, start: int, end: int) -> list[int]:
        """For each group, the first token of ``start`` to ``end`` from which on no block is missing."""
        first, last = start // self.block_size, -(-end // self.block_size)
        begins = []
        for table in block_ids:
            absent = [at for at in range(first, min(last, len(table))) if table[at] == NO_BLOCK]
            begins.append(max(start, (absent[-1] + 1) * self.block_size) if absent else start)
        return begins

    def first_whole_page(self, block_ids: BlockIds, first: int, last: int, page_tokens: int) -> int:
        """The first of pages ``first`` to ``last`` from which on no block is missing. A window may have freed
        blocks of pages from before the step."""
        begins = self.begins(block_ids, first * page_tokens, last * page_tokens)
        return -(-max(begins) // page_tokens)

    def check_load(self, block_ids: BlockIds, start: int, end: int) -> None:
        """Check that no block is missing after a load of these tokens.

        Raises:
            LayoutError: the next token attends to a missing block.
        """
        for number, (window, begin) in enumerate(
            zip(self._windows, self.begins(block_ids, start, end), strict=True)
        ):
            needed = start if window is None else max(start, end - window + 1)
            if begin > needed:
                raise LayoutError(
                    f"KV cache group {number} has no blocks for tokens {needed} to {begin}, but the token"
                    f" after {end} attends to them"
                )

    def written(self, block_ids: BlockIds, start: int, end: int) -> frozenset[int]:
        """The blocks of all groups that hold tokens ``start`` to ``end``."""
        first, last = start // self.block_size, -(-end // self.block_size)
        return frozenset(block for table in block_ids for block in table[first:last]) - {NO_BLOCK}

    def num_written(self, block_ids: BlockIds, start: int, end: int) -> int:
        """How many tokens a load of this range writes, summed over all layers."""
        begins = self.begins(block_ids, start, end)
        return sum((end - begin) * len(layers) for begin, layers in zip(begins, self._layers, strict=True))

    # -- pages ---------------------------------------------------------------------------------

    def pages(
        self,
        form: PageFormat,
        views: Sequence[Sequence[Tensor]],
        block_ids: BlockIds,
        first_token: int,
        count: int,
        *,
        writable: range | None = None,
        after: DeviceMark | None = None,
    ) -> PageBlocks:
        """Return ``count`` pages of a request, from ``first_token`` on, in its blocks.

        Args:
            writable: the tokens to load; ``None``: the pages are only read.

        Raises:
            LayoutError: the tables do not fit, or a page to read lacks a block.
        """
        begins = [0] * len(self._layers)
        if writable is not None:
            begins = self.begins(block_ids, writable.start, writable.stop)
        tables = [
            PageBlocks.Group(layers=layers, block_ids=table, begin=begin)
            for layers, table, begin in zip(self._layers, block_ids, begins, strict=True)
        ]
        return PageBlocks(form, views, tables, first_token, count, writable=writable, after=after)
