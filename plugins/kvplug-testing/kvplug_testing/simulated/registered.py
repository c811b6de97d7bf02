"""Host memory that is registered with the simulated device, by the functions of CUDA's runtime."""

from __future__ import annotations

import threading
from typing import Final

_ALREADY: Final = 712  # cudaErrorHostMemoryAlreadyRegistered
_UNKNOWN: Final = 713  # cudaErrorHostMemoryNotRegistered

_lock: Final = threading.Lock()
registered: Final[dict[int, int]] = {}
"""The bytes of each registered range of memory, by its address."""


def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:  # noqa: N802
    """Register memory. Returns an error if some of it is registered."""
    with _lock:
        if any(begin < address + nbytes and address < begin + size for begin, size in registered.items()):
            return _ALREADY
        registered[address] = nbytes
        return 0


def cudaHostUnregister(address: int) -> int:  # noqa: N802
    """End the registration of the memory that begins at the address."""
    with _lock:
        return 0 if registered.pop(address, None) else _UNKNOWN
