"""Host memory as a device: what a pipe works on over the fake CUDA runtime, whose streams are threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from kvplug_cuda_ipc import device
from kvplug_cuda_ipc.cudart.library import load
from kvplug_cuda_ipc.testing import fake

if TYPE_CHECKING:
    from torch import Tensor


class HostStream(device.Stream):
    """A stream of the fake's. What torch does is done at once."""

    def __init__(self, controls: fake.Controls) -> None:
        self._controls = controls
        self.handle = controls.stream()

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def close(self) -> None:
        self._controls.close_stream(self.handle)


class HostDevice(device.Device):
    """CPU tensors.

    With ``caller``, a stream of the fake's, that is the caller's current one, as a GPU has one: what a test
    enqueues there is what the pipe has to wait for.
    """

    def __init__(self, path: str, caller: int | None = None) -> None:
        self.name = "cpu"
        self.index = 0
        self.runtime = load(path)
        self._controls = fake.Controls(path)
        self.capturing = False
        self._caller = caller

    def current(self) -> AbstractContextManager[Any]:
        return self.runtime.relaxed()

    def is_capturing(self) -> bool:
        return self.capturing

    def new_stream(self) -> HostStream:
        return HostStream(self._controls)

    def callers_stream(self) -> int:
        return 0 if self._caller is None else self._caller

    def hand_over(self, tensor: Tensor) -> None:
        """The fake frees nothing."""
