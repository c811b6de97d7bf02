"""What results of the CUDA runtime are as errors. ``cudaErrorNotReady`` is none."""

from __future__ import annotations

from typing import Final

from kvplug import CapacityError, TransportError
from kvplug_cuda_ipc.cudart.abi import Result


class CudaLibraryError(TransportError):
    """There is no CUDA runtime that can be used. The message says what was looked for where."""


class CudaError(TransportError):
    """A function of the CUDA runtime failed. ``result`` is the number that ``function`` gave."""

    def __init__(self, text: str, *, result: int, function: str) -> None:
        self.result = result
        self.function = function
        super().__init__(text)


class CudaMemoryError(CudaError, CapacityError):
    """The GPU has not so much memory left."""


_MEANINGS: Final[dict[int, str]] = {
    Result.MEMORY_ALLOCATION: "the GPU has not so much memory left",
    Result.INSUFFICIENT_DRIVER: "there is no driver of NVIDIA's here, or it is older than this CUDA runtime",
    Result.STUB_LIBRARY: "libcuda.so.1 is a stub to link with, and not the driver's",
    Result.NO_DEVICE: "there is no GPU here that this process may use (CUDA_VISIBLE_DEVICES?)",
    Result.INITIALIZATION_ERROR: "this process was forked from one that used CUDA, or no driver starts",
    Result.INVALID_DEVICE: "there is no GPU of that number here",
    Result.DEVICE_UNINITIALIZED: "the memory is this process's own, or its GPU is in no state to be used",
    Result.MAP_BUFFER_OBJECT_FAILED: """
        the memory could not be mapped: the other process has ended, is in other namespaces (IPC, PID), or its
        GPU cannot be reached from ours""",
    Result.PEER_ACCESS_UNSUPPORTED: "the two GPUs cannot reach each other's memory",
    Result.INVALID_RESOURCE_HANDLE: "what was handed over is not what it should be, or is gone",
    Result.TOO_MANY_PEERS: "the GPU reaches as many others already as it can",
    Result.NOT_SUPPORTED: "this system shares no device memory between processes (WSL and Tegra do not)",
    Result.STREAM_CAPTURE_UNSUPPORTED: "a CUDA graph is being captured, of which this cannot be a part",
    Result.ILLEGAL_ADDRESS: "something read or wrote where no memory is; this process has lost the GPU",
}


def error_of(result: int, function: str, name: str, said: str) -> CudaError:
    """The error that a result is. ``name`` and ``said`` are the runtime's own words."""
    meaning = " ".join(_MEANINGS.get(result, said).split()) or "a result that kvplug-cuda-ipc does not know"
    kind = CudaMemoryError if result == Result.MEMORY_ALLOCATION else CudaError
    return kind(f"{function} gave {name or result}: {meaning}", result=result, function=function)
