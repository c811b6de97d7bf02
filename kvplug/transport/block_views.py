"""Views of a paged cache, checked and measured once for all messages and pages that are copied through them.

A row of pages has its bytes in the order of their format, a row of blocks in the order of the views' axes. In
a paged cache the same bytes lie elsewhere: each layer and part has its own address, and heads may be further
apart than their bytes. :class:`PartPlace` and :class:`RowMemory` say so, for compiled code that copies them.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.errors import LayoutError
from kvplug.net.wire.tensors import as_bits

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class PartPlace:
    """How one part of a layer lies in a cache. All numbers but sizes of axes are bytes."""

    block_stride: int
    """From one block to the next."""
    token_stride: int
    """From one token of a block to the next."""
    run_bytes: int
    """Bytes of a token that are contiguous."""
    axes: tuple[tuple[int, int], ...]
    """The axes of a token outside the runs, the slowest in a row first: sizes, and strides in the cache. In a
    row they are contiguous."""


@attrs.frozen(eq=False)
class RowMemory:
    """Where blocks lie in this processor's memory. A block of a layer has ``num_parts`` places."""

    bases: array[int]
    """The addresses of block 0: of each place of each layer, layer after layer."""
    block_strides: array[int]
    """Of each of them, the bytes from one block to the next."""
    num_parts: int
    """1 also where parts are one of the axes below, since they are equally far apart in all layers."""
    run_bytes: int
    """Bytes that are contiguous. A place is one run, or ``counts`` of them."""
    counts: tuple[int, ...]
    """Sizes of the axes outside the runs, the slowest in the message first; none if a place is contiguous."""
    strides: tuple[int, ...]
    """Of those axes, in bytes."""


class BlockViews(tuple[tuple[Any, ...], ...]):
    """Views of a paged cache, ``[layer][part]``; what is known of them is looked up once, where the same
    views are used for many requests.

    Each is a tensor [blocks, ...] of any strides; :class:`PageBlocks` needs [blocks, tokens in a block, ...].
    :meth:`kvplug.engine.KVLayout.page_views` makes them of an engine's caches.

    Raises:
        LayoutError: a layer is a single tensor.
    """

    def __new__(cls, views: Sequence[Sequence[Tensor]]) -> BlockViews:
        views = list(views)
        if any(hasattr(layer, "data_ptr") for layer in views):
            raise LayoutError("views come as [layer][part]: a layer with one part is a list of one tensor")
        return super().__new__(cls, map(tuple, views))

    @cached_property
    def places(self) -> tuple[array[int], tuple[PartPlace, ...]] | None:
        """The addresses of block 0 of each part of each layer, and how the parts lie; ``None``: not in this
        processor's memory, or not alike in all layers."""
        return _places_of(self)

    @cached_property
    def rows(self) -> RowViews:
        """The same views, checked to be alike.

        Raises:
            LayoutError: as :class:`RowViews` says.
        """
        return RowViews(self)


class RowViews:
    """Views that have a block in each row: all of one shape, one dtype, and on one device.

    A row of a message is a block of one layer with all its parts.
    """

    def __init__(self, layers: Sequence[Sequence[Tensor]]) -> None:
        """Check the views.

        Raises:
            LayoutError: there is no view; layers differ in their number of parts, or views in shape, dtype
                or device; numbers are to be conjugated or negated first.
        """
        given = [(layer, part, view) for layer, of in enumerate(layers) for part, view in enumerate(of)]
        if not given:
            raise LayoutError("blocks of no tensor: give at least one view")
        first = given[0][2]
        for layer, part, view in given:
            where = f"(layer {layer}, part {part})"
            if view.dim() == 0 or view.shape != first.shape:
                raise LayoutError(
                    f"views have blocks of one shape; got {list(first.shape)} and {list(view.shape)} {where}"
                )
            if view.dtype != first.dtype or view.device != first.device:
                raise LayoutError(
                    f"views are of one dtype on one device; got {first.dtype} on {first.device} and"
                    f" {view.dtype} on {view.device} {where}"
                )
            if view.is_conj() or view.is_neg():
                raise LayoutError(
                    f"a view's numbers are still to be conjugated or negated: resolve that first {where}"
                )
        for layer, of in enumerate(layers):
            if len(of) != len(layers[0]):
                raise LayoutError(f"layer 0 has {len(layers[0])} parts, and layer {layer} has {len(of)}")
        self.layers = tuple(map(tuple, layers))
        self.num_blocks: int = first.shape[0]
        self.dtype = first.dtype
        """A ``torch.dtype``."""
        self.device = first.device
        parts = len(layers[0])
        self.row_shape = (parts, *first.shape[1:]) if parts > 1 else tuple(first.shape[1:])
        """Without the axis of parts where there is one part."""
        self.row_bytes: int = math.prod(self.row_shape) * first.dtype.itemsize

    @cached_property
    def memory(self) -> RowMemory | None:
        """``None``: not in this processor's memory, without bytes, with strides that differ between views, or
        with blocks that lie over each other.

        The addresses are good for as long as this object is alive.
        """
        if self.device.type != "cpu" or not (self.num_blocks and self.row_bytes):
            return None
        views = [view for layer in self.layers for view in layer]
        if not all(_is_plain(view) and _is_disjoint(view) for view in views):
            return None
        itemsize = views[0].element_size()
        strides = views[0].stride()[1:]
        if any(view.stride()[1:] != strides for view in views):
            return None
        self._held = [view.untyped_storage() for view in views]  # .data may give a view another one
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
    def bits(self) -> list[list[Tensor]]:
        """The views as integers, as torch reads them fastest."""
        return [[as_bits(view) for view in layer] for layer in self.layers]

    @cached_property
    def wide(self) -> list[list[Tensor | None]]:
        """The views in elements of 16 bytes, as torch writes them fastest; ``None`` for the others."""
        return [[as_elements(view) for view in layer] for layer in self.layers]


