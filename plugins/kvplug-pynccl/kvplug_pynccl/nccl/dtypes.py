"""How torch's dtypes travel in NCCL. Torch is not imported: a dtype is known by its name and ``itemsize``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from kvplug import UnsupportedError
from kvplug_pynccl.nccl.abi import DataType, RedOp, Version
from kvplug_pynccl.nccl.prototypes import FLOAT8_SINCE

if TYPE_CHECKING:
    import torch

_OWN: Final = {
    "int8": DataType.INT8,
    "uint8": DataType.UINT8,
    "int32": DataType.INT32,
    "uint32": DataType.UINT32,
    "int64": DataType.INT64,
    "uint64": DataType.UINT64,
    "float16": DataType.FLOAT16,
    "float32": DataType.FLOAT32,
    "float64": DataType.FLOAT64,
    "bfloat16": DataType.BFLOAT16,
}
_FLOAT8: Final = {
    "float8_e4m3fn": DataType.FLOAT8E4M3,
    "float8_e5m2": DataType.FLOAT8E5M2,
}


class Carried(NamedTuple):
    """``per_element`` items of ``dtype`` for each element of the tensor."""

    dtype: DataType
    per_element: int = 1


def moved_as(dtype: torch.dtype) -> Carried:
    """Return the type with which elements are moved: bytes if not every NCCL has a type for them."""
    own = _OWN.get(_name(dtype))
    return Carried(DataType.UINT8, dtype.itemsize) if own is None else Carried(own)


def reduced_as(dtype: torch.dtype, op: RedOp, version: Version) -> DataType:
    """Return the type with which elements are reduced.

    Bool is 0 or 1 in a byte: its maximum is whether any is true, its minimum whether all are.

    Raises:
        UnsupportedError: NCCL does not reduce it, not by that operator, or not in this version.
    """
    name = _name(dtype)
    if (own := _OWN.get(name)) is not None:
        return own
    if name == "bool":
        if op in (RedOp.MAX, RedOp.MIN):
            return DataType.UINT8
        raise UnsupportedError(
            f"torch.bool has no {op.name}; use MAX for whether any is true, MIN for whether all are"
        )
    if (own := _FLOAT8.get(name)) is not None:
        if version >= FLOAT8_SINCE:
            return own
        raise UnsupportedError(f"NCCL reduces {dtype} from {FLOAT8_SINCE} on, and this is {version}")
    names = ", ".join([*_OWN, *_FLOAT8, "bool"])
    raise UnsupportedError(f"NCCL does not reduce {dtype}; it does {names}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
