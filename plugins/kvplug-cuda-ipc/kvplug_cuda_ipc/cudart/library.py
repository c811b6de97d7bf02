"""The CUDA runtime, loaded with ctypes: each function as a method that raises what its result means.

Every call releases the interpreter's lock. Memory, streams and events are addresses; stream 0 is the default
one. No call waits for a device, except where its docstring says so (``cudaFree``, ``cudaMalloc``).
"""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Final

from kvplug.transport import NamedExhaustion
from kvplug_cuda_ipc.cudart.abi import (
    CaptureMode,
    EventFlag,
    IpcFlag,
    IpcMemHandle,
    MemcpyKind,
    Properties,
    Result,
)
from kvplug_cuda_ipc.cudart.errors import CudaLibraryError, error_of
from kvplug_cuda_ipc.cudart.places import VARIABLE, places
from kvplug_cuda_ipc.cudart.prototypes import PROTOTYPES, RENAMED

MIN_VERSION: Final = 11000


def load(path: str = "") -> Runtime:
    """Load the runtime at ``path``, or that of ``KVPLUG_CUDART_LIBRARY``, or the one that this process has.

    Raises:
        CudaLibraryError: no runtime can be used. A given path, or the variable's, is the only one tried.
        ResourceExhaustedError: this process has no descriptor or memory to look for one.
    """
    tried = []
    for what, place in places(path):
        try:
            return Runtime(place)
        except CudaLibraryError as e:
            tried.append(f"{what}: {e}")
    if len(tried) == 1:
        raise CudaLibraryError(f"no CUDA runtime can be used; {tried[0]}")
    lines = "".join(f"\n  - {each}" for each in tried)
    raise CudaLibraryError(
        f"no CUDA runtime can be used; import a PyTorch with CUDA, or name one with {VARIABLE}:{lines}"
    )


