"""What the pipe needs of PyTorch: the device, the caller's stream, streams of its own, new tensors.

Copies, events and shared memory go through :mod:`kvplug_cuda_ipc.cudart`, which a fake implements as
well. Nothing waits for a whole device.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvplug import ConfigError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import NamedExhaustion, StreamPool
from kvplug_cuda_ipc.cudart.abi import CaptureMode
from kvplug_cuda_ipc.cudart.library import Runtime, load

if TYPE_CHECKING:
    from torch import Tensor


class Stream(abc.ABC):
    """A stream of the device, which only the pipe uses."""

    handle: int
    """A ``cudaStream_t``."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """A context in which torch enqueues on this stream and allocates for it, in this thread."""

    @abc.abstractmethod
    def close(self) -> None:
        """Enqueue nothing more. Work that was enqueued is still done, without waiting for it. Idempotent."""


class Device(abc.ABC):
    """The device of the tensors that are sent and received."""

    name: str
    """As torch spells it, with an index where there may be several such devices."""
    index: int
    """Its number in the CUDA runtime."""
    runtime: Runtime

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """A context in which it is this thread's current device, for torch and for the runtime."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether work that this thread enqueues now becomes part of a CUDA graph, and is not done."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Raises TransportError: there are no more streams."""

    @abc.abstractmethod
    def callers_stream(self) -> int:
        """The handle of torch's current stream of this thread."""

    @abc.abstractmethod
    def hand_over(self, tensor: Tensor) -> None:
        """The caller uses a tensor of the pipe's on its current stream from now on, and may drop it."""

    def adopt(self) -> None:
        """Make it the current device of a thread of the pipe's, for good, for the runtime.

        Raises:
            CudaError: the device has failed.
        """
        self.runtime.set_device(self.index)
        self.runtime.exchange_capture_mode(CaptureMode.RELAXED)

    def empty(self, meta: TensorMeta, stream: Stream) -> Tensor:
        """A new tensor, which can be written on ``stream`` at once.

        Raises:
            ResourceExhaustedError: there is not enough memory.
            UnsupportedError: the torch installed here lacks the dtype.
        """
        import torch

        dtype = dtype_of(meta.dtype)
        what = f"a tensor of {meta.nbytes} bytes on {self.name}; the message stays"
        with NamedExhaustion(what), stream.current():
            # From bytes: torch may have to fill new memory, and does not have kernels for every dtype.
            flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self.name)
        return flat.view(dtype).view(meta.shape)


class CudaStream(Stream):
    """Exclusively the pipe's until it is closed."""

    def __init__(self, index: int) -> None:
        import torch

        self._stream = StreamPool.acquire(torch.device("cuda", index))
        self._closed = False
        self.handle = int(self._stream.cuda_stream)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        import torch

        with torch.cuda.stream(self._stream):
            yield

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            StreamPool.release(self._stream)


class CudaDevice(Device):
    """A GPU, over ``torch.cuda``."""

    def __init__(self, name: str, library: str = "") -> None:
        """``library`` is the CUDA runtime to load; empty: PyTorch's.

        Raises:
            ConfigError: it is no GPU, or is not here.
            CudaLibraryError: there is no CUDA runtime that can be used.
        """
        import torch

        try:
            device = torch.device(name)
        except RuntimeError as e:
            raise ConfigError(f"device: {name!r} is no device of torch's: {e}") from e
        if device.type != "cuda":
            raise ConfigError(f"the pipe 'cuda-ipc' moves CUDA tensors, and the device is {name!r}")
        if not torch.cuda.is_available():
            raise ConfigError(
                f"the pipe 'cuda-ipc' needs a GPU, and torch {torch.__version__} finds none here"
            )
        try:
            self.index = torch.cuda.current_device() if device.index is None else device.index
            count = torch.cuda.device_count()
        except RuntimeError as e:  # in a forked child of a process that has used the GPU
            raise ConfigError(f"the GPU cannot be used in this process: {e}") from e
        if self.index >= count:
            raise ConfigError(f"device: {name!r} is not here; there are {count} GPUs")
        self.name = f"cuda:{self.index}"
        self.runtime = load(library)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        import torch

        with torch.cuda.device(self.index), self.runtime.relaxed():
            yield

    def is_capturing(self) -> bool:
        import torch

        with torch.cuda.device(self.index):
            return bool(torch.cuda.is_current_stream_capturing())

    def new_stream(self) -> Stream:
        try:
            return CudaStream(self.index)
        except RuntimeError as e:
            NamedExhaustion.check(e, f"a stream of {self.name}")
            raise TransportError(f"a stream of {self.name} cannot be made: {e}") from e

    def callers_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def hand_over(self, tensor: Tensor) -> None:
        import torch

        tensor.record_stream(torch.cuda.current_stream(self.index))
