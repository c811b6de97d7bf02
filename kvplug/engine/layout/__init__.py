"""Layouts of a paged KV cache in memory, and token-granular copies out of it and into it.

A layout is a string of axis letters, outermost in memory first, and a size for each:

    L  layers                     only where one tensor holds several
    K  the pair (key, value)      always 2
    B  blocks
    T  tokens in a block
    H  key/value heads
    D  head size

Every cache has B, T and D; one of keys and values per head has K and H too, and latent attention (MLA)
has neither: one vector per token, and no values. The letters may come in any order. NHD is ``KBTHD``,
HND is ``KBHTD``.

**Packed or separate.** Where K stands directly before D, keys and values are *packed*: the two letters
are one dimension of the tensor, of 2 * head_size, the keys first. ``BHTKD`` is a tensor of four
dimensions, [blocks, heads, tokens, 2 * head_size]. Anywhere else K is a dimension of its own.

A layout comes from the engine's statement and from strides, never from a shape: with 16 heads and 16 tokens
in a block, NHD and HND have the same shape.

**The inside of a block.** Some attention kernels keep keys in an order of their own, transposed or in tiles,
under a shape that looks like any other. An engine that cannot vouch for the order inside its blocks names
their ``block_format``: they are then moved whole, and only between caches of the same format.

The arithmetic does not need torch; ``Tensor`` is ``torch.Tensor``.
"""

from __future__ import annotations

from kvplug.engine.layout.axes import LETTERS, KVLayout, dimensions
from kvplug.engine.layout.copies import gather, scatter, views
from kvplug.engine.layout.pages import page_format_of, page_tokens_of, page_views

__all__ = [
    "LETTERS",
    "KVLayout",
    "dimensions",
    "gather",
    "page_format_of",
    "page_tokens_of",
    "page_views",
    "scatter",
    "views",
]
