"""Where the tensors lie that are measured: what is waited for there, and how much is timed together."""

from __future__ import annotations

import abc
from typing import Final

from kvplug_bench.links import UnavailableError

CPU: Final = "cpu"
_MIB: Final = 1 << 20
BURST_BYTES: Final = 64 * _MIB
DEVICE_BURST_BYTES: Final = 4096 * _MIB
"""A GPU copies 64 MiB in less time than the answer to a burst takes."""


def kind_of(device: str) -> str:
    """``"cuda:1"`` is of the kind ``"cuda"``."""
    return device.partition(":")[0]


def burst_bytes(device: str) -> int:
    """How much is timed together there. Light: nothing is imported."""
    return BURST_BYTES if kind_of(device) == CPU else DEVICE_BURST_BYTES


class Place(abc.ABC):
    """A device as its own measuring process sees it."""

    name: str
    """As torch spells it."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Return when all that this thread has given the device is done: before the clock is read."""


class Cpu(Place):
    """What is called is done when the call returns."""

    name = CPU

    def finish(self) -> None:
        pass


class Cuda(Place):
    """A GPU. Calls only enqueue, on the thread's current stream."""

    def __init__(self, name: str) -> None:
        """Raises UnavailableError: there is none here, or none of that number."""
        import torch

        try:
            self._device = torch.empty(1, device=name).device
        except (RuntimeError, AssertionError) as e:
            why = str(e).partition("\n")[0]
            raise UnavailableError(f"device {name!r} cannot be used on this machine: {why}") from e
        torch.cuda.set_device(self._device)
        self.name = str(self._device)

    def finish(self) -> None:
        import torch

        torch.cuda.current_stream(self._device).synchronize()


def place(device: str) -> Place:
    """Raises UnavailableError: it cannot be used, or nothing is known of how to time what it does."""
    match kind_of(device):
        case "cpu":
            return Cpu()
        case "cuda":
            return Cuda(device)
        case other:
            raise UnavailableError(f"what a device {other!r} does cannot be timed: cpu and cuda can")
