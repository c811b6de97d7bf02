"""Streams of a device for the exclusive use of one owner, and marks in the work queued on a device.

torch hands out the same 32 CUDA streams again and again: the 17th pipe of a process would get the streams of
the first, and a kernel of one pipe that spins for its peer would delay the other pipe.

Everything except the creation of CUDA streams goes through ``torch.get_device_module``, so other accelerators
and the simulated device of the conformance kit work in the same way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import TransportError
from kvplug.net.exhaustion import NamedExhaustion

if TYPE_CHECKING:
    import torch

_DRIVER: Final = "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream
_PINS: Final = frozenset({"cuda", "xpu"})
"""Devices for which torch can pin host memory."""
_PORTABLE: Final = 1  # cudaHostRegisterPortable: the memory counts as pinned for every device of the process
_PRIORITIES: Final = {True: -1, False: 0}
"""Priorities of streams by urgency; 0 is the lowest and the default."""

_lock = threading.Lock()
_idle: Final[dict[tuple[str, bool], list[Any]]] = defaultdict(list)


class StreamPool:
    """The streams of this process, each for the exclusive use of one owner at a time."""

    @staticmethod
    def acquire(device: torch.device, *, is_urgent: bool = True) -> Any:
        """Return a stream for the caller's exclusive use until :meth:`release`: an idle released one, or a
        new one.

        Args:
            is_urgent: whether the stream's work runs before the device's other work, since someone usually
                waits for the transfer. Otherwise the stream has the lowest priority.

        Raises:
            TransportError: the driver cannot create a stream.
            RuntimeError: the device failed.
        """
        with _lock:
            idle = _idle[str(device), is_urgent]
            for at, stream in enumerate(idle):
                if stream.query():
                    return idle.pop(at)
        return _made(device, _PRIORITIES[is_urgent])

    @staticmethod
    def release(stream: Any, *, is_urgent: bool = True) -> None:
        """Give the stream back; work may still run on it. ``is_urgent``: as in :meth:`acquire`.

        The stream is never destroyed, because torch queries it when memory that was used on it is freed.
        """
        with _lock:
            _idle[str(stream.device), is_urgent].append(stream)


def on_stream(stream: Any) -> Any:
    """Return a context in which the calling thread queues work on ``stream``."""
    import torch

    return torch.get_device_module(stream.device).stream(stream)


class DeviceMark:
    """Marks the end of everything that the calling thread has queued so far on its current stream of a
    device.

    Each thread has its own current stream, so a mark does not cover work that another thread has queued. On a
    CPU nothing is queued, and every mark is passed.

    Args:
        timed: whether :meth:`seconds_since` will be called.
    """

    __slots__ = ("_event", "_made_at")

    def __init__(self, device: torch.device, *, timed: bool = False) -> None:
        self._event: Any = None
        self._made_at = time.perf_counter()
        if device.type == "cpu":
            return
        import torch

        module = torch.get_device_module(device)
        # a thread that waits sleeps instead of spinning
        more = {"blocking": True} if device.type == "cuda" else {}
        self._event = module.Event(enable_timing=timed, **more)
        self._event.record(module.current_stream(device))

    @property
    def is_passed(self) -> bool:
        """Whether the device has passed this mark."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Wait until the device has passed this mark. Any thread may call this, any number of times."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceMark) -> float:
        """Return the time that the device took from ``earlier`` to this mark. Both must be timed and
        passed."""
        if self._event is None:
            return self._made_at - earlier._made_at
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def hold(self, stream: Any) -> None:
        """Make work queued on ``stream`` from now on run after this mark. Does not wait."""
        if self._event is not None:
            stream.wait_event(self._event)


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """Return ``nbytes`` of host memory that the device can copy from and to while the host continues.

    torch keeps freed memory of this kind for later calls, and reuses it only when the device has finished
    with it.

    Raises:
        RuntimeError: the device's driver cannot allocate it.
    """
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type in _PINS)


def pin_memory(address: int, nbytes: int, device: torch.device) -> Callable[[], object]:
    """Register existing host memory with the device's driver, so that the device can copy from and to it
    while the host continues. Takes about as long as filling the memory.

    Returns a function that ends this. Call it before the memory is unmapped, and after the last copy.

    Raises:
        RuntimeError: the driver refuses, or torch cannot register memory for such a device.
    """
    import torch

    module = torch.get_device_module(device)
    if not hasattr(module, "cudart"):
        raise RuntimeError(f"torch cannot register host memory for {device.type!r}")
    runtime = module.cudart()

    def unpin() -> None:
        with module.device(device):  # else a context is made on the calling thread's device
            runtime.cudaHostUnregister(address)

    with module.device(device):
        if result := int(runtime.cudaHostRegister(address, nbytes, _PORTABLE)):
            raise RuntimeError(f"cudaHostRegister of {nbytes} bytes returned {result}")
    return unpin


def _made(device: torch.device, priority: int) -> Any:
    import torch

    if device.type != "cuda":
        return torch.get_device_module(device).Stream(device)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # makes the device's context current in this thread
        try:
            make = ctypes.CDLL(_DRIVER).cuStreamCreateWithPriority
        except (OSError, AttributeError) as e:
            NamedExhaustion.check(e, f"creating a stream on {device}")
            raise TransportError(f"no stream can be created on {device}: {e}") from e
        make.restype = ctypes.c_int
        make.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
        if result := make(ctypes.byref(handle), _NON_BLOCKING, priority):
            raise TransportError(
                f"no stream can be created on {device}: cuStreamCreateWithPriority returned {result}"
            )
    return torch.cuda.ExternalStream(handle.value, device=device)
