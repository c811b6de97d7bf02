"""CPU memory as a device with a fake library's streams: the common part of the plugins' test devices."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import attrs

from kvplug_lab.gpu import fake

if TYPE_CHECKING:
    from torch import Tensor


@attrs.frozen
class HostEvent:
    """An event of a fake library's stream."""

    stream: fake.Stream
    ticket: int

    def is_done(self) -> bool:
        return self.stream.is_done(self.ticket)


class HostStream:
    """A fake library's stream in the interface of a pipe's streams. Operations of torch run at once."""

    def __init__(self, device: HostDevice, stream: fake.Stream) -> None:
        self._device = device
        self._stream = stream
        self.handle = stream.handle

    @contextmanager
    def current(self) -> Iterator[None]:
        before, self._device.stream = self._device.stream, self._stream
        try:
            yield
        finally:
            self._device.stream = before

    def close(self) -> None:
        self._stream.close()


class HostDevice:
    """CPU tensors. A plugin's test device inherits from this class and the plugin's base class, in this
    order.

    ``caller`` is a stream of the fake library that acts as the caller's current stream: the plugin must wait
    for work that a test enqueues there.
    """

    name = "cpu"
    index = 0
    identity: Any = ""
    """Tests set it."""

    def __init__(self, path: str, caller: fake.Stream | None = None) -> None:
        self.capturing = False
        """Tests set it."""
        self._controls = fake.Controls(path)
        self._caller = caller
        self._of_thread = threading.local()

    @property
    def stream(self) -> fake.Stream | None:
        """The current stream of this thread."""
        found: fake.Stream | None = getattr(self._of_thread, "stream", self._caller)
        return found

    @stream.setter
    def stream(self, stream: fake.Stream | None) -> None:
        self._of_thread.stream = stream

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_stream(self) -> Any:
        return HostStream(self, self._controls.stream())

    def callers_stream(self) -> int:
        return 0 if self.stream is None else self.stream.handle

    def now(self, on: Any = None) -> Any:
        return None if self.stream is None else HostEvent(self.stream, self.stream.record())

    def queue_after(self, mark: Any) -> None:
        if self.stream is not None:
            self.stream.wait_for(mark.stream, mark.ticket)

    def is_capturing(self) -> bool:
        return self.capturing

    def hand_over(self, tensor: Tensor) -> None:
        """Do nothing: host memory belongs to no stream."""
