"""The devices of measured tensors: how to wait for them, and how many bytes are timed together."""

from __future__ import annotations

import abc
from typing import Final

from kvplug_bench.links import UnavailableError

CPU: Final = "cpu"
_MIB: Final = 1 << 20
BURST_BYTES: Final = 64 * _MIB
DEVICE_BURST_BYTES: Final = 4096 * _MIB
"""Larger than for a CPU: a GPU copies 64 MiB in less time than a burst's answer takes."""


def kind_of(device: str) -> str:
    """The kind of a device: ``"cuda"`` for ``"cuda:1"``."""
    return device.partition(":")[0]


def burst_bytes(device: str) -> int:
    """The bytes that are timed together on that device. Imports nothing heavy."""
    return BURST_BYTES if kind_of(device) == CPU else DEVICE_BURST_BYTES


class TimedDevice(abc.ABC):
    """A device, in the process that measures on it."""

    name: str
    """Torch's name of the device."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Return when all work that this thread has enqueued is done. Called before the clock is read."""


class CpuDevice(TimedDevice):
    """The CPU: every call is done when it returns."""

    name = CPU

    def synchronize(self) -> None:
        pass


class CudaDevice(TimedDevice):
    """A GPU. Calls only enqueue work on the thread's current stream."""

    def __init__(self, name: str) -> None:
        """Raises UnavailableError: this machine has no GPU with that number."""
        import torch

        try:
            self._device = torch.empty(1, device=name).device
        except (RuntimeError, AssertionError) as e:
            why = str(e).partition("\n")[0]
            raise UnavailableError(f"device {name!r} cannot be used on this machine: {why}") from e
        torch.cuda.set_device(self._device)
        self.name = str(self._device)

    def synchronize(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).synchronize()


def open_device(device: str) -> TimedDevice:
    """Open a device. Raises UnavailableError: it cannot be used, or its kind cannot be timed."""
    match kind_of(device):
        case "cpu":
            return CpuDevice()
        case "cuda":
            return CudaDevice(device)
        case other:
            raise UnavailableError(f"devices of the kind {other!r} cannot be timed, only cpu and cuda")
