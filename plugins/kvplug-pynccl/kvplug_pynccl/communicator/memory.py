"""Tensors of a collective as NCCL takes them: addresses, and elements of one of its types."""

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
    """A contiguous tensor: its address, and how many elements of which type."""

    address: int
    count: int
    dtype: DataType

    @classmethod
    def of(cls, tensor: Tensor) -> Part:
        """For moving it: as bytes, where NCCL has no such type."""
        carried = moved_as(tensor.dtype)
        return cls(tensor.data_ptr(), tensor.numel() * carried.per_element, carried.dtype)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.nbytes


def are_contiguous(parts: Sequence[Part]) -> bool:
    """Whether they have one size and follow one another in memory, in this order."""
    first = parts[0]
    return all(
        part.count == first.count and part.address == first.address + number * first.nbytes
        for number, part in enumerate(parts)
    )
