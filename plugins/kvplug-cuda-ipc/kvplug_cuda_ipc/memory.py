"""Device memory that another process copies from: this end's own, and the peer's.

A pipe allocates its own. Memory of PyTorch's may lie in an expandable segment, which cannot be exported, or
share an allocation with other tensors, which would be exported with it.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from typing import Final

from kvplug_cuda_ipc.cudart.library import Runtime

GRANULARITY: Final = 2 << 20
"""The driver cuts smaller allocations out of one of this size, and exports all of it."""
TOKEN_BYTES: Final = 16

_local: weakref.WeakValueDictionary[bytes, Staging] = weakref.WeakValueDictionary()
"""Every staging memory of this process, by its token."""


class Staging:
    """Memory of this end's, which one peer may map."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        """On the current device; ``nbytes`` is rounded up to whole multiples of 2 MiB.

        Raises:
            CudaMemoryError: there is not enough.
            CudaError: it cannot be exported.
        """
        self._runtime = runtime
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._borrowers = 0
        """How many ends in this process copy from it. They cannot map it, so it is counted here."""
        self._freed = False
        self.nbytes = -(-nbytes // GRANULARITY) * GRANULARITY
        self.address = runtime.malloc(self.nbytes)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """By which this process recognises its own memory."""
        try:
            self.handle = runtime.ipc_get_mem_handle(self.address)
        except BaseException:
            self.free()
            raise
        _local[self.token] = self

    def free(self) -> None:
        """Free it, once no other process has it mapped. Waits for the device's work. Idempotent.

        While an end in this process still borrows it, it is freed when the last one releases it.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            self._freed = True
            if self._borrowers:
                return
            address, self.address = self.address, 0
        if address:
            self._runtime.free(address)

    def borrow(self) -> bool:
        """Count an end in this process that copies from it. Return False if it was freed before."""
        with self._lock:
            self._borrowers += not self._freed
            return not self._freed

    def release(self) -> None:
        """End a successful :meth:`borrow`. Raises as :meth:`free`, which the last end calls."""
        with self._lock:
            self._borrowers -= 1
            freed = self._freed
        if freed:
            self.free()


class Mapping:
    """The peer's staging memory, mapped until it is closed."""

    def __init__(self, runtime: Runtime, token: bytes, handle: bytes, nbytes: int) -> None:
        """Raises CudaError: it cannot be mapped."""
        self._runtime = runtime
        self._pid = os.getpid()
        local = _local.get(token)  # a process cannot open its own handles
        if local is None or local.nbytes != nbytes or not local.borrow():
            local = None  # the token is another process's
        self._local = local
        self.nbytes = nbytes
        self.address = runtime.ipc_open_mem_handle(handle) if local is None else local.address

    def close(self) -> None:
        """Unmap it; no copy from it may be under way. Idempotent."""
        address, self.address = self.address, 0
        local, self._local = self._local, None
        if self._pid != os.getpid():
            return
        if local is not None:
            local.release()
        elif address:
            self._runtime.ipc_close_mem_handle(address)


class Ring:
    """Room in staging memory, reserved and released in the same order."""

    ALIGNMENT: Final = 512

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._begin = self._end = 0
        self._ends: list[int] = []

    def reserve(self, nbytes: int) -> int | None:
        """Reserve ``nbytes`` contiguous bytes and return their offset; ``None`` if there is no room now."""
        if not self._ends:
            self._begin = self._end = 0
        nbytes = -(-nbytes // self.ALIGNMENT) * self.ALIGNMENT
        at = self._end % self.nbytes
        start = self._end if at + nbytes <= self.nbytes else self._end + self.nbytes - at
        if start + nbytes - self._begin > self.nbytes:
            return None
        self._end = start + nbytes
        self._ends.append(self._end)
        return start % self.nbytes

    def release(self) -> None:
        """End the oldest reservation."""
        self._begin = self._ends.pop(0)
