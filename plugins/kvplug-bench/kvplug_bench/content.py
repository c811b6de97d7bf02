"""Makes and checks the content of messages. None of this happens inside the measured time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug_bench.device import CPU

if TYPE_CHECKING:
    from torch import Tensor

SMALLEST = 64
"""Bytes of the smallest message, with which latency is measured. Every size is a multiple of 4."""


def content(nbytes: int, device: str = CPU) -> Tensor:
    """A float16 tensor in which every four bytes are different, so that swapped parts are noticed."""
    import torch

    return torch.arange(nbytes // 4, dtype=torch.int32, device=device).view(torch.float16)


def stamp(tensor: Tensor, number: int) -> None:
    """Make the message different from the previous one, at its beginning and at its end."""
    import torch

    words = tensor.view(torch.int32)
    words[0] = words[-1] = -1 - number


def check(got: Tensor, expected: Tensor) -> None:
    """Raises AssertionError: the received content differs from the sent one."""
    import torch

    if not torch.equal(got.view(-1).view(torch.int32), expected.view(torch.int32)):
        raise AssertionError(f"the content of {expected.nbytes} bytes was changed on its way")
