"""The one seam between the logic and PyTorch's side of CUDA: which device, whose stream, whose memory.

Copies, events and shared memory go through :mod:`kvplug_cuda_ipc.cudart`, whose functions a fake has as well.
Nothing waits for a whole device.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from kvplug import CapacityError, ConfigError, TransportError
from kvplug.net.wire import TensorMeta
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import acquire_stream, release_stream
from kvplug_cuda_ipc.cudart.abi import CaptureMode
from kvplug_cuda_ipc.cudart.library import Runtime, load

if TYPE_CHECKING:
    from torch import Tensor


class Stream(abc.ABC):
    """A queue of work of the device, of our own."""

    handle: int
    """A ``cudaStream_t``."""

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """In the block what torch does in this thread is enqueued here, and it allocates for here."""

    @abc.abstractmethod
    def close(self) -> None:
        """Nothing more is enqueued. What was is still done; nobody waits for that. Idempotent."""


class Device(abc.ABC):
    """Where the tensors are that are sent and received."""

    name: str
    """As torch spells it, with an index where there may be several."""
    index: int
    """As the CUDA runtime counts."""
    runtime: Runtime

    @abc.abstractmethod
    def current(self) -> AbstractContextManager[Any]:
        """In the block it is the current device of this thread, for torch and for the runtime."""

    @abc.abstractmethod
    def is_capturing(self) -> bool:
        """Whether what this thread enqueues becomes part of a CUDA graph, and is not done."""

    @abc.abstractmethod
    def new_stream(self) -> Stream:
        """Raises TransportError: there can be none."""

    @abc.abstractmethod
    def callers_stream(self) -> int:
        """The handle of torch's current stream of this thread."""

    @abc.abstractmethod
    def hand_over(self, tensor: Tensor) -> None:
        """The caller goes on with memory of ours on its current stream, and may drop it when it likes."""

    def adopt(self) -> None:
        """For a thread of ours: it is its current device for good, for the runtime.

        Raises:
            CudaError: the device has failed.
        """
        self.runtime.set_device(self.index)
        self.runtime.exchange_capture_mode(CaptureMode.RELAXED)

    def empty(self, meta: TensorMeta, stream: Stream) -> Tensor:
        """New memory, which can be written on ``stream`` at once.

        Raises:
            CapacityError: there is not so much.
            UnsupportedError: the torch installed here lacks the dtype.
        """
        import torch

        dtype = dtype_of(meta.dtype)
        try:
            with stream.current():
                # From bytes: torch may have to fill what it makes, and has no kernels for every dtype.
                flat = torch.empty(meta.nbytes, dtype=torch.uint8, device=self.name)
        except (RuntimeError, MemoryError) as e:
            raise CapacityError(
                f"no memory on {self.name} for a tensor of {meta.nbytes} bytes; the message stays"
            ) from e
        return flat.view(dtype).view(meta.shape)


class CudaStream(Stream):
    """Lent to us, and nobody else's so long."""

    def __init__(self, index: int) -> None:
        import torch

        self._stream = acquire_stream(torch.device("cuda", index))
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
            release_stream(self._stream)


class CudaDevice(Device):
    """A GPU, over ``torch.cuda``."""

    def __init__(self, name: str, library: str = "") -> None:
        """``library`` is the CUDA runtime to load; empty: PyTorch's.

        Raises:
            ConfigError: it is no GPU, or none that is here.
            CudaLibraryError: there is no CUDA runtime that can be used.
        """
        import torch

        try:
            device = torch.device(name)
        except RuntimeError as e:
            raise ConfigError(f"device: {name!r} is none of torch's: {e}") from e
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
            raise TransportError(f"{self.name} makes no stream: {e}") from e

    def callers_stream(self) -> int:
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def hand_over(self, tensor: Tensor) -> None:
        import torch

        tensor.record_stream(torch.cuda.current_stream(self.index))
