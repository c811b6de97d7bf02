"""CPU memory as a device with a fake library's streams: the common part of the plugins' test devices."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
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
    """A fake library's stream in the interface of a plugin's streams. Operations of torch run at once."""

    def __init__(self, stream: fake.Stream) -> None:
        self._stream = stream
        self.handle = stream.handle

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def record(self) -> HostEvent:
        return HostEvent(self._stream, self._stream.record())

    def wait(self, event: HostEvent) -> None:
        self._stream.wait_for(event.stream, event.ticket)

    def keep(self, tensor: Tensor) -> None:
        """Do nothing: the fake does not free memory."""

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

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def new_stream(self) -> Any:
        return HostStream(self._controls.stream())

    def callers_stream(self) -> int:
        return 0 if self._caller is None else self._caller.handle

    def now(self, on: Any = None) -> Any:
        return None if self._caller is None else HostEvent(self._caller, self._caller.record())

    def follow(self, event: Any) -> None:
        if self._caller is not None:
            self._caller.wait_for(event.stream, event.ticket)

    def is_capturing(self) -> bool:
        return self.capturing

    def hand_over(self, tensor: Tensor) -> None:
        """Do nothing: host memory belongs to no stream."""
