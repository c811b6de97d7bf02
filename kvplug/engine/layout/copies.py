"""Token-granular copies between a paged cache and tensors of shape [tokens, heads, head size].

Each copy is at most three operations for keys and three for values: a first block that is entered in
the middle, all whole blocks at once, a last block that is left early. The cache is looked at through
``as_strided`` as [block, token, head, element], which costs nothing and is the same for every layout.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplug.engine.layout.axes import KVLayout, dimensions
from kvplug.errors import LayoutError
from kvplug.transport.block_views import block_table, check_distinct
from kvplug.transport.store.cache_blocks import copy_tokens, ids_on

if TYPE_CHECKING:
    from torch import Tensor


def views(cache: Tensor, layout: KVLayout, *, layer: int | None = None) -> tuple[Tensor, Tensor | None]:
    """Keys and values of one layer as views of the cache, each [blocks, tokens in a block, heads, head size].

    Values are ``None`` and there is one head where the layout is latent. ``layer`` is the index on the
    axis L, and is needed exactly where the layout has one.

    Raises:
        LayoutError: the cache's shape is not the layout's, or there is no such layer.
    """
    layout.check_shape(tuple(cache.shape))
    sizes = layout.sizes
    strides: dict[str, int] = {}
    for name, stride in zip(dimensions(layout.axes), cache.stride(), strict=True):
        if name == "KD":
            strides["K"], strides["D"] = stride * sizes["D"], stride
        else:
            strides[name] = stride
    offset = cache.storage_offset() + _layer_offset(layout, layer, strides)
    num_blocks = cache.shape[dimensions(layout.axes).index("B")]
    shape = (num_blocks, sizes["T"], sizes.get("H", 1), sizes["D"])
    stride4 = (strides["B"], strides["T"], strides.get("H", strides["D"]), strides["D"])
    key = cache.as_strided(shape, stride4, offset)
    value = cache.as_strided(shape, stride4, offset + strides["K"]) if "K" in strides else None
    return key, value


def _layer_offset(layout: KVLayout, layer: int | None, strides: dict[str, int]) -> int:
    num_layers = layout.num_layers
    if num_layers is None:
        if layer is not None:
            raise LayoutError(f"axis L: layout {layout.axes!r} has none, and layer {layer} was asked for")
        return 0
    if layer is None:
        raise LayoutError(f"axis L: layout {layout.axes!r} holds {num_layers} layers; say which one")
    if not 0 <= layer < num_layers:
        raise LayoutError(f"axis L: layout {layout.axes!r} holds {num_layers} layers, and none is {layer}")
    return layer * strides["L"]


def gather(
    cache: Tensor,
    layout: KVLayout,
    block_ids: Sequence[int],
    start: int,
    end: int,
    *,
    out_key: Tensor | None = None,
    out_value: Tensor | None = None,
    layer: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Copy the KV of tokens ``start`` to ``end`` (exclusive) of one sequence out of the cache.

    Args:
        block_ids: the sequence's block table; its i-th block holds tokens i * block_size and on.
        out_key, out_value: memory to copy into, shape [end - start, heads, head size], of the cache's
            dtype and device; need not be contiguous. Allocated where not given.
        layer: where the layout has an axis L.

    Returns:
        ``(key, value)``, each [tokens, heads, head size]; latent attention has one head, and ``None``.

    Raises:
        LayoutError: the cache is not of this layout; a block id is out of range or comes twice; there
            are too few blocks; an ``out`` does not fit; part of a block is asked for that can only be moved
            whole (``block_format``). Nothing was copied.
    """
    layout.check_range(start, end)
    key_view, value_view = views(cache, layout, layer=layer)
    index = _block_index(block_ids, layout.block_size, key_view.shape[0], start, end)
    if value_view is None and out_value is not None:
        raise LayoutError(f"layout {layout.axes!r} has no values, and memory for them was given")
    key = _memory("out_key", out_key, key_view, end - start)
    value = None if value_view is None else _memory("out_value", out_value, value_view, end - start)
    _copy(index, start, ((key_view, key), (value_view, value)), into_cache=False)
    return key, value


def scatter(
    cache: Tensor,
    layout: KVLayout,
    block_ids: Sequence[int],
    start: int,
    key: Tensor,
    value: Tensor | None = None,
    *,
    layer: int | None = None,
) -> None:
    """Copy the KV of a sequence's tokens, from token ``start`` on, into the cache: ``gather`` turned round.

    Args:
        key, value: [tokens, heads, head size], of the cache's dtype and device; need not be contiguous.
            ``value`` is ``None`` exactly for latent attention.

    Raises:
        LayoutError: as for :func:`gather`. Nothing was copied.
    """
    key_view, value_view = views(cache, layout, layer=layer)
    if (value is None) != (value_view is None):
        given = "none were given" if value is None else "some were given"
        raise LayoutError(f"layout {layout.axes!r} has {'no ' if value_view is None else ''}values; {given}")
    num_tokens = key.shape[0] if key.dim() else 0
    layout.check_range(start, start + num_tokens)
    index = _block_index(block_ids, layout.block_size, key_view.shape[0], start, start + num_tokens)
    _memory("key", key, key_view, num_tokens)
    if value is not None and value_view is not None:
        _memory("value", value, value_view, num_tokens)
    _copy(index, start, ((key_view, key), (value_view, value)), into_cache=True)


# -- the pieces --------------------------------------------------------------------------------


def _block_index(
    block_ids: Sequence[int], block_size: int, num_blocks: int, start: int, end: int
) -> array[int] | None:
    """The ids of the blocks that hold the range, checked; ``None`` for no token."""
    if not 0 <= start <= end:
        raise LayoutError(f"tokens {start} to {end} are no range")
    if end > len(block_ids) * block_size:
        raise LayoutError(
            f"tokens {start} to {end} do not fit {len(block_ids)} blocks of {block_size}, which hold"
            f" {len(block_ids) * block_size}"
        )
    if start == end:
        return None
    index = block_table(block_ids[start // block_size : -(-end // block_size)], num_blocks)
    check_distinct(index)
    return index


def _copy(
    index: array[int] | None,
    start: int,
    parts: Sequence[tuple[Tensor | None, Tensor | None]],
    *,
    into_cache: bool,
) -> None:
    """Copy each part between its view of the cache and its tokens, where there are any."""
    if index is None:
        return
    for view, tokens in parts:
        if view is not None and tokens is not None:
            ids = ids_on(index, view.device)
            copy_tokens(view, index, ids, start, tokens, into_cache=into_cache)


def _memory(name: str, given: Tensor | None, view: Tensor, num_tokens: int) -> Tensor:
    """The tensor of the tokens' keys or values: the given one, checked, or a new one."""
    wanted = (num_tokens, view.shape[2], view.shape[3])
    if given is None:
        return view.new_empty(wanted)
    if tuple(given.shape) != wanted:
        raise LayoutError(f"{name}: expected the shape {list(wanted)}, got {list(given.shape)}")
    if given.dtype != view.dtype or given.device != view.device:
        raise LayoutError(
            f"{name}: expected {view.dtype} on {view.device}, as the cache has, got {given.dtype} on"
            f" {given.device}"
        )
    return given
