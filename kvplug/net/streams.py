"""CUDA streams that nobody else has.

torch gives out the same 32 over and over: the 17th pipe of a process would have those of the first, and a
kernel of one that spins for its peer would hold up the other.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import TransportError

if TYPE_CHECKING:
    import torch

_DRIVER: Final = "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_PRIORITY: Final = -1  # higher than the usual 0: what is moved is usually waited for

_lock = threading.Lock()
_idle: Final[dict[str, list[Any]]] = defaultdict(list)


def acquire_stream(device: torch.device) -> Any:
    """A stream that is the caller's until it is given back: new, or one that has done all it was given.

    Raises:
        TransportError: the driver makes none.
        RuntimeError: the GPU failed.
    """
    with _lock:
        idle = _idle[str(device)]
        for at, stream in enumerate(idle):
            if stream.query():
                return idle.pop(at)
    return _made(device)


def release_stream(stream: Any) -> None:
    """It is never destroyed: torch asks it about memory that was used there, when that is freed at last."""
    with _lock:
        _idle[str(stream.device)].append(stream)


def _made(device: torch.device) -> Any:
    import torch

    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # the device's context is this thread's from here on
        try:
            make = ctypes.CDLL(_DRIVER).cuStreamCreateWithPriority
        except (OSError, AttributeError) as e:
            raise TransportError(f"{device} makes no stream: {e}") from e
        make.restype = ctypes.c_int
        make.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
        if result := make(ctypes.byref(handle), _NON_BLOCKING, _PRIORITY):
            raise TransportError(f"{device} makes no stream: cuStreamCreateWithPriority gave {result}")
    return torch.cuda.ExternalStream(handle.value, device=device)
