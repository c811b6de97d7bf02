"""Copies of messages, and copies with some bits flipped."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from kvplug.errors import TensorMismatchError
from kvplug.net.wire.tensors import copy_into, empty_like_meta, memory_of, memory_of_writable, meta_of

if TYPE_CHECKING:
    from torch import Tensor


def nbytes_of(message: Tensor | None) -> int:
    """The size of a message. Raises UnsupportedError for a value that no pipe carries."""
    return 0 if message is None else meta_of(message).nbytes


def copied(message: Tensor | None) -> Tensor | None:
    """A copy with the same shape, dtype, bits and device, in separate memory."""
    if message is None:
        return None
    copy = empty_like_meta(meta_of(message))
    copy_into(copy, memory_of(message.cpu()))
    return copy.to(message.device)


def flipped(message: Tensor, bits: int, chance: random.Random) -> Tensor:
    """A copy with ``bits`` different bits flipped, or all bits if it has fewer."""
    copy = empty_like_meta(meta_of(message))
    copy_into(copy, memory_of(message.cpu()))
    flip([memory_of_writable(copy)], bits, chance)
    return copy.to(message.device)


def flip(memories: Sequence[memoryview], bits: int, chance: random.Random) -> None:
    """Flip ``bits`` different bits in this memory, or all bits if it has fewer."""
    there = 8 * sum(memory.nbytes for memory in memories)
    for at in chance.sample(range(there), min(bits, there)):
        byte = at // 8
        for memory in memories:
            if byte < memory.nbytes:
                memory[byte] ^= 1 << at % 8
                break
            byte -= memory.nbytes


def is_tensor(value: object) -> bool:
    """Whether it is a tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def parts(value: Any) -> Iterator[Any]:
    """The tensors and arrays in a value, in order: itself, or those in lists, tuples and values of dicts."""
    numpy = sys.modules.get("numpy")
    if is_tensor(value) or (numpy is not None and isinstance(value, numpy.ndarray)):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from parts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from parts(item)


def writable(part: Any) -> memoryview:
    """The memory of a contiguous tensor or array that :func:`parts` returns."""
    return memory_of_writable(part) if is_tensor(part) else memoryview(part.reshape(-1).view("uint8"))


def fill(out: Tensor, message: Tensor | None) -> Tensor:
    """Copy a message into ``out``, as a pipe does.

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
