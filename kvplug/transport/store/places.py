"""Where pages lie in this process's memory, for compiled code that copies them.

A page's row has its bytes in the order of its format. In a paged cache the same bytes lie elsewhere: each
layer and part has its own address, tokens are spread over blocks, and heads may be further apart than their
bytes. A :class:`PartPlace` says so for one part, equally for all layers; a :class:`PagePlaces` adds the
addresses and the blocks of one sequence."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class PartPlace:
    """How one part of a layer lies in a cache. All numbers but ``counts`` are bytes."""

    block_stride: int
    token_stride: int
    counts: tuple[int, ...]
    """Sizes of the axes after the tokens', of which the last ones may be contiguous."""
    strides: tuple[int, ...]
    """Of those axes, in the cache. In a row they are contiguous."""
    itemsize: int


@attrs.frozen(eq=False)
class PagePlaces:
    """Where consecutive pages lie."""

    bases: array[int]
    """Addresses of block 0: of each part of each layer, layer after layer."""
    parts: tuple[PartPlace, ...]
    block_ids: array[int]
    """The blocks of the pages' tokens, in their order."""
    block_tokens: int
    """Tokens in a block."""
    page_tokens: int
    """Tokens in a page."""
    first_token: int
    """Where in the first of these blocks the first page begins."""
    writable: range
    """The tokens that may be written, counted as ``first_token`` is."""


class BlockViews(tuple[tuple[Any, ...], ...]):
    """Views of a paged cache, ``[layer][part]``, as :class:`PageBlocks` takes them; what is known of them is
    looked up once, where the same views are used for many requests.

    Each is a tensor [blocks, tokens in a block, ...] of any strides.
    """

    _places: tuple[array[int], tuple[PartPlace, ...]] | None
    _is_known: bool = False

    def __new__(cls, views: Sequence[Sequence[Tensor]]) -> BlockViews:
        return super().__new__(cls, map(tuple, views))

    @property
    def places(self) -> tuple[array[int], tuple[PartPlace, ...]] | None:
        """The addresses of block 0 of each part of each layer, and how the parts lie; ``None``: not in this
        processor's memory, or not alike in all layers."""
        if not self._is_known:
            self._places = _places_of(self)
            self._is_known = True
        return self._places


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
    return PartPlace(block, token, tuple(view.shape[2:]), tuple(rest), itemsize)
