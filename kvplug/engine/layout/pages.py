"""Pages of a paged cache: their format, and the views of the cache that they are copied through.

A page has the same format whatever the cache's layout is, as long as the axes say where everything lies:
keys, then values, each [tokens, heads, head size]; one latent where there are no values. Engines with
different layouts and block sizes share pages. Blocks in a kernel's own order make pages that only the same
kernel can read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvplug.engine.layout.axes import KVLayout
from kvplug.engine.layout.copies import views
from kvplug.errors import LayoutError
from kvplug.transport.block_views import BlockViews
from kvplug.transport.store.format import PageFormat, Part

if TYPE_CHECKING:
    from torch import Tensor

PAGE_TOKENS = 16
"""Tokens in a page, where nothing else is asked for."""


def page_tokens_of(layout: KVLayout, wanted: int | None = None) -> int:
    """Tokens in a page of a cache with this layout.

    Args:
        wanted: What the operator asks for; ``None``: 16, or the least number of whole blocks with as many
            tokens where a block cannot be divided.

    Raises:
        LayoutError: ``wanted`` tokens cannot be moved without the rest of a block.
    """
    granule = layout.granule
    if wanted is None:
        return math.ceil(PAGE_TOKENS / granule) * granule
    if wanted < 1 or wanted % granule:
        raise LayoutError(
            f"pages of {wanted} tokens: the inside of a block of {granule} is in the kernel's own order"
            f" ({layout.block_format}), so a page is a multiple of {granule} tokens"
        )
    return wanted


def page_format_of(layout: KVLayout, dtype: str, num_layers: int, page_tokens: int) -> PageFormat:
    """The format of pages of ``page_tokens`` tokens of a cache whose layers have this layout.

    ``dtype``: torch's name, without ``torch.``.
    """
    own_order = bool(layout.block_format)
    shape = (page_tokens, layout.num_kv_heads, layout.head_size)
    names = ("key", "value") if layout.has_values else ("latent",)
    return PageFormat(
        page_tokens=page_tokens,
        num_layers=num_layers,
        parts=tuple(
            Part(
                name=name,
                dtype=dtype,
                shape=shape,
                token_axis=None if own_order else 0,
                head_axis=1 if layout.has_values and not own_order else None,
            )
            for name in names
        ),
        # Such blocks keep their order only in a cache of the same layout and block size.
        block_format=f"{layout.block_format}, {layout.axes}, {layout.block_size}" if own_order else "",
    )


def page_views(caches: Sequence[Tensor], layout: KVLayout) -> BlockViews:
    """For each layer the views of its parts, for :class:`kvplug.transport.PageBlocks` and for
    :meth:`kvplug.transport.Pipe.send_blocks`.

    ``caches``: one tensor for each layer, in the order of the layers.
    """
    return BlockViews([[part for part in views(cache, layout) if part is not None] for cache in caches])
