"""Views of a paged cache, checked and measured once for all messages and pages that are copied through them.

The bytes of a page are in the order of its format, and the bytes of a block in the order of the views' axes.
In a paged cache these bytes are scattered: each layer and part has its own address, and there may be gaps
between heads. :func:`struct_part` and :class:`RowMemory` describe their places for compiled code.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.tensors import as_bits

if TYPE_CHECKING:
    from torch import Tensor


_LONG_ROW_BYTES: Final = 16 << 10
"""From this size on, copying blocks one by one is faster than through an index, even from Python."""


@attrs.frozen(eq=False)
class RowMemory:
    """Where blocks lie in CPU memory. A block of a layer has ``num_parts`` places."""

    bases: array[int]
    """The address of each place of block 0, layer after layer."""
    block_strides: array[int]
    """For each address in ``bases``, the bytes from one block to the next."""
    num_parts: int
    """Places per block and layer. 1 if the parts are equally far apart in all layers: then they are an axis
    in ``counts``."""
    run_bytes: int
    """The bytes of a contiguous run. A place is one run, or as many runs as ``counts`` describes."""
    counts: tuple[int, ...]
    """Sizes of the axes outside the runs, the slowest axis of the message first; empty if a place is
    contiguous."""
    strides: tuple[int, ...]
    """The strides of those axes, in bytes."""


class BlockViews(tuple[tuple[Any, ...], ...]):
    """Views of a paged cache, ``[layer][part]``. Their properties are computed only once, so use the same
    object for many requests.

    Each view is a tensor [blocks, ...] of any strides; :class:`PageBlocks` needs
    [blocks, tokens in a block, ...]. :meth:`kvplug.engine.KVLayout.page_views` makes views of an engine's
    caches.

    Raises:
        LayoutError: a layer is a single tensor.
    """

    def __new__(cls, views: Sequence[Sequence[Tensor]]) -> BlockViews:
        views = list(views)
        if any(hasattr(layer, "data_ptr") for layer in views):
            raise LayoutError("views must be [layer][part]: a layer with one part is a list of one tensor")
        return super().__new__(cls, map(tuple, views))

    @cached_property
    def parts(self) -> tuple[array[int], tuple[int, ...]]:
        """The fields of :func:`struct_part` for each part of each layer, and each part's bytes per token,
        which are the same in all layers.

        Raises:
            LayoutError: a view is not in CPU memory, or is lazily conjugated or negated; views differ in
                their blocks or tokens per block, or layers in their bytes per token.
        """
        return _parts_of(self)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of a block in each part of each layer; 0 unless all these blocks are contiguous, in CPU
        memory and of the same size."""
        sizes = {
            view[0].nbytes if view.device.type == "cpu" and len(view) and view[0].is_contiguous() else 0
            for layer in self
            for view in layer
        }
        return int(sizes.pop()) if len(sizes) == 1 else 0

    def as_bytes(self, layers: range) -> BlockViews:
        """Return these layers as byte views [blocks, :attr:`block_bytes`]. Each part becomes a layer."""
        found = self._as_bytes.get(layers)
        if found is None:
            found = self._as_bytes[layers] = BlockViews(
                [
                    (as_bits(view).detach().flatten(1).view(_uint8()),)
                    for layer in layers
                    for view in self[layer]
                ]
            )
        return found

    @cached_property
    def _as_bytes(self) -> dict[range, BlockViews]:
        return {}

    @cached_property
    def stacked(self) -> list[Tensor | None]:
        """The bits of each layer as one view [parts, blocks, ...]; ``None`` if its parts have different
        shapes or lie in different memory, or are not equally far apart."""
        return [_stacked([as_bits(view).detach() for view in layer]) for layer in self]

    @cached_property
    def rows(self) -> RowViews:
        """The same views as :class:`RowViews`.

        Raises:
            LayoutError: as :class:`RowViews` raises it.
        """
        return RowViews(self)


