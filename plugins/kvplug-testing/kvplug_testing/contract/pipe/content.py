"""The content of messages: tensors of random bits, and of one byte."""

from __future__ import annotations

from typing import Any

from kvplug.kit import DTYPES
from kvplug.net.wire import TensorMeta, copy_into, empty_like_meta, memory_of


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int = 1) -> Any:
    """A tensor of random bits, with every pattern of a dtype: NaNs with a payload, subnormals, ...

    ``bool`` holds only 0 and 1: other bytes are not valid booleans.
    """
    import torch

    meta = TensorMeta(dtype=dtype, shape=shape)
    bits = torch.randint(
        0, 256, (meta.nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    if dtype == "bool":
        bits %= 2
    tensor = empty_like_meta(meta)
    copy_into(tensor, memory_of(bits))
    return tensor


def numbered(number: int, nbytes: int) -> Any:
    """Message ``number`` of a clogged pipe. It cannot be compressed, so that a pipe holds what it accepts."""
    return tensor_of("uint8", (nbytes,), seed=number)


def dtypes() -> list[str]:
    """The dtypes of the wire format that the installed torch has."""
    import torch

    return [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