def block_table(block_ids: Sequence[int], num_blocks: int, first_used: int = 0) -> array[int]:
    """Block ids, checked: those before ``first_used`` may be any integers.

    Raises:
        LayoutError: an id is no integer of 64 bits, or no block of a cache with ``num_blocks``.
    """
    try:
        table = array("q", block_ids)  # refuses what is no integer, where a tensor would round it
    except (TypeError, OverflowError) as e:
        raise LayoutError(f"block ids are integers of 64 bits: {e}") from e
    used = table[first_used:]
    if used and not 0 <= min(used) <= max(used) < num_blocks:
        wrong = next(each for each in used if not 0 <= each < num_blocks)
        raise LayoutError(f"block {wrong} is out of range, the cache has {num_blocks} blocks")
    return table


def check_distinct(table: array[int]) -> None:
    """Check that blocks can be written into.

    Raises:
        LayoutError: a block comes twice.
    """
    if len(set(table)) != len(table):
        twice = next(each for each in table if table.count(each) > 1)
        raise LayoutError(f"block {twice} comes twice, and can be written once")


def _places_of(views: BlockViews) -> tuple[array[int], tuple[PartPlace, ...]] | None:
    parts: tuple[PartPlace, ...] | None = None
    bases = array("q")
    blocks = views[0][0].shape[:2]
    for layer in views:
        if any(view.device.type != "cpu" or view.is_conj() or view.is_neg() for view in layer):
            return None
        if any(view.shape[:2] != blocks for view in layer):
            return None
        found = tuple(map(_place_of, layer))
        if parts is not None and found != parts:
            return None
        parts = found
        bases.extend(view.data_ptr() for view in layer)
    return None if parts is None else (bases, parts)


def _place_of(view: Tensor) -> PartPlace:
    itemsize = view.element_size()
    block, token, *rest = (stride * itemsize for stride in view.stride())
    run_bytes, axes = _runs_of(list(zip(view.shape[2:], rest, strict=True)), itemsize)
    return PartPlace(block, token, run_bytes, tuple(axes))


def _is_plain(view: Tensor) -> bool:
    """Whether it is a plain strided tensor: no subclass, sparse or nested one."""
    import torch

    return (
        type(view) in (torch.Tensor, torch.nn.Parameter)
        and view.layout is torch.strided
        and not view.is_nested
    )


def _is_disjoint(view: Tensor) -> bool:
    """Whether each element has memory of its own."""
    extent = 1
    for stride, count in sorted(zip(view.stride(), view.shape, strict=True)):
        if count > 1:
            if stride < extent:
                return False
            extent += stride * (count - 1)
    return True


def _apart(bases: list[list[int]]) -> int:
    """The bytes from each part to the next, the same in all layers; 0: they differ, or there is one part."""
    steps = {after - before for layer in bases for before, after in itertools.pairwise(layer)}
    return max(steps.pop(), 0) if len(steps) == 1 else 0


def _runs_of(axes: list[tuple[int, int]], itemsize: int) -> tuple[int, list[tuple[int, int]]]:
    """The contiguous bytes at the end, and the axes outside, as few as possible: (count, bytes)."""
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
    """The same memory in elements of 16 bytes, whatever the strides; ``None``: its last axis is not made of
    such, or is among the first ``axes``, which are indexed, or it is not in this processor's memory.

    torch copies strided tensors, and scatters rows, element by element: with 16 bytes at a time 4 to 7 times
    as fast as with 2.
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
