"""Tensors of a collective as NCCL takes them: addresses, and elements of a type that it has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvplug_pynccl.nccl.abi import DataType
from kvplug_pynccl.nccl.dtypes import moved_as

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class Part:
    """A contiguous tensor: where, how many, of what."""

    address: int
    count: int
    dtype: DataType

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """To be moved: as bytes, where NCCL has no such type."""
        carried = moved_as(tensor.dtype)
        return cls(tensor.data_ptr(), tensor.numel() * carried.per_element, carried.dtype)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.nbytes


def are_one(parts: Sequence[Part]) -> bool:
    """Whether they are of one size and lie one behind the other, in this order."""
    first = parts[0]
    return all(
        part.count == first.count and part.address == first.address + number * first.nbytes
        for number, part in enumerate(parts)
    )
