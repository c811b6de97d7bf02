"""Host memory as a device: for pipe and communicator over the fake NCCL, whose streams are threads."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from kvplug_pynccl import device
from kvplug_pynccl.testing import fake

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class HostEvent(device.Event):
    """Of a stream of the fake's."""

    stream: fake.Stream
    ticket: int

    def is_done(self) -> bool:
        return self.stream.is_done(self.ticket)


class HostStream(device.Stream):
    """A stream of the fake's. Memory is kept by whoever enqueues."""

    def __init__(self, stream: fake.Stream) -> None:
        self._stream = stream
        self.handle = stream.handle

    def record(self) -> HostEvent:
        return HostEvent(self._stream, self._stream.record())

    def wait(self, event: device.Event) -> None:
        assert isinstance(event, HostEvent)
        self._stream.wait_for(event.stream, event.ticket)

    def keep(self, tensor: Tensor) -> None:
        """The fake frees nothing."""

    def close(self) -> None:
        self._stream.close()


class HostDevice(device.Device):
    """CPU tensors.

    With ``caller``, a stream of the fake's, that is the caller's current one, as a GPU has one: what a test
    enqueues there is what the pipe has to wait for.
    """

    identity = ""
    """A test sets it."""

    def __init__(self, path: str, caller: fake.Stream | None = None) -> None:
        self.name = "cpu"
        self.capturing = False
        """A test sets it."""
        self._controls = fake.Controls(path)
        self._caller = caller

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_stream(self) -> HostStream:
        return HostStream(self._controls.stream())

    def now(self) -> HostEvent | None:
        return None if self._caller is None else HostEvent(self._caller, self._caller.record())

    def follow(self, event: device.Event) -> None:
        assert isinstance(event, HostEvent)
        if self._caller is not None:
            self._caller.wait_for(event.stream, event.ticket)

    def is_capturing(self) -> bool:
        return self.capturing

    def upload(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor.clone(), tensor

    def hand_over(self, tensor: Tensor) -> None:
        """The host's memory is of no stream."""

    def download(self, tensor: Tensor) -> Tensor:
        return tensor
