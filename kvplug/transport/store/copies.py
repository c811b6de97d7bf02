"""Copies between a paged cache, block by block, and tokens one after the other.

Each copy is at most three operations: a first block that is entered in the middle, all whole blocks at once,
a last block that is left early. They copy bits, whatever the dtype."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvplug.transport.block_views import as_bits, as_elements

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def ids_on(block_ids: array[int], device: torch.device) -> Tensor:
    """Block ids as indices: on a CPU the same memory, on a GPU an asynchronous copy."""
    import torch

    ids = torch.frombuffer(block_ids, dtype=torch.int64)
    if device.type == "cuda":  # from other memory the host would wait for all that the stream was given
        ids = ids.pin_memory()
    return ids.to(device, non_blocking=True)


def copy_tokens(
    view: Tensor, block_ids: array[int], ids: Tensor, start: int, tokens: Tensor, *, into_cache: bool
) -> None:
    """Copy between a cache and ``tokens``.

    Args:
        view: the cache, [blocks, tokens in a block, *rest], any strides.
        block_ids: the blocks of the tokens, from the block of the first token on. Not checked.
        ids: the same, as :func:`ids_on` makes them for the cache's device.
        start: the first token's number in its sequence; its place in the first block follows from it.
        tokens: [tokens, *rest], of the cache's dtype and device; need not be contiguous.
        into_cache: from ``tokens`` into the cache; else the other way round.
    """
    import torch

    # as integers: bits stay bits, and torch indexes few of its float8 and unsigned types
    wide = as_elements(view), as_elements(tokens[None])
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
        # splitting a dimension is a view whatever the strides are
        outside = tokens[head : num_tokens - tail].view(whole, *view.shape[1:])
        if into_cache:
            view.index_copy_(0, index, outside)
        else:
            torch.index_select(view, 0, index, out=outside)
    if tail:
        in_cache, outside = view[block_ids[-1], :tail], tokens[num_tokens - tail :]
        in_cache.copy_(outside) if into_cache else outside.copy_(in_cache)
