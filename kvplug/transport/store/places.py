"""Where pages lie in this process's memory, for compiled code that copies them.

A :class:`PartPlace` says how one part lies in a cache, equally for all layers; a :class:`PagePlaces` adds the
addresses and the blocks of one sequence."""

from __future__ import annotations

from array import array

import attrs

from kvplug.transport.block_views import PartPlace


@attrs.frozen(eq=False)
class PagePlaces:
    """Where consecutive pages lie."""

    bases: array[int]
    """Addresses of block 0: of each part of each layer, layer after layer."""
    parts: tuple[PartPlace, ...]
    """How each part of a layer lies in the cache, in the order of the format."""
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
