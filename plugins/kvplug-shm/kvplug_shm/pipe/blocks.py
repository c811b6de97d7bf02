"""Blocks of a paged cache, gathered straight into the ring and scattered straight from it.

Blocks whose rows the compiled steps cannot describe go through contiguous memory of the pool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvplug import UnsupportedError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_name
from kvplug.transport import Blocks
from kvplug_shm.memory.pool import Pool
from kvplug_shm.native.spans import Span
from kvplug_shm.pipe.message import Message, header_of

if TYPE_CHECKING:
    from torch import Tensor


def _check_device(blocks: Blocks) -> None:
    if blocks.device.type != "cpu":
        raise UnsupportedError(f"the pipe 'shm' moves blocks of CPU tensors, not of {blocks.device} ones")


def message_of(blocks: Blocks, pool: Pool) -> Message:
    """A message that is gathered while it is copied. It keeps the caches alive.

    Raises:
        UnsupportedError: a device or dtype that is not carried.
    """
    _check_device(blocks)
    header = header_of(blocks.dtype, torch.Size(blocks.shape))
    span = Span.of_blocks(blocks)
    if span is not None:
        return Message(header, span, blocks)
    gathered = pool.tensor(TensorMeta("uint8", (blocks.nbytes,)))
    blocks.gather(0, _as_rows(blocks, gathered))
    return Message(header, Span.flat(gathered.data_ptr()), gathered)


class BlockTarget:
    """The blocks that a message is scattered into while it arrives."""

    def __init__(self, blocks: Blocks) -> None:
        """Raises UnsupportedError: a device that is not supported."""
        _check_device(blocks)
        self.blocks = blocks
        self.span = Span.of_blocks(blocks)
        """The rows' memory for the compiled steps; ``None``: only :meth:`fill` can fill them."""

    @property
    def meta(self) -> TensorMeta:
        """The meta of the message that fits."""
        return TensorMeta(dtype_name(self.blocks.dtype), self.blocks.shape)

    def fill(self, message: Tensor) -> None:
        """Scatter the whole message from a tensor."""
        if message.numel():
            self.blocks.scatter(0, _as_rows(self.blocks, message.view(-1).view(torch.uint8)))

    def take_back(self, message: Tensor, nbytes: int) -> None:
        """Copy the first ``nbytes``, which were received, back out of the caches into ``message``."""
        count = -(-nbytes // self.blocks.row_bytes)
        rows = _as_rows(self.blocks, message.view(-1).view(torch.uint8))
        self.blocks.gather(0, rows[:count])


def _as_rows(blocks: Blocks, memory: Tensor) -> Tensor:
    return memory.view(blocks.dtype).view(blocks.num_rows, *blocks.row_shape)