class Runtime:
    """One ``libcudart``. :func:`load` finds it.

    Raises (every method that calls it):
        CudaError: it failed now, or work that was enqueued before has failed.
    """

    def __init__(self, path: str) -> None:
        """Raises CudaLibraryError: it cannot be loaded, is not a CUDA runtime, or is too old."""
        self.path = path
        try:
            loaded = ctypes.CDLL(path)
        except OSError as e:
            NamedExhaustion.check(e, f"loading {path}")
            raise CudaLibraryError(f"{path} cannot be loaded: {e}") from e
        self._functions: dict[str, Callable[..., Any]] = {}
        lacks = []
        for name, (returns, *takes) in PROTOTYPES.items():
            spelt = next((each for each in (RENAMED.get(name, name), name) if hasattr(loaded, each)), None)
            if spelt is None:
                lacks.append(name)
                continue
            function = loaded[spelt]
            function.restype, function.argtypes = returns, takes
            self._functions[name] = function
        if lacks:
            raise CudaLibraryError(f"{path} is not a CUDA runtime: it lacks {', '.join(lacks[:3])}")
        version = ctypes.c_int()
        self._call("cudaRuntimeGetVersion", ctypes.byref(version))
        self.version: int = version.value
        """1000 * major + 10 * minor."""
        if self.version < MIN_VERSION:
            raise CudaLibraryError(
                f"{path} is CUDA {_spelt(self.version)}; at least {_spelt(MIN_VERSION)} is needed"
            )

    def __repr__(self) -> str:
        return f"<CUDA runtime {_spelt(self.version)} of {self.path}>"

    # -- without a device ------------------------------------------------------------------------------

    def get_error_name(self, result: int) -> str:
        return _text(self._functions["cudaGetErrorName"](result))

    def get_error_string(self, result: int) -> str:
        return _text(self._functions["cudaGetErrorString"](result))

    # -- devices ---------------------------------------------------------------------------------------

    def set_device(self, device: int) -> None:
        """Make it this thread's current device."""
        self._call("cudaSetDevice", device)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set what this thread may call while another one captures a CUDA graph. Return the old mode."""
        value = ctypes.c_int(mode)
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.byref(value))
        return value.value

    @contextlib.contextmanager
    def relaxed(self) -> Iterator[None]:
        """Return a context in which calls do not disturb a CUDA graph that another thread captures."""
        before = self.exchange_capture_mode(CaptureMode.RELAXED)
        try:
            yield
        finally:
            self.exchange_capture_mode(before)

    def uuid_of(self, device: int) -> uuid.UUID:
        """Return what identifies the GPU in all processes and on all hosts."""
        properties = Properties()
        self._call("cudaGetDeviceProperties", ctypes.byref(properties), device)
        return uuid.UUID(bytes=bytes(properties.uuid))

    # -- memory ----------------------------------------------------------------------------------------

    def malloc(self, nbytes: int) -> int:
        """Allocate device memory. May wait for the device. Raises CudaMemoryError: there is not enough."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), nbytes)
        return address.value or 0

    def free(self, address: int) -> None:
        """Free memory. Waits for all work that the device was given, also by other libraries."""
        self._call("cudaFree", address)

    def ipc_get_mem_handle(self, address: int) -> bytes:
        """Return a handle with which another process can map memory of :meth:`malloc`."""
        handle = IpcMemHandle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle)

    def ipc_open_mem_handle(self, handle: bytes) -> int:
        """Map another process's memory. A process cannot open its own handles."""
        address = ctypes.c_void_p()
        flags = IpcFlag.LAZY_ENABLE_PEER_ACCESS
        self._call("cudaIpcOpenMemHandle", ctypes.byref(address), IpcMemHandle.of(handle), flags)
        return address.value or 0

    def ipc_close_mem_handle(self, address: int) -> None:
        """Unmap it; the owner frees it only after this."""
        self._call("cudaIpcCloseMemHandle", address)

    # -- streams and events ------------------------------------------------------------------------------

    def memcpy_async(self, to: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueue a copy. Both memories are in use until an event of the stream is done."""
        self._call("cudaMemcpyAsync", to, source, nbytes, MemcpyKind.DEFAULT, stream)

    def event(self, stream: int) -> Event:
        """Return an event that is done when all that the stream was given so far is done."""
        event = ctypes.c_void_p()
        self._call("cudaEventCreateWithFlags", ctypes.byref(event), EventFlag.DISABLE_TIMING)
        made = Event(self, event.value or 0)
        self._call("cudaEventRecord", made.handle, stream)
        return made

    def event_query(self, event: int) -> bool:
        """Whether the event is done."""
        result = self._functions["cudaEventQuery"](event)
        if result == Result.NOT_READY:
            self._functions["cudaGetLastError"]()  # or PyTorch takes it for an error of its own
            return False
        self._check("cudaEventQuery", result)
        return True

    def event_destroy(self, event: int) -> None:
        self._call("cudaEventDestroy", event)

    def stream_wait_event(self, stream: int, event: Event) -> None:
        """Make what the stream is given from now on begin after the event. The host does not wait."""
        self._call("cudaStreamWaitEvent", stream, event.handle, 0)

    # -- calling it -----------------------------------------------------------------------------------

    def _call(self, name: str, *args: Any) -> None:
        self._check(name, self._functions[name](*args))

    def _check(self, name: str, result: int) -> None:
        if result != Result.SUCCESS:
            self._functions["cudaGetLastError"]()
            raise error_of(result, name, self.get_error_name(result), self.get_error_string(result))


class Event:
    """A point in the work of a stream. It is polled, and never waited for."""

    def __init__(self, runtime: Runtime, handle: int) -> None:
        self.handle = handle
        self._runtime = runtime
        self._done = False

    def is_done(self) -> bool:
        """Whether all work that was enqueued before it is done.

        Raises:
            CudaError: the device failed.
        """
        if not self._done:
            self._done = self._runtime.event_query(self.handle)
        return self._done

    def __del__(self) -> None:
        handle, self.handle = self.handle, 0
        if handle:
            try:
                self._runtime.event_destroy(handle)
            except Exception:  # the device has failed, or the interpreter ends
                pass


def _spelt(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _text(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")
