"""The paged KV cache: one tensor for all layers, and each layer's view of it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplug.engine import KVCacheConfig


class Pages:
    """Keys and values of every layer, in blocks.

    It is one tensor with a leading layer axis; a layer's tensor is a contiguous slice of it. Reads and writes
    use views whose axes have the same order in every layout.
    """

    def __init__(self, cache: KVCacheConfig, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        group = cache.groups[0]
        self.layout = group.layout
        self.layer_names = group.layer_names
        axes, sizes = self.layout.axes, self.layout.sizes
        self.block_size = sizes["T"]
        num_layers = len(self.layer_names)
        # Zeros: unwritten slots are masked, but 0 times a NaN is a NaN.
        self.tensor = torch.zeros((num_layers, *(sizes[axis] for axis in axes)), dtype=dtype, device=device)
        ordered = self.tensor.permute([("L" + axes).index(axis) for axis in "LKBTHD"])
        self._keys = [ordered[layer, 0] for layer in range(num_layers)]
        self._values = [ordered[layer, 1] for layer in range(num_layers)]

    @property
    def by_layer(self) -> dict[str, Tensor]:
        """For ``register_kv_caches``."""
        return dict(zip(self.layer_names, self.tensor, strict=True))

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write tokens into their slots. ``key``, ``value``: [num_tokens, num_kv_heads, head_size]."""
        block, offset = slots // self.block_size, slots % self.block_size
        self._keys[layer][block, offset] = key
        self._values[layer][block, offset] = value

    def read(self, layer: int, block_table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a request's first tokens, each [num_kv_heads, num_tokens, head_size]."""
        key = self._keys[layer][block_table].flatten(0, 1)[:num_tokens]
        value = self._values[layer][block_table].flatten(0, 1)[:num_tokens]
        return key.transpose(0, 1), value.transpose(0, 1)
