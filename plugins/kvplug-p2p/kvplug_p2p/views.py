"""Views of the paged cache by unit and by heads, for pipes, and hashes of their contents."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from kvplug.engine import BlockViews, KVCacheConfig, LayoutError
from kvplug.net.wire.checksum import digest
from kvplug.transport import DeviceMark, OfferPipe

if TYPE_CHECKING:
    import torch
    from torch import Tensor


HASHED_TOGETHER: Final = 8
"""Rows per hash. Fewer rows cost more calls; more rows make pulls of a part of a request hash again."""


class CacheViews:
    """The layers of each KV cache group, as units of any number of tokens that divides a block."""

    def __init__(self, cache: KVCacheConfig, tensors: Mapping[str, Tensor]) -> None:
        """
        Raises:
            LayoutError: a tensor is missing, or does not have the group's layout.
        """
        self._groups: list[list[list[Tensor]]] = []
        for group in cache.groups:
            missing = [name for name in group.layer_names if name not in tensors]
            if missing:
                raise LayoutError(f"no cache was registered for {', '.join(missing)}")
            layers = []
            for name in group.layer_names:
                group.layout.check(tensors[name])
                layers.append([part for part in group.layout.views(tensors[name]) if part is not None])
            self._groups.append(layers)
        self._made: dict[tuple[int, int, int, int], tuple[BlockViews, tuple[int, int]]] = {}
        self.device = self._groups[0][0][0].device

    def row_bytes(self, group: int) -> int:
        """Bytes of one token in all layers of a group."""
        return sum(
            part[0, 0].numel() * part.element_size() for layer in self._groups[group] for part in layer
        )

    def num_heads(self, group: int) -> int:
        """Heads of this worker; 1 for latent attention."""
        return int(self._groups[group][0][0].shape[2])

    def num_layers(self, group: int) -> int:
        """Layers of a group."""
        return len(self._groups[group])

    def of(
        self, group: int, unit: int, first_head: int, num_heads: int, numbers: Sequence[int]
    ) -> tuple[BlockViews, list[int]]:
        """Return views of these heads, and the rows that the units ``numbers`` are in them.

        Raises:
            LayoutError: the cache has no such heads, or no such units.
        """
        first = self._groups[group][0][0]
        num_blocks, block_size, heads = first.shape[0], first.shape[1], first.shape[2]
        if unit < 1 or block_size % unit or not 0 <= first_head < first_head + num_heads <= heads:
            raise LayoutError(
                f"heads {first_head} to {first_head + num_heads} of {heads}, in units of {unit} tokens of"
                f" blocks of {block_size}"
            )
        each = block_size // unit
        if numbers and not 0 <= min(numbers) <= max(numbers) < num_blocks * each:
            raise LayoutError(f"units {min(numbers)} to {max(numbers)} of {num_blocks * each}")
        key = (group, unit, first_head, num_heads)
        if key not in self._made:
            parts = [
                [_in_units(part[:, :, first_head : first_head + num_heads], unit) for part in layer]
                for layer in self._groups[group]
            ]
            apart = {rows for layer in parts for _, rows in layer}
            if len(apart) > 1:
                raise LayoutError(
                    f"layers of group {group} have different strides, so their units have different rows"
                )
            self._made[key] = BlockViews([[view for view, _ in layer] for layer in parts]), apart.pop()
        found, (block, step) = self._made[key]
        return found, [number // each * block + number % each * step for number in numbers]


class OwnStream:
    """A stream that one thread copies on, besides the engine's. On the CPU it does nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = OfferPipe.Device(str(device)).new_stream()

    @contextlib.contextmanager
    def after(self, mark: DeviceMark) -> Iterator[None]:
        """Queue the work of the block on this stream, after ``mark``."""
        import torch

        with self._stream.current():
            if self._device.type != "cpu":
                mark.hold(torch.get_device_module(self._device).current_stream(self._device))
            yield

    def close(self) -> None:
        """Give the stream back. Queued work still runs."""
        self._stream.close()


def _in_units(view: Tensor, unit: int) -> tuple[Tensor, tuple[int, int]]:
    """View ``[blocks, tokens, heads, head size]`` with one row per unit. Return the view, and the distance in
    rows between two blocks and between two units of a block.

    If tokens are not the slowest axis of a block, some rows in between are not units, and have no index.
    """
    each = view.shape[1] // unit
    if each == 1:
        return view, (1, 0)
    block, step = view.stride(0), unit * view.stride(1)
    apart = math.gcd(block, step)
    rows = ((view.shape[0] - 1) * block + (each - 1) * step) // apart + 1
    shape = (rows, unit, *view.shape[2:])
    row_view = view.as_strided(shape, (apart, *view.stride()[1:]), view.storage_offset())
    return row_view, (block // apart, step // apart)


def together(rows: Sequence[int], first: int) -> list[tuple[int, ...]]:
    """Group the rows that share a hash: ``first`` rows, then :data:`HASHED_TOGETHER` at a time."""
    begins = [0, *range(first, len(rows), HASHED_TOGETHER)] if rows else []
    return [tuple(rows[begin:end]) for begin, end in zip(begins, [*begins[1:], len(rows)], strict=True)]


def hash_rows(
    name: str,
    found: BlockViews,
    layer: int,
    rows: Sequence[int],
    first: int = HASHED_TOGETHER,
    known: Mapping[tuple[int, ...], bytes] | None = None,
) -> dict[tuple[int, ...], bytes]:
    """Hash a layer's rows in host memory. Return each hash by the rows that it covers :func:`together`.

    A hash covers the parts of its rows one after the other, each as contiguous ``[rows, tokens, heads, head
    size]``: both ends hash the same bytes. Hashes that are ``known`` are not computed.
    """
    import numpy as np

    parts = [part.numpy() for part in found.rows.bits[layer]]
    hashes = {}
    for some in together(rows, first):
        if known is not None and some in known:
            hashes[some] = known[some]
            continue
        adjoining = some == tuple(range(some[0], some[0] + len(some)))
        index = slice(some[0], some[-1] + 1) if adjoining else list(some)  # a slice is not copied
        hashes[some] = digest(name, *(np.ascontiguousarray(part[index]).data for part in parts))
    return hashes


def hash_of(name: str, hashes: Iterable[bytes]) -> bytes:
    """The hash of a layer, from the hashes of its rows."""
    return digest(name, b"".join(hashes))
