"""Tensors of ranks with known numbers, a slow model of what collectives give, and comparisons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplug_testing.comparison import difference

WORLD = 3
"""Ranks of a group, unless a test gives another number."""
HIDDEN = 6


def tensor_of(dtype: str, shape: Sequence[int], rank: int) -> Any:
    """Small whole numbers, so that sums are exact in every dtype; different for each rank and position."""
    import torch

    count = 1
    for size in shape:
        count *= size
    numbers = (torch.arange(count) * 3 + rank * 5) % 11
    return (numbers % 2 == 0 if dtype == "bool" else numbers.to(getattr(torch, dtype))).reshape(tuple(shape))


def each_rank(dtype: str, shape: Sequence[int], world: int = WORLD) -> list[Any]:
    """The tensors of all ranks."""
    return [tensor_of(dtype, shape, rank) for rank in range(world)]


def differs(got: Any, wanted: Any) -> str:
    """A description of the difference; empty if there is none."""
    if isinstance(wanted, list):
        return next(filter(None, map(differs, got, wanted)), "")
    if got is None or wanted is None or (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return difference(wanted, got)
    return difference(_comparable(wanted) + 0.0, _comparable(got) + 0.0)  # makes -0.0 a 0.0


def _comparable(tensor: Any) -> Any:
    """The same values in a dtype that can be compared and concatenated."""
    import torch

    return tensor.to(torch.complex128 if tensor.dtype.is_complex else torch.float64)


def check(found: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    for rank, (got, right) in enumerate(zip(found, wanted, strict=True)):
        fault = differs(got, right)
        assert not fault, f"{what}: at rank {rank}, {fault}"


def total(parts: Sequence[Any]) -> Any:
    """The sum, in the dtype of the parts."""
    import torch

    wide = torch.float64 if parts[0].dtype.is_floating_point else torch.int64
    return torch.stack([part.to(wide) for part in parts]).sum(0).to(parts[0].dtype)


def joined(parts: Sequence[Any], dim: int) -> Any:
    """The concatenation, copied element by element: torch cannot concatenate some dtypes."""
    import torch

    return torch.cat([_comparable(part) for part in parts], dim).to(parts[0].dtype)


def tokens(count: int, rank: int) -> list[Any]:
    """One rank's hidden states, weights and ids of experts."""
    kinds = (("bfloat16", HIDDEN), ("float32", 2), ("int64", 2))
    return [tensor_of(dtype, (count, size), rank + at) for at, (dtype, size) in enumerate(kinds)]
