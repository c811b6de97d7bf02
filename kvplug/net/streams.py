"""Streams of a device for the exclusive use of one owner, and marks behind what was queued for a device.

torch hands out the same 32 CUDA streams again and again: the 17th pipe of a process would get the streams of
the first, and a kernel of one pipe that spins for its peer would delay the other pipe.

Everything but the making of CUDA streams goes through ``torch.get_device_module``, so other accelerators, and
the simulated device of the conformance kit, are served in the same way.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import TransportError
from kvplug.net.exhaustion import NamedExhaustion

if TYPE_CHECKING:
    import torch

_DRIVER: Final = "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_PINS: Final = frozenset({"cuda", "xpu"})
"""Devices for which torch can pin host memory."""
_PRIORITY: Final = -1  # higher than the usual 0: what is moved is usually waited for

_lock = threading.Lock()
_idle: Final[dict[str, list[Any]]] = defaultdict(list)


class StreamPool:
    """The streams of this process, each for the exclusive use of one owner at a time."""

    @staticmethod
    def acquire(device: torch.device) -> Any:
        """A stream that is exclusively the caller's until :meth:`release`: a new one, or an idle released
        one.

        Raises:
            TransportError: the driver cannot create one.
            RuntimeError: the device failed.
        """
        with _lock:
            idle = _idle[str(device)]
            for at, stream in enumerate(idle):
                if stream.query():
                    return idle.pop(at)
        return _made(device)

    @staticmethod
    def release(stream: Any) -> None:
        """Give the stream back; work may still run on it.

        The stream is never destroyed, because torch queries it when memory that was used on it is freed.
        """
        with _lock:
            _idle[str(stream.device)].append(stream)


def on_stream(stream: Any) -> Any:
    """A context in which the calling thread queues work on ``stream``."""
    import torch

    return torch.get_device_module(stream.device).stream(stream)


class DeviceMark:
    """Behind everything that the calling thread has queued for a device by now, on its current stream.

    A thread works on a stream of its own there: what another thread has only queued, it does not see. On a
    CPU nothing is queued, and every mark is passed.

    Args:
        timed: whether :meth:`seconds_since` is asked.
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
        """Whether the device has come past it."""
        return self._event is None or self._event.query()

    def wait(self) -> None:
        """Return when the device has come past it. Any thread, any number of times."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: DeviceMark) -> float:
        """The time that the device took from another mark to this one. Both are timed, and passed."""
        if self._event is None:
            return self._made_at - earlier._made_at
        return float(earlier._event.elapsed_time(self._event)) / 1e3

    def hold(self, stream: Any) -> None:
        """Let what is queued on ``stream`` from now on run after it. Does not wait."""
        if self._event is not None:
            stream.wait_event(self._event)


def pinned_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    """``nbytes`` of host memory, between which and the device copies run while the host goes on.

    torch keeps freed memory of this kind for later calls, and hands it out again only when the device is done
    with it.

    Raises:
        RuntimeError: the device's driver gives no more.
    """
    import torch

    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type in _PINS)


def _made(device: torch.device) -> Any:
    import torch

    if device.type != "cuda":
        return torch.get_device_module(device).Stream(device)
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # the device's context is this thread's from here on
        try:
            make = ctypes.CDLL(_DRIVER).cuStreamCreateWithPriority
        except (OSError, AttributeError) as e:
            NamedExhaustion.check(e, f"making a stream of {device}")
            raise TransportError(f"{device} makes no stream: {e}") from e
        make.restype = ctypes.c_int
        make.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
        if result := make(ctypes.byref(handle), _NON_BLOCKING, _PRIORITY):
            raise TransportError(f"{device} makes no stream: cuStreamCreateWithPriority gave {result}")
    return torch.cuda.ExternalStream(handle.value, device=device)
