"""The GPU of a pipe or communicator, and how a pipe stages CPU tensors for it."""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvplug import UnsupportedError
from kvplug.net.wire import copy_into, memory_of
from kvplug.net.wire.tensors import as_bits
from kvplug.transport import OfferPipe

if TYPE_CHECKING:
    from torch import Tensor


class Device(OfferPipe.Device):
    """Where the tensors are that a pipe or communicator moves."""

    stages_cpu_tensors = False
    """Whether a pipe accepts CPU tensors, too, and copies them to the device."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Identifies this GPU among those of all hosts; empty if unknown."""

    def holds(self, tensor: Tensor) -> bool:
        return super().carries(tensor)

    def carries(self, given: Any) -> bool:
        return super().carries(given) or (self.stages_cpu_tensors and given.device.type == "cpu")

    def check(self, given: Any, verb: str) -> None:
        if given.device.type == "cpu" and not self.carries(given):
            raise UnsupportedError(
                f"this pipe 'pynccl' {verb} tensors on {self.name}, and this is a CPU tensor: move it there,"
                " set stage_cpu_tensors to have it staged through pinned memory, or use a pipe for CPU"
                " tensors"
            )
        super().check(given, verb)

    def staged(self, tensor: Tensor) -> Tensor:
        return tensor if self.holds(tensor) else tensor.pin_memory().to(self.torch, non_blocking=True)

    def copy(self, out: Tensor, message: Tensor) -> None:
        if self.holds(out):
            super().copy(out, message)
            return
        stream = self.new_stream()  # the message is complete, so the copy waits for nothing
        with stream.current():
            staged = as_bits(message).cpu()
        stream.close()
        copy_into(out, memory_of(staged))


class CudaDevice(Device):
    """A GPU, over ``torch.cuda``."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError: it is not a GPU, or not one of this machine."""
        super().__init__(str(self.gpu(name, "pynccl")))

    @property
    def identity(self) -> str:
        import torch

        return str(getattr(torch.cuda.get_device_properties(self.torch), "uuid", ""))

    def current(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.device(self.torch)  # type: ignore[no-any-return,unused-ignore]