class RowViews:
    """Views with a block in each row. All views have the same shape, dtype and device.

    A row of a message is a block of one layer with all its parts.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Check the views.

        Raises:
            LayoutError: there are no views; layers differ in their number of parts, or views in shape, dtype
                or device; a view is lazily conjugated or negated.
        """
        given = [(layer, part, view) for layer, of in enumerate(layers) for part, view in enumerate(of)]
        if not given:
            raise LayoutError("give at least one view")
        first = given[0][2]
        for layer, part, view in given:
            where = f"(layer {layer}, part {part})"
            if view.dim() == 0 or view.shape != first.shape:
                raise LayoutError(
                    f"views must have the same shape; got {list(first.shape)} and {list(view.shape)} {where}"
                )
            if view.dtype != first.dtype or view.device != first.device:
                raise LayoutError(
                    f"views must have the same dtype and device; got {first.dtype} on {first.device} and"
                    f" {view.dtype} on {view.device} {where}"
                )
            if view.is_conj() or view.is_neg():
                raise LayoutError(
                    f"a view is lazily conjugated or negated: call resolve_conj() or resolve_neg() {where}"
                )
        for layer, of in enumerate(layers):
            if len(of) != len(layers[0]):
                raise LayoutError(f"layer 0 has {len(layers[0])} parts, but layer {layer} has {len(of)}")
        self.layers = tuple(map(tuple, layers))
        self.num_blocks: int = first.shape[0]
        self.dtype = first.dtype
        """A ``torch.dtype``."""
        self.device = first.device
        parts = len(layers[0])
        self.row_shape = (parts, *first.shape[1:]) if parts > 1 else tuple(first.shape[1:])
        """The shape of a row, without the axis of parts if there is only one part."""
        self.row_bytes: int = math.prod(self.row_shape) * first.dtype.itemsize

    @cached_property
    def memory(self) -> RowMemory | None:
        """Where the blocks lie. ``None`` if the views are not in CPU memory, have no bytes, or differ in
        their strides, or if elements of a block overlap.

        The addresses are valid as long as this object is alive.
        """
        if self.device.type != "cpu" or not (self.num_blocks and self.row_bytes):
            return None
        views = [view for layer in self.layers for view in layer]
        if not all(_is_plain(view) and _is_disjoint(view[0]) for view in views):
            return None
        itemsize = views[0].element_size()
        strides = views[0].stride()[1:]
        if any(view.stride()[1:] != strides for view in views):
            return None
        self._held = [view.untyped_storage() for view in views]  # setting .data may replace a view's storage
        bases = [[view.data_ptr() for view in layer] for layer in self.layers]
        block_strides = [[view.stride(0) * itemsize for view in layer] for layer in self.layers]
        axes = [(count, stride * itemsize) for count, stride in zip(views[0].shape[1:], strides, strict=True)]
        if (apart := _apart(bases)) and all(len(set(layer)) == 1 for layer in block_strides):
            axes.insert(0, (len(bases[0]), apart))
            bases, block_strides = ([layer[:1] for layer in each] for each in (bases, block_strides))
        run_bytes, axes = _runs_of(axes, itemsize)
        return RowMemory(
            array("q", itertools.chain(*bases)),
            array("q", itertools.chain(*block_strides)),
            len(bases[0]),
            run_bytes,
            tuple(count for count, _ in axes),
            tuple(stride for _, stride in axes),
        )

    @cached_property
    def reach(self) -> int:
        """Blocks whose ids differ by at least this number do not overlap in any view."""
        reach = 1
        for view in (view for layer in self.layers for view in layer):
            if not _is_disjoint(view):
                extent = 1 + sum(
                    (count - 1) * stride
                    for count, stride in zip(view.shape[1:], view.stride()[1:], strict=True)
                )
                reach = max(reach, -(-extent // view.stride(0)) if view.stride(0) else self.num_blocks)
        return reach

    @cached_property
    def is_by_row(self) -> bool:
        """Whether blocks are copied one by one, because they are long and contiguous, and overlap in a view.
        With an index, torch would copy them element by element."""
        views = [view for layer in self.layers for view in layer]
        is_long = self.row_bytes >= _LONG_ROW_BYTES * len(self.layers[0])
        return is_long and self.reach > 1 and all(view[0].is_contiguous() for view in views)

    @cached_property
    def bits(self) -> list[list[Tensor]]:
        """The views as integers, which torch reads fastest."""
        return [[as_bits(view) for view in layer] for layer in self.layers]

    @cached_property
    def wide(self) -> list[list[Tensor | None]]:
        """The views in elements of 16 bytes, which torch writes fastest; ``None`` for views that do not
        allow that."""
        return [[as_elements(view) for view in layer] for layer in self.layers]


def block_table(block_ids: Sequence[int], num_blocks: int, first_used: int = 0) -> array[int]:
    """Return the block ids as an array, after checking them. Ids before ``first_used`` may be any integers.

    Raises:
        LayoutError: an id is not a 64-bit integer, or is out of range for a cache of ``num_blocks`` blocks.
    """
    try:
        table = array("q", block_ids)  # refuses numbers that are not integers; a tensor would round them
    except (TypeError, OverflowError) as e:
        raise LayoutError(f"block ids must be 64-bit integers: {e}") from e
    used = table[first_used:]
    if used and not 0 <= min(used) <= max(used) < num_blocks:
        wrong = next(each for each in used if not 0 <= each < num_blocks)
        raise LayoutError(f"block {wrong} is out of range: the cache has {num_blocks} blocks")
    return table


def check_distinct(table: array[int]) -> None:
    """Check that blocks can be written into.

    Raises:
        LayoutError: a block appears twice.
    """
    if len(set(table)) != len(table):
        twice = next(each for each in table if table.count(each) > 1)
        raise LayoutError(f"block {twice} comes twice, but a block can be written only once")


def _uint8() -> Any:
    import torch

    return torch.uint8


MAX_AXES: Final = 4
"""``MAX_AXES`` of pages.c."""


def struct_part(
    base: int,
    block_stride: int,
    run_bytes: int,
    token_stride: int = 0,
    axes: Sequence[tuple[int, int]] = (),
) -> list[int]:
    """Return the fields of ``struct part`` of pages.c: where one part of one layer lies. All but the sizes of
    axes are in bytes.

    Args:
        base: the address of block 0.
        block_stride: the distance from one block to the next.
        run_bytes: the length of each contiguous run of a token's bytes.
        token_stride: the distance from one token of a block to the next.
        axes: (size, stride in the cache) of each axis of a token outside the runs, the slowest axis of a row
            first. In a row these axes are contiguous.

    Raises:
        LayoutError: there are more than four such axes.
    """
    if len(axes) > MAX_AXES:
        raise LayoutError(
            f"a token of a view has {len(axes)} axes with gaps; at most {MAX_AXES} are supported"
        )
    token_bytes, found = run_bytes, []
    for count, stride in reversed(axes):
        found.append((stride, count, token_bytes))
        token_bytes *= count
    found.sort(reverse=True)
    found += [(0, 0, 0)] * (MAX_AXES - len(axes))
    in_cache, counts, in_row = zip(*found, strict=True)
    return [
        base,
        block_stride,
        token_stride,
        token_bytes,
        run_bytes,
        len(axes),
        *counts,
        *in_cache,
        *in_row,
    ]


def _parts_of(views: BlockViews) -> tuple[array[int], tuple[int, ...]]:
    fields, sizes = array("q"), set[tuple[int, ...]]()
    blocks = views[0][0].shape[:2]
    for layer in views:
        of_layer = []
        for view in layer:
            if view.device.type != "cpu" or view.is_conj() or view.is_neg() or view.shape[:2] != blocks:
                raise LayoutError(
                    f"pages are copied between views of {list(blocks)} in CPU memory that are not lazily"
                    f" conjugated or negated, not with {list(view.shape)} on {view.device}"
                )
            itemsize = view.element_size()
            block, token, *rest = (stride * itemsize for stride in view.stride())
            run_bytes, axes = _runs_of(list(zip(view.shape[2:], rest, strict=True)), itemsize)
            fields.extend(struct_part(view.data_ptr(), block, run_bytes, token, axes))
            of_layer.append(math.prod(view.shape[2:]) * itemsize)
        sizes.add(tuple(of_layer))
    if len(sizes) != 1:
        raise LayoutError(f"layers must have the same bytes per token in each part; got {sorted(sizes)}")
    return fields, sizes.pop()


def _stacked(views: list[Tensor]) -> Tensor | None:
    first = views[0]
    steps = {
        after.storage_offset() - before.storage_offset() for before, after in itertools.pairwise(views)
    } or {0}
    alike = {(view.shape, view.stride(), view.dtype, view.untyped_storage().data_ptr()) for view in views}
    if len(alike) > 1 or len(steps) > 1 or min(steps) < 0:
        return None
    return first.as_strided((len(views), *first.shape), (*steps, *first.stride()))


def _is_plain(view: Tensor) -> bool:
    """Whether the view is a plain strided tensor, neither sparse nor nested nor of a subclass."""
    import torch

    return (
        type(view) in (torch.Tensor, torch.nn.Parameter)
        and view.layout is torch.strided
        and not view.is_nested
    )


def _is_disjoint(view: Tensor) -> bool:
    """Whether no two elements share memory."""
    extent = 1
    for stride, count in sorted(zip(view.stride(), view.shape, strict=True)):
        if count > 1:
            if stride < extent:
                return False
            extent += stride * (count - 1)
    return True


def _apart(bases: list[list[int]]) -> int:
    """Return the bytes from each part to the next; 0 if they differ, or if there is only one part."""
    steps = {after - before for layer in bases for before, after in itertools.pairwise(layer)}
    return max(steps.pop(), 0) if len(steps) == 1 else 0


def _runs_of(axes: list[tuple[int, int]], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """Return the length in bytes of the contiguous runs, and the fewest possible axes outside the runs, as
    (count, stride in bytes)."""
    found = [(1, itemsize)]  # the slowest first
    for count, stride in reversed(axes):
        inner, step = found[0]
        if stride == inner * step:
            found[0] = (inner * count, step)
        elif count > 1:
            found.insert(0, (count, stride))
    *outer, (count, step) = found
    return count * step, outer


def as_elements(view: Tensor, axes: int = 1) -> Tensor | None:
    """Return a view of the same memory in elements of 16 bytes. Return ``None`` if the view's addresses,
    strides or last axis are not multiples of 16 bytes, if its last axis is not contiguous or is among the
    first ``axes`` axes, which are indexed, or if it is not in CPU memory.

    torch copies strided tensors and scatters rows element by element. With elements of 16 bytes this is 4 to
    7 times as fast as with 2 bytes.
    """
    import torch

    wide = torch.complex128
    count = wide.itemsize // view.element_size()
    if (
        view.device.type != "cpu"
        or view.is_conj()
        or view.is_neg()
        or view.dim() <= axes
        or view.shape[-1] % count
        or view.stride(-1) != 1
        or any(stride % count for stride in view.stride()[:-1])
        or view.data_ptr() % wide.itemsize
    ):
        return None
    bits = as_bits(view)
    return bits if bits.dtype is wide else bits.view(wide)
