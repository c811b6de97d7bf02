"""The one seam between the logic and CUDA: streams, events, memory. Nothing here waits for a whole device.

What pipe and communicator need is an order between streams of their own and whatever stream their caller
works on: an event is recorded on the one and waited for on the other, by the device. The host only ever asks
whether an event is done.
"""

from __future__ import annotations

import abc
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

from kvplug import CapacityError, ConfigError, TimeoutError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import Deadline, acquire_stream, release_stream

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FIRST_PAUSE_S: Final = 20e-6
_LONGEST_PAUSE_S: Final = 1e-3
_NEVER: Final = Deadline.after(None)


class Event(abc.ABC):
    """A moment in the work of a stream."""

    @abc.abstractmethod
    def is_done(self) -> bool:
        """Whether all that was enqueued before it is done. Never waits.

        Raises:
            TransportError: the device failed.
        """


class Stream(abc.ABC):
    """A queue of work of the device, of our own."""

    handle: int
    """A ``cudaStream_t``."""

    @abc.abstractmethod
    def record(self) -> Event:
        """All that was enqueued so far."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """What is enqueued from now on begins after ``event``. The host does not wait."""

    @abc.abstractmethod
    def keep(self, tensor: Tensor) -> None:
        """Its memory is given to nobody else before what is enqueued here now is done."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing more is enqueued. What was is still done; nobody waits for that. Idempotent."""


class Device(abc.ABC):
    """Where the tensors are that are sent and received."""

    name: str
    """As torch spells it, with an index where there may be several."""

    @property
    @abc.abstractmethod
    def identity(self) -> str:
        """Tells this GPU from all others, wherever they are; empty if unknown."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """In the block it is the current device of this thread, as calls of NCCL want it."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Raises TransportError: there can be none."""

    @abc.abstractmethod
    def now(self) -> Event | None:
        """All that the caller's current stream was given so far; ``None``: it is done."""

    @abc.abstractmethod
    def follow(self, event: Event) -> None:
        """What the caller's current stream is given from now on begins after ``event``."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether what the caller's current stream is given is recorded (a CUDA graph), and not done."""

    @abc.abstractmethod
    def upload(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """A copy of a CPU tensor, enqueued on the current stream, and what is to be kept until it is done."""

    @abc.abstractmethod
    def download(self, tensor: Tensor) -> Tensor:
        """A copy in CPU memory, enqueued on the current stream: it is there after :meth:`finish`."""

    def finish(self, deadline: Deadline = _NEVER) -> None:
        """Wait for what this thread has just enqueued on its current stream, and what it was given before.

        Raises:
            TimeoutError: that is not done in time. The stream goes on with it.
            TransportError: the device failed.
        """
        event = self.now()
        pause = _FIRST_PAUSE_S
        while event is not None and not event.is_done():
            if deadline.expired:
                raise TimeoutError(f"what {self.name} was given before has not ended in time")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    @abc.abstractmethod
    def hand_over(self, tensor: Tensor) -> None:
        """Memory that was taken before, maybe on another stream, is used on the current one from now on."""

    def owns(self, tensor: Tensor) -> bool:
        return str(tensor.device) == self.name

    def empty(self, meta: TensorMeta) -> Tensor:
        """New memory.

        Raises:
            CapacityError: there is not so much.
            UnsupportedError: the torch installed here lacks the dtype.
        """
        import torch

        dtype = dtype_of(meta.dtype)
        try:
            # From bytes: torch may have to fill what it makes, and has no kernels for every dtype.
            flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self.name)
        except (RuntimeError, MemoryError) as e:
            raise CapacityError(
                f"no memory on {self.name} for a tensor of {meta.nbytes} bytes; the message stays"
            ) from e
        return flat.view(dtype).view(meta.shape)


class CudaEvent(Event):
    def __init__(self, event: Any) -> None:
        self.raw = event

    def is_done(self) -> bool:
        try:
            return bool(self.raw.query())
        except RuntimeError as e:
            raise TransportError(f"the GPU failed: {e}") from e


class CudaStream(Stream):
    """Lent to us, and nobody else's so long."""

    def __init__(self, device: torch.device) -> None:
        self._stream = acquire_stream(device)
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
            release_stream(self._stream)


class CudaDevice(Device):
    """A GPU, over ``torch.cuda``."""

    def __init__(self, name: str) -> None:
        """Raises ConfigError: it is no GPU, or none that is here."""
        import torch

        try:
            device = torch.device(name)
        except RuntimeError as e:
            raise ConfigError(f"device: {name!r} is none of torch's: {e}") from e
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
            raise ConfigError(f"device: {name!r} is not here; there are {count} GPUs")
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
