"""The only module that uses CUDA: streams, events, memory. Nothing here waits for a whole device.

Pipe and communicator need an order between streams of their own and the stream that their caller works on:
an event is recorded on the one, and the device waits for it on the other. The host only polls events.
"""

from __future__ import annotations

import abc
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from kvplug import ConfigError, TimeoutError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import Deadline, NamedExhaustion, StreamPool

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_NEVER: Final = Deadline.after(None)


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
    def record(self) -> Event:
        """An event after everything that was enqueued so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins after ``event``. The host does not wait."""

    @abc.abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Its memory is not reused before what is enqueued here now is done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Enqueue nothing more. What is enqueued is still done, without a wait here. Idempotent."""


class Device(abc.ABC):
    """Where the tensors are that a pipe or communicator moves."""

    name: str
    """As torch spells it, with an index where there may be several."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Identifies this GPU among those of all hosts; empty if unknown."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """Makes it the current device of this thread inside the block, as calls of NCCL need it."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Raises TransportError: the device makes no stream."""

    @abc.abstractmethod
    def now(self) -> Event | None:
        """An event after everything that the caller's current stream was given; ``None``: all is done."""

    @abc.abstractmethod
    def follow(self, event: Event) -> None:
        """What the caller's current stream is given from now on begins after ``event``."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether the caller's current stream is being captured (a CUDA graph)."""

    @abc.abstractmethod
    def upload(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of a CPU tensor, enqueued on the current stream, and the memory that the copy reads."""

    @abc.abstractmethod
    def download(self, tensor: Tensor) -> Tensor:
        """A copy in CPU memory, enqueued on the current stream: it is complete after :meth:`finish`."""

    def finish(self, deadline: Deadline = _NEVER) -> None:
        """Wait until everything on this thread's current stream is done.

        Raises:
            TimeoutError: it is not done in time. The stream goes on with it.
            TransportError: the device failed.
        """
        event = self.now()
        pause = _FIRST_PAUSE_S
        while event is not None and not event.is_done():
            if deadline.expired:
                raise TimeoutError(f"the work that {self.name} was given before has not ended in time")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    @abc.abstractmethod
    def hand_over(self, tensor: Tensor) -> None:
        """Memory that was allocated before, maybe on another stream, is used on the current one now."""

    def owns(self, tensor: Tensor) -> bool:
        return str(tensor.device) == self.name

    def empty(self, meta: TensorMeta) -> Tensor:
        """New memory.

        Raises:
            ResourceExhaustedError: there is not enough.
            UnsupportedError: the torch installed here lacks the dtype.
        """
        import torch

        dtype = dtype_of(meta.dtype)
        with NamedExhaustion(f"a tensor of {meta.nbytes} bytes on {self.name}; the message stays"):
            # From bytes: torch may have to fill what it makes, and has no kernels for every dtype.
            flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self.name)
        return flat.view(dtype).view(meta.shape)


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
        import torch

        try:
            device = torch.device(name)
        except RuntimeError as e:
            raise ConfigError(f"device: torch does not know {name!r}: {e}") from e
        if device.type != "cuda":
            raise ConfigError(f"'pynccl' moves CUDA tensors, and the device is {name!r}")
        if not torch.cuda.is_available():
            raise ConfigError(f"'pynccl' needs a GPU, and torch {torch.__version__} finds none here")
        try:
            index = torch.cuda.current_device() if device.index is None else device.index
            count = torch.cuda.device_count()
        except RuntimeError as e:  # in a forked child of a process that has used the GPU
            raise ConfigError(f"the GPU cannot be used in this process: {e}") from e
        if index >= count:
            raise ConfigError(f"device: there is no {name!r}; there are {count} GPUs")
        self._device = torch.device("cuda", index)
        self.name = str(self._device)

    @property
    def identity(self) -> str:
        import torch

        return str(getattr(torch.cuda.get_device_properties(self._device), "uuid", ""))

    def current(self) -> AbstractContextManager[Any]:
        import torch

        return torch.cuda.device(self._device)  # type: ignore[no-any-return,unused-ignore]

    def new_stream(self) -> Stream:
        try:
            return CudaStream(self._device)
        except RuntimeError as e:
            NamedExhaustion.check(e, f"a stream of {self.name}")
            raise TransportError(f"{self.name} makes no stream: {e}") from e

    def now(self) -> Event | None:
        import torch

        return CudaEvent(torch.cuda.current_stream(self._device).record_event())

    def follow(self, event: Event) -> None:
        import torch

        assert isinstance(event, CudaEvent)
        torch.cuda.current_stream(self._device).wait_event(event.raw)

    def is_capturing(self) -> bool:
        import torch

        with self.current():
            return bool(torch.cuda.is_current_stream_capturing())

    def hand_over(self, tensor: Tensor) -> None:
        import torch

        tensor.record_stream(torch.cuda.current_stream(self._device))

    def upload(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        with self.current():
            pinned = tensor.pin_memory()
            return pinned.to(self._device, non_blocking=True), pinned

    def download(self, tensor: Tensor) -> Tensor:
        import torch

        with self.current():
            staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            return staged.copy_(tensor, non_blocking=True)
