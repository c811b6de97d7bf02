"""The paged KV cache of :class:`FakeEngine`, which can check whether KV is right.

A token's KV depends only on (token, position, layer, weights), see :func:`kv_of`. KV computed after wrong KV
is wrong, as with a model. This module computes the memory layout of the cache independently of
:mod:`kvplug.engine.layout`, so that an error in one is found by the other. It compares with numpy, because
torch would start threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs

from kvplug.engine import KVLayout, ModelInfo

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    Array: TypeAlias = numpy.ndarray[Any, Any]

Ids: TypeAlias = Sequence[int]
"""Of tokens or of blocks."""
NUM_LAYERS = 3
"""Layers of the fake engine's model, unless it is given another number."""
NUM_HEADS = 2
"""KV heads of the fake engine's model."""
HEAD_SIZE = 8
"""Elements of a head of the fake engine's model."""
MODEL = ModelInfo(
    name="fake",
    num_layers=NUM_LAYERS,
    num_kv_heads=NUM_HEADS,
    head_size=HEAD_SIZE,
    dtype="float32",
    weights="fake",
)
"""The fake engine's model, unless it is given another one."""

AXES = ("KBTHD", "KBHTD", "BKTHD", "BTKHD", "KTBHD", "BHTKD", "BTHKD", "BTD")
"""Some of the axis orders that engines use; the last is latent attention."""

FREED = -7777.0
"""The value that the fake engine writes into free blocks."""


def layout_of(axes: str, block_size: int, num_blocks: int, block_format: str = "") -> KVLayout:
    """The layout with these axes (K: keys and values, B: blocks, T: tokens, H: heads, D: elements)."""
    sizes = {"B": num_blocks, "T": block_size, "D": HEAD_SIZE}
    if "H" in axes:
        sizes |= {"K": 2, "H": NUM_HEADS}
    return KVLayout(axes, sizes, block_format=block_format)


def model_of(axes: str, num_layers: int = NUM_LAYERS) -> ModelInfo:
    """The model whose cache has these axes."""
    if "H" in axes:
        return attrs.evolve(MODEL, num_layers=num_layers)
    return attrs.evolve(MODEL, num_layers=num_layers, attention="mla", num_kv_heads=1)


def kv_of(token_ids: Ids, start: int, layer: int, num_heads: int = NUM_HEADS) -> Array:
    """The keys of tokens at positions from ``start`` on: [tokens, heads, head size]. Values are ``-key``.

    Whole numbers below 2**24, which float32 holds exactly. They differ by token, position, layer, head and
    element.
    """
    import numpy as np

    tokens = np.array(token_ids, dtype=np.int64)
    base = tokens * 1_000_003 + np.arange(start, start + len(tokens)) * 7_919 + layer * 271
    element = np.arange(num_heads * HEAD_SIZE).reshape(num_heads, HEAD_SIZE)
    found: Array = ((base[:, None, None] + 17 * element) % 16_777_213 + 1).astype(np.float32)
    return found


