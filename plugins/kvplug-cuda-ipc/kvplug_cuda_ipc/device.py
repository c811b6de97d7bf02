"""The GPU of a pipe, which torch and the CUDA runtime use. Tests have a fake GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kvplug.transport import OfferPipe
from kvplug_cuda_ipc.cudart.abi import CaptureMode
from kvplug_cuda_ipc.cudart.library import Event, Runtime, load


class Device(OfferPipe.Device):
    """The device of the tensors, with its CUDA runtime. No call waits for the whole device."""

    index: int
    """Its number in the CUDA runtime."""
    runtime: Runtime

    def callers_stream(self) -> int:
        """Return the handle of torch's current stream of this thread."""
        import torch

        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def now(self, on: Any = None) -> Event:
        return self.runtime.event(self.callers_stream())

    def adopt(self) -> None:
        self.runtime.set_device(self.index)
        self.runtime.exchange_capture_mode(CaptureMode.RELAXED)


class CudaDevice(Device):
    """A GPU, over ``torch.cuda``."""

    def __init__(self, name: str, library: str = "") -> None:
        """``library`` is the CUDA runtime to load; empty: PyTorch's.

        Raises:
            ConfigError: it is not a GPU, or not one of this host.
            CudaLibraryError: no CUDA runtime can be used.
        """
        super().__init__(str(self.gpu(name, "cuda-ipc")))
        self.index = self.torch.index
        self.runtime = load(library)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        import torch

        with torch.cuda.device(self.index), self.runtime.relaxed():
            yield
