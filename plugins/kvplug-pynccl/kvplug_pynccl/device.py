"""The only module that uses CUDA: streams and events. Nothing here waits for a whole device.

Pipe and communicator need an order between streams of their own and the stream that their caller works on:
an event is recorded on the one, and the device waits for it on the other. The host only polls events.
"""

from __future__ import annotations

import abc
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvplug import TransportError, UnsupportedError
from kvplug.net.wire import copy_into, memory_of
from kvplug.net.wire.tensors import as_bits
from kvplug.transport import NamedExhaustion, OfferPipe, StreamPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class Event(abc.ABC):
    """A point in the work of a stream."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether everything that was enqueued before it is done. Never waits.

        Raises:
            TransportError: the device failed.
        """


class Stream(abc.ABC):
    """A queue of work for the device, which this process uses alone."""

    handle: int
    """A ``cudaStream_t``."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """Return a context in which torch queues work on this stream, and allocates memory for it."""

    @abc.abstractmethod
    def record(self) -> Event:
        """Return an event after everything that was enqueued so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins after ``event``. The host does not wait."""

    @abc.abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Its memory is not reused before what is enqueued here now is done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Enqueue nothing more. What is enqueued is still done, without a wait here. Idempotent."""


class Device(OfferPipe.Device):
    """Where the tensors are that a pipe or communicator moves."""

    stages_cpu_tensors = False
    """Whether a pipe accepts CPU tensors, too, and copies them to the device."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Identifies this GPU among those of all hosts; empty if unknown."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Raises TransportError: the device makes no stream."""

    @abc.abstractmethod
    def now(self, on: Any = None) -> Event | None:
        """Mark the end of everything that the caller's current stream was given; ``None``: all is done."""

    @abc.abstractmethod
    def follow(self, event: Event) -> None:
        """What the caller's current stream is given from now on begins after ``event``."""

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


class CudaEvent(Event):
    def __init__(self, event: Any) -> None:
        self.raw = event

    def is_done(self) -> bool:
        try:
            return bool(self.raw.query())
        except RuntimeError as e:
            NamedExhaustion.check(e, "the GPU failed")
            raise TransportError(f"the GPU failed: {e}") from e


class CudaStream(Stream):
    """Exclusively ours until it is closed."""

    def __init__(self, device: torch.device) -> None:
        self._stream = StreamPool.acquire(device)
        self._closed = False
        self.handle = int(self._stream.cuda_stream)

    def current(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.stream(self._stream)  # type: ignore[no-any-return,unused-ignore]

    def record(self) -> Event:
        return CudaEvent(self._stream.record_event())

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self._stream.wait_event(event.raw)

    def keep(self, tensor: Tensor) -> None:
        tensor.record_stream(self._stream)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            StreamPool.release(self._stream)


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

    def new_stream(self) -> Stream:
        try:
            return CudaStream(self.torch)
        except RuntimeError as e:
            NamedExhaustion.check(e, f"a stream of {self.name}")
            raise TransportError(f"{self.name} makes no stream: {e}") from e

    def now(self, on: Any = None) -> CudaEvent:
        import torch

        return CudaEvent(torch.cuda.current_stream(self.torch).record_event())

    def follow(self, event: Event) -> None:
        import torch

        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream(self.torch).wait_event(event.raw)