class PagedCache:
    """The tensors of every layer, and their expected content."""

    def __init__(
        self,
        axes: str = "KBTHD",
        block_size: int = 16,
        num_blocks: int = 64,
        block_format: str = "",
        num_layers: int = NUM_LAYERS,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        """
        Args:
            block_format: that of a kernel that transposes each head's block (axes KBHTD only).
            device: where the cache is, "simulated" for the kit's own device.
        """
        if block_format and axes != "KBHTD":
            raise ValueError(f"the kernel with its own block format wants KBHTD, not {axes}")
        import torch

        if device.partition(":")[0] == "simulated":
            from kvplug_testing import simulated

            simulated.enable()
        self.is_on_cpu = device == "cpu"
        """Whether its tensors are on the CPU."""
        self.block_size = block_size
        """Tokens in a block."""
        self.num_blocks = num_blocks
        """Blocks of each layer."""
        self.layout = layout_of(axes, block_size, num_blocks, block_format)
        """The layout of each layer's tensor."""
        self.num_heads = self.layout.num_kv_heads
        """KV heads of a layer: 1 for latent attention."""
        self.layer_names = tuple(f"layers.{index}" for index in range(num_layers))
        """The names of the layers, in the order of the model."""
        self.random = torch.Generator().manual_seed(seed)
        """The source of the numbers that the cache has at first."""
        self.tensors = {
            name: torch.randn(self.layout.shape, generator=self.random).to(device)
            for name in self.layer_names
        }
        """The tensor of each layer, by its name."""
        self.weights = 0.0
        """A number that the KV depends on, besides its tokens."""

    def by_token(self, layer: int) -> Array:
        """One layer: [blocks, tokens in a block, 2 (1 for latent attention), heads, head size].

        On a CPU a view; on a device a copy of what it is when the thread's stream has come this far.
        """
        array: Array = self._by_token(layer).cpu().numpy()
        return array

    def write(self, layer: int, index: Any, values: Any) -> None:
        """Write into the elements of :meth:`by_token`: on a device, queue that."""
        if self.is_on_cpu:
            self.by_token(layer)[index] = values
        else:
            import numpy as np
            import torch

            view = self._by_token(layer)
            view[index] = torch.from_numpy(np.asarray(values, dtype=np.float32)).to(view.device)

    def _by_token(self, layer: int) -> Tensor:
        tensor = self.tensors[self.layer_names[layer]]
        axes = self.layout.axes
        if self.layout.block_format:
            heads = tensor.view(2, self.num_blocks, NUM_HEADS, HEAD_SIZE, self.block_size)
            return heads.permute(1, 4, 0, 2, 3)
        if self.layout.is_packed:
            tensor = tensor.unflatten(axes.index("KD"), (2, HEAD_SIZE))
        if "H" not in axes:
            return tensor.permute([axes.index(letter) for letter in "BTD"])[:, :, None, None, :]
        return tensor.permute([axes.index(letter) for letter in "BTKHD"])

    def expected(self, token_ids: Ids, start: int, end: int, layer: int) -> Array:
        """One layer's KV of these tokens, if all before them is right."""
        import numpy as np

        key = kv_of(token_ids[start:end], start, layer, self.num_heads)
        if self.weights:
            key *= np.float32(1 + self.weights)
        return np.stack((key, -key), axis=1) if self.layout.has_values else key[:, None]

    def at(self, block_ids: Ids, start: int, end: int) -> tuple[Array, Array]:
        """Each token's block, and its position in the block."""
        import numpy as np

        positions = np.arange(start, end)
        return np.array(block_ids)[positions // self.block_size], positions % self.block_size

    def compute(self, layer: int, token_ids: Ids, block_ids: Ids, start: int, end: int) -> None:
        """Write one layer's KV of these tokens into their blocks; wrong KV if the KV before them is wrong."""
        if start < end:
            kv = self.expected(token_ids, start, end, layer)
            spoilt = 0.5 if self.wrong_in(layer, token_ids, block_ids, 0, start) else 0.0
            self.write(layer, self.at(block_ids, start, end), kv + spoilt)

    def wrong_in(self, layer: int, token_ids: Ids, block_ids: Ids, start: int, end: int) -> frozenset[int]:
        """The blocks in which one layer does not hold the KV of their tokens among ``start`` to ``end``."""
        if start >= end:
            return frozenset()
        index = self.at(block_ids, start, end)
        differs = self.by_token(layer)[index] != self.expected(token_ids, start, end, layer)
        return frozenset(index[0][differs.any(axis=(1, 2, 3))].tolist())

    def wrong_blocks(self, token_ids: Ids, block_ids: Ids, start: int, end: int) -> frozenset[int]:
        """The blocks in which any layer does not."""
        layers = range(len(self.layer_names))
        return frozenset().union(
            *(self.wrong_in(layer, token_ids, block_ids, start, end) for layer in layers)
        )

    def is_right(self, token_ids: Ids, block_ids: Ids, end: int) -> bool:
        """Whether every layer has the KV of the first ``end`` tokens in these blocks."""
        return not self.wrong_blocks(token_ids, block_ids, 0, end)

    def free(self, block_ids: Iterable[int]) -> None:
        """Fill freed blocks with :data:`FREED`."""
        blocks = list(block_ids)
        for layer in range(len(self.layer_names) if blocks else 0):
            self.write(layer, blocks, FREED)

    def written(self, block_ids: Iterable[int]) -> frozenset[int]:
        """The freed blocks that were written to after they were freed."""
        blocks = list(block_ids)
        touched: set[int] = set()
        if blocks and not self.is_on_cpu:
            import torch

            torch.get_device_module(self._by_token(0).device).synchronize()
        for layer in range(len(self.layer_names) if blocks else 0):
            as_freed = (self.by_token(layer)[blocks] == FREED).all(axis=(1, 2, 3, 4)).tolist()
            touched |= {block for block, same in zip(blocks, as_freed, strict=True) if not same}
        return frozenset(touched)
