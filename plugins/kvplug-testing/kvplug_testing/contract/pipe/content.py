"""The content of messages: tensors of random bits, and differences between two messages."""

from __future__ import annotations

from typing import Any

from kvplug.net.wire.tensors import DTYPES, TensorMeta, copy_into, empty_like_meta, memory_of, meta_of


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


def difference(sent: Any, received: Any) -> str:
    """A description of how the received message differs; empty if it is equal."""
    if sent is None or received is None:
        return "" if sent is received else f"{said(sent)} was sent, and {said(received)} received"
    if meta_of(sent) != meta_of(received):
        return f"{meta_of(sent)} was sent, and {meta_of(received)} received"
    ours, theirs = memory_of(sent), memory_of(received)
    if bytes(ours) == bytes(theirs):
        return ""
    at = next(index for index, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
    changed = f"{theirs[at]:#04x} for {ours[at]:#04x}"
    return f"{meta_of(sent)} arrived with another byte {at} of {len(ours)}: {changed}"


def said(message: Any) -> str:
    """A short description of a message."""
    return "None" if message is None else str(meta_of(message))


def dtypes() -> list[str]:
    """The dtypes of the wire format that the installed torch has."""
    import torch

    return [name for name in DTYPES if isinstance(getattr(torch, name, None), torch.dtype)]
