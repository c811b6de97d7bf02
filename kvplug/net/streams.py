"""CUDA streams for the exclusive use of one owner.

torch hands out the same 32 streams again and again: the 17th pipe of a process would get the streams of the
first, and a kernel of one pipe that spins for its peer would delay the other pipe.
"""

from __future__ import annotations

import ctypes
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Final

from kvplug.errors import TransportError
from kvplug.net.exhaustion import raise_if_exhausted

if TYPE_CHECKING:
    import torch

_DRIVER: Final = "libcuda.so.1"
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream
_PRIORITY: Final = -1  # higher than the usual 0: what is moved is usually waited for

_lock = threading.Lock()
_idle: Final[dict[str, list[Any]]] = defaultdict(list)


def acquire_stream(device: torch.device) -> Any:
    """A stream that is exclusively the caller's until ``release_stream``: a new one, or an idle released one.

    Raises:
        TransportError: the driver cannot create one.
        RuntimeError: the GPU failed.
    """
    with _lock:
        idle = _idle[str(device)]
        for at, stream in enumerate(idle):
            if stream.query():
                return idle.pop(at)
    return _made(device)


def release_stream(stream: Any) -> None:
    """Give the stream back; work may still run on it.

    The stream is never destroyed, because torch queries it when memory that was used on it is freed.
    """
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
            raise_if_exhausted(e, f"making a stream of {device}")
            raise TransportError(f"{device} makes no stream: {e}") from e
        make.restype = ctypes.c_int
        make.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int]
        if result := make(ctypes.byref(handle), _NON_BLOCKING, _PRIORITY):
            raise TransportError(f"{device} makes no stream: cuStreamCreateWithPriority gave {result}")
    return torch.cuda.ExternalStream(handle.value, device=device)
