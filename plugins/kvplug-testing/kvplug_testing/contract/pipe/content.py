"""The content of messages: tensors of random bits."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from kvplug.kit import DTYPES
from kvplug.net.wire import TensorMeta, copy_into, empty_like_meta, memory_of

_NOISE_BYTES: Final = (1 << 20) + 7


def tensor_of(dtype: str, shape: tuple[int, ...], seed: int = 1) -> Any:
    """A tensor of random bits, with every pattern of a dtype: NaNs with a payload, subnormals, ...

    ``bool`` holds only 0 and 1: other bytes are not valid booleans.
    """
    meta = TensorMeta(dtype=dtype, shape=shape)
    bits = _random_bytes(meta.nbytes, seed)
    if dtype == "bool":
        bits %= 2
    tensor = empty_like_meta(meta)
    copy_into(tensor, memory_of(bits))
    return tensor


def numbered(number: int, nbytes: int) -> Any:
    """Message ``number`` of many: bytes that differ from message to message and from place to place.

    It cannot be compressed, so that a pipe holds what it accepts.
    """
    start = number * 4099 % _NOISE_BYTES
    noise = _noise()
    return noise.repeat(1 + (start + nbytes) // _NOISE_BYTES)[start : start + nbytes].clone()


@cache
def _noise() -> Any:
    return _random_bytes(_NOISE_BYTES, 4)


def _random_bytes(nbytes: int, seed: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def dtypes() -> list[str]:
    """The dtypes of the wire format that the installed torch has."""
    import torch

    return [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
