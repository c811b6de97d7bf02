"""What a message is received into: new memory, a tensor of the caller's, or blocks of a cache."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING

from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import as_bits
from kvplug.transport import Blocks, Deadline
from kvplug_pynccl.device import Device
from kvplug_pynccl.pipe.content import Memory, check_blocks, check_out, fill, is_plain, runs

if TYPE_CHECKING:
    from torch import Tensor


class Target(abc.ABC):
    """Checks that the next message fits, and takes it once it has arrived."""

    @abc.abstractmethod
    def check(self, meta: TensorMeta | None) -> None:
        """Whether the message fits.

        Raises:
            TensorMismatchError: not this message, which stays.
            UnsupportedError: no message can be received into it.
        """

    @abc.abstractmethod
    def memory(self, pieces: int) -> Memory | None:
        """Where so many pieces can be received in place; ``None``: nowhere."""

    @abc.abstractmethod
    def empty(self, meta: TensorMeta) -> Tensor | None:
        """What to return for a message without bytes."""

    @abc.abstractmethod
    def value(self, own: Tensor | None, deadline: Deadline) -> Tensor | None:
        """What to return for a message that has arrived: in ``own``, memory of the pipe's, or in place.

        Raises:
            TensorMismatchError: the target cannot be written, and the message stays.
            TimeoutError: the copy from ``own`` did not end in time, and the message stays.
        """


class NewTensor(Target):
    """``recv_tensor()``."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def check(self, meta: TensorMeta | None) -> None:
        """Every message fits."""

    def memory(self, pieces: int) -> Memory | None:
        return None

    def empty(self, meta: TensorMeta) -> Tensor | None:
        return self._device.empty(meta)

    def value(self, own: Tensor | None, deadline: Deadline) -> Tensor | None:
        if own is not None:
            self._device.hand_over(own)
        return own


class IntoTensor(Target):
    """``recv_tensor(out=...)``."""

    def __init__(self, out: Tensor, device: Device, *, stage: bool) -> None:
        self._out = out
        self._device = device
        self._stage = stage

    def check(self, meta: TensorMeta | None) -> None:
        check_out(self._out, meta, self._device, stage=self._stage)

    def memory(self, pieces: int) -> Memory | None:
        return Memory.of(self._out.detach(), pieces) if is_plain(self._out, self._device) else None

    def empty(self, meta: TensorMeta) -> Tensor | None:
        return self._out

    def value(self, own: Tensor | None, deadline: Deadline) -> Tensor | None:
        if own is not None:
            fill(self._out, own, self._device, deadline)
        return self._out


class IntoBlocks(Target):
    """``recv_blocks``."""

    def __init__(self, blocks: Blocks, device: Device) -> None:
        self._blocks = blocks
        self._device = device

    def check(self, meta: TensorMeta | None) -> None:
        check_blocks(self._blocks, meta, self._device)

    def memory(self, pieces: int) -> Memory | None:
        found = runs(self._blocks)
        return Memory.of_runs(found) if found is not None and len(found) == pieces else None

    def empty(self, meta: TensorMeta) -> Tensor | None:
        return None

    def value(self, own: Tensor | None, deadline: Deadline) -> Tensor | None:
        if own is not None:
            blocks = self._blocks
            blocks.scatter(0, as_bits(own).view(blocks.dtype).view(blocks.num_rows, *blocks.row_shape))
            self._device.finish(deadline)
        return None
