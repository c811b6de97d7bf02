"""CPU memory as a device of the plugin "cuda-ipc", over the fake CUDA runtime."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from kvplug_cuda_ipc import device
from kvplug_cuda_ipc.cudart.library import load
from kvplug_lab.gpu import fake, host


class HostDevice(host.HostDevice, device.Device):
    """The device for a pipe under test."""

    def __init__(self, path: str, caller: fake.Stream | None = None) -> None:
        super().__init__(path, caller)
        self.runtime = load(path)

    def now(self, on: Any = None) -> Any:
        return device.Device.now(self)  # an event of the runtime, which the pipe's streams can wait for

    def current(self) -> AbstractContextManager[Any]:
        return self.runtime.relaxed()
