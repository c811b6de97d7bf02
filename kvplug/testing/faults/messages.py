"""Copies of messages, and copies with some bits turned over."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from kvplug.errors import TensorMismatchError
from kvplug.wire.tensors import copy_into, empty_like_meta, memory_of, memory_of_writable, meta_of

if TYPE_CHECKING:
    from torch import Tensor


def nbytes_of(message: Tensor | None) -> int:
    """Raises UnsupportedError where it is nothing that any pipe carries."""
    return 0 if message is None else meta_of(message).nbytes


def copied(message: Tensor | None) -> Tensor | None:
    """Of the same shape, dtype, bits and device, in memory of its own."""
    if message is None:
        return None
    copy = empty_like_meta(meta_of(message))
    copy_into(copy, memory_of(message.cpu()))
    return copy.to(message.device)


def flipped(message: Tensor, bits: int, chance: random.Random) -> Tensor:
    """A copy with ``bits`` different bits turned over, all of them where it has no more."""
    copy = empty_like_meta(meta_of(message))
    copy_into(copy, memory_of(message.cpu()))
    memory = memory_of_writable(copy)
    there = 8 * nbytes_of(message)
    for at in chance.sample(range(there), min(bits, there)):
        memory[at // 8] ^= 1 << at % 8
    return copy.to(message.device)


def fill(out: Tensor, message: Tensor | None) -> Tensor:
    """What a pipe does with ``out``.

    Raises:
        TensorMismatchError: the message has another shape or dtype, or is ``None``.
    """
    if message is None:
        raise TensorMismatchError("the next message is None, and out was given")
    if meta_of(out) != meta_of(message):
        raise TensorMismatchError(f"the next message is {meta_of(message)}, and out is {meta_of(out)}")
    if out.device.type == "cpu":
        copy_into(out, memory_of(message.cpu()))
    else:
        out.copy_(message)
    return out
