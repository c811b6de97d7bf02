"""Blocks of a paged cache as one message: the rows of several tensors, in order."""

from __future__ import annotations

import itertools
import logging
import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvplug.net.wire.tensors import as_bits
from kvplug.transport.block_views import (
    BlockViews,
    RowMemory,
    RowViews,
    as_elements,
    block_table,
    check_distinct,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class Blocks:
    """The blocks ``block_ids`` of many layers, layer after layer, each block with all its parts.

    Each row of a view is a block. For example, a cache ``[blocks, 2, tokens, heads, head size]`` has the
    views ``cache[:, 0]`` and ``cache[:, 1]``. A view need not be contiguous. The message is one tensor of
    shape ``[layers, len(block_ids), parts, *row of a view]``, without the axis of parts if there is only one
    part. So blocks that were sent can be received as a tensor, and the other way round. The bytes are in the
    order of the views' axes, whatever their strides are.
    """

    def __init__(
        self,
        views: BlockViews | Sequence[Tensor],
        block_ids: Sequence[int],
        *,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """Check the ids, and the views unless they were checked before; copy nothing.

        Args:
            views: ``[layer][part]``, checked once; or tensors, each of which is a layer with one part.
            on_layer: As in :meth:`Pipe.recv_blocks`.

        Raises:
            LayoutError: there are no views; layers differ in their number of parts, or views in shape, dtype
                or device; a view is lazily conjugated or negated; a block id is not a 64-bit integer, or not
                a row of the views.
        """
        self._of = of = views.rows if isinstance(views, BlockViews) else RowViews([(view,) for view in views])
        self._ids = block_table(block_ids, of.num_blocks)
        self.dtype = of.dtype
        """A ``torch.dtype``."""
        self.device = of.device
        """The device of the cache."""
        self.row_shape = of.row_shape
        """The shape of a block of one layer, with all its parts."""
        self.row_bytes = of.row_bytes
        """Bytes of one block of one layer."""
        self.num_rows = len(of.layers) * len(self._ids)
        """How many blocks all layers have together."""
        self._index: Tensor | None = None  # the ids as a tensor, made on first use
        self._on_layer = on_layer
        self._reported = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the message."""
        return (len(self._of.layers), len(self._ids), *self.row_shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of all layers."""
        return self.num_rows * self.row_bytes

    def check_distinct(self) -> None:
        """Check that the blocks can be written into.

        Raises:
            LayoutError: a block appears twice.
        """
        check_distinct(self._ids)

    @property
    def block_ids(self) -> array[int]:
        """The block ids as an array; callers must not change it."""
        return self._ids

    @property
    def memory(self) -> RowMemory | None:
        """Where the blocks lie, for compiled code; ``None`` if only :meth:`gather` and :meth:`scatter` can
        copy them, or if blocks overlap. The addresses are valid as long as this object is alive."""
        memory = self._of.memory if self._ids else None
        if memory is not None and self._of.reach > 1:
            ids = sorted(self._ids)
            if any(after - before < self._of.reach for before, after in itertools.pairwise(ids)):
                return None
        return memory

    @property
    def awaited_bytes(self) -> int:
        """How many bytes must have arrived before :meth:`arrived` reports the next layer; the whole message
        without ``on_layer``."""
        layers = self._reported + 1 if self._on_layer is not None else self.shape[0]
        return min(layers * len(self._ids) * self.row_bytes, self.nbytes)

    def arrived(self, nbytes: int) -> None:
        """Report each layer that is complete once the first ``nbytes`` bytes of the message are in the views.

        A transport may call this while a message arrives; :meth:`Pipe.recv_blocks` calls it at the end.
        """
        on_layer = self._on_layer
        while on_layer is not None and self._reported < self.shape[0]:
            if nbytes < self.awaited_bytes:
                return
            layer, self._reported = self._reported, self._reported + 1
            try:
                on_layer(layer)
            except Exception:  # the rest of the message must still be received
                logger.exception("on_layer(%d) of recv_blocks failed", layer)

    def runs(self) -> list[Tensor] | None:
        """Return the blocks of each layer as one contiguous tensor, or ``None`` if the ids are not
        consecutive, a layer has several parts, or the blocks are not contiguous."""
        ids = self._ids
        if (
            not self.nbytes
            or len(self._of.layers[0]) > 1
            or any(after - before != 1 for before, after in itertools.pairwise(ids))
        ):
            return None
        found = [view.detach()[ids[0] : ids[-1] + 1] for (view,) in self._of.layers]
        return found if all(each.is_contiguous() for each in found) else None

    def in_place(self) -> Tensor | None:
        """Return the message as a view of the cache if its blocks are one contiguous piece, else ``None``."""
        found = self.runs() if self.shape[0] == 1 else None
        return None if found is None else found[0].unsqueeze(0)

    def empty(self) -> Tensor:
        """Return an uninitialised tensor for the message."""
        import torch

        return torch.empty(self.shape, dtype=self.dtype, device=self.device)

    def gathered(self) -> Tensor:
        """Return the message as a new tensor."""
        tensor = self.empty()
        self.gather(0, tensor.view(self.num_rows, *self.row_shape))
        return tensor

    def gather(self, first: int, rows: Tensor) -> None:
        """Copy the message's rows, starting at ``first``, into ``rows``: a dense tensor ``[count, *row]``."""
        import torch

        rows = self._by_part(as_bits(rows))
        if self._of.is_by_row:
            for in_cache, row in self._pairs(first, rows):
                row.copy_(in_cache)
            return
        for layer, index, begin, end in self._runs(first, len(rows)):
            for part, view in enumerate(self._of.bits[layer]):
                torch.index_select(view, 0, index, out=rows[begin:end, part])

    def scatter(self, first: int, rows: Tensor) -> None:
        """Copy ``rows`` into the views: the inverse of :meth:`gather`."""
        rows = self._by_part(as_bits(rows))
        if self._of.is_by_row:
            for in_cache, row in self._pairs(first, rows):
                in_cache.copy_(row)
            return
        wide = as_elements(rows, axes=2)
        for layer, index, begin, end in self._runs(first, len(rows)):
            for part, view in enumerate(self._of.wide[layer]):
                if len(self._ids) == 1:  # usually contiguous, and an index would copy it byte by byte
                    self._of.bits[layer][part][self._ids[0]].copy_(rows[begin, part])
                elif view is None or wide is None:
                    self._of.bits[layer][part].index_copy_(0, index, rows[begin:end, part])
                else:
                    view.index_copy_(0, index, wide[begin:end, part])

    def _pairs(self, first: int, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each part of each block in the cache, with its place in ``rows``."""
        for number, row in enumerate(rows, first):
            layer, at = divmod(number, len(self._ids))
            for view, part in zip(self._of.bits[layer], row, strict=True):
                yield view[self._ids[at]], part

    def _by_part(self, rows: Tensor) -> Tensor:
        """Return ``rows`` as ``[count, parts, *row of a view]``."""
        return rows if len(self._of.layers[0]) > 1 else rows.unsqueeze(1)

    def _runs(self, first: int, count: int) -> Iterator[tuple[int, Any, int, int]]:
        """Yield (layer, index of its blocks, and where in ``rows`` they begin and end)."""
        import torch

        if self._index is None:
            index = torch.tensor(self._ids, dtype=torch.int64)
            if self.device.type == "cuda":  # copying from unpinned memory would wait for the stream
                index = index.pin_memory()
            self._index = index.to(self.device, non_blocking=True)
        done = 0
        while done < count:
            number, at = divmod(first + done, len(self._ids))
            step = min(count - done, len(self._ids) - at)
            yield number, self._index[at : at + step], done, done + step
            done += step


def nbytes_of_blocks(views: BlockViews | Sequence[Tensor], block_ids: Sequence[int]) -> int:
    """Return how many bytes the message of these blocks has."""
    flat: Any = [view for layer in views for view in layer] if isinstance(views, BlockViews) else views
    view = flat[0]
    nbytes: int = len(flat) * len(block_ids) * math.prod(view.shape[1:]) * view.dtype.itemsize
    return nbytes
