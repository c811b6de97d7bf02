"""The errors that results of the CUDA runtime are raised as. ``cudaErrorNotReady`` is not an error."""

from __future__ import annotations

from typing import Final

from kvplug import ResourceExhaustedError, TransportError
from kvplug_cuda_ipc.cudart.abi import Result


class CudaLibraryError(TransportError):
    """No CUDA runtime can be used. The message lists where it was looked for, and what is wrong there."""


class CudaError(TransportError):
    """A function of the CUDA runtime failed. ``result`` is the number that ``function`` returned."""

    def __init__(self, text: str, *, result: int, function: str) -> None:
        self.result = result
        self.function = function
        super().__init__(text)


class CudaMemoryError(CudaError, ResourceExhaustedError):
    """The GPU does not have enough free memory."""

    def __init__(self, text: str, *, result: int, function: str) -> None:
        super().__init__(text, result=result, function=function)
        self.resource = "memory"


_MEANINGS: Final[dict[int, str]] = {
    Result.MEMORY_ALLOCATION: "the GPU does not have enough free memory",
    Result.INSUFFICIENT_DRIVER: "there is no NVIDIA driver here, or it is older than this CUDA runtime",
    Result.STUB_LIBRARY: "libcuda.so.1 is a stub to link with, not the driver",
    Result.NO_DEVICE: "this process may use no GPU here (CUDA_VISIBLE_DEVICES?)",
    Result.INITIALIZATION_ERROR: "this process was forked from one that used CUDA, or no driver starts",
    Result.INVALID_DEVICE: "there is no GPU of that number here",
    Result.DEVICE_UNINITIALIZED: "the memory is this process's own, or its GPU cannot be used",
    Result.MAP_BUFFER_OBJECT_FAILED: """
        the memory could not be mapped: the other process has ended, is in other namespaces (IPC, PID), or its
        GPU cannot be reached from this one""",
    Result.PEER_ACCESS_UNSUPPORTED: "the two GPUs cannot reach each other's memory",
    Result.INVALID_RESOURCE_HANDLE: "the handle is not valid, or its memory is gone",
    Result.TOO_MANY_PEERS: "the GPU is connected to as many other GPUs as it can be",
    Result.NOT_SUPPORTED: "this system cannot share device memory between processes, as WSL and Tegra cannot",
    Result.STREAM_CAPTURE_UNSUPPORTED: "a CUDA graph is being captured, and this call cannot be part of one",
    Result.ILLEGAL_ADDRESS: "a kernel or a copy used an invalid address; this process has lost the GPU",
}


def error_of(result: int, function: str, name: str, text: str) -> CudaError:
    """Return the error for a result. ``name`` and ``text`` are the runtime's own for it."""
    meaning = " ".join(_MEANINGS.get(result, text).split()) or "a result that kvplug-cuda-ipc does not know"
    kind = CudaMemoryError if result == Result.MEMORY_ALLOCATION else CudaError
    return kind(f"{function} returned {name or result}: {meaning}", result=result, function=function)
