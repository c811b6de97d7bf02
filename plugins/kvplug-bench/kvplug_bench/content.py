"""What is sent, and whether it arrived. All of it is done outside of the time that is measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug_bench.place import CPU

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 64
"""Bytes of the smallest message, which is that of the latency. Every size is a multiple of 4."""


def content(nbytes: int, device: str = CPU) -> Tensor:
    """float16 in which every four bytes are different, so that nothing can be swapped unseen."""
    import torch

    return torch.arange(nbytes // 4, dtype=torch.int32, device=device).view(torch.float16)


def stamp(tensor: Tensor, number: int) -> None:
    """Make the next message another one than the last, at both its ends."""
    import torch

    words = tensor.view(torch.int32)
    words[0] = words[-1] = -1 - number


def check(got: Tensor, expected: Tensor) -> None:
    """Raises AssertionError: the content was changed on its way."""
    import torch

    if not torch.equal(got.view(-1).view(torch.int32), expected.view(torch.int32)):
        raise AssertionError(f"the content of {expected.nbytes} bytes was changed on its way")
