"""Device memory that another process copies from: ours, and the peer's.

Ours is an allocation of its own. What PyTorch hands out may lie in an expandable segment, which cannot be
exported, or beside somebody else's tensors, which would be exported with it.
"""

from __future__ import annotations

import os
import secrets
import select
import weakref
from typing import Final

from kvplug import PeerIdentity
from kvplug_cuda_ipc.cudart.library import Runtime

GRAIN: Final = 2 << 20
"""The driver cuts smaller allocations out of one, and exports all of that."""
TOKEN_BYTES: Final = 16
_ENDS_S: Final = 10.0
"""How long a process may take to end, or it lives on without its connection, and unmaps what it will."""

_ours: weakref.WeakValueDictionary[bytes, Staging] = weakref.WeakValueDictionary()


class Staging:
    """Memory of ours, which one peer may map."""

    def __init__(self, runtime: Runtime, nbytes: int) -> None:
        """On the current device.

        Raises:
            CudaMemoryError: there is not so much.
            CudaError: or it cannot be exported.
        """
        self._runtime = runtime
        self._pid = os.getpid()
        self.nbytes = -(-nbytes // GRAIN) * GRAIN
        self.address = runtime.malloc(self.nbytes)
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """By which this process knows its own."""
        try:
            self.handle = runtime.ipc_get_mem_handle(self.address)
        except BaseException:
            self.free()
            raise
        _ours[self.token] = self

    def free(self) -> None:
        """Nobody has it mapped any more. Waits for what the device was given. Idempotent."""
        address, self.address = self.address, 0
        if address and self._pid == os.getpid():
            self._runtime.free(address)


class Mapping:
    """The peer's, for as long as it is open."""

    def __init__(self, runtime: Runtime, token: bytes, handle: bytes, nbytes: int) -> None:
        """Raises CudaError: it cannot be mapped."""
        self._runtime = runtime
        self._pid = os.getpid()
        self._own = _ours.get(token)  # no process can open its own handles
        if self._own is not None and self._own.nbytes != nbytes:
            self._own = None  # whoever says so is not this process
        self.nbytes = nbytes
        self.address = runtime.ipc_open_mem_handle(handle) if self._own is None else self._own.address

    def close(self) -> None:
        """Nothing is copied from it any more. Idempotent."""
        address, self.address = self.address, 0
        own, self._own = self._own, None
        if address and own is None and self._pid == os.getpid():
            self._runtime.ipc_close_mem_handle(address)


class Borrower:
    """The process at the other end, which may have memory of ours mapped for as long as it lives."""

    def __init__(self, identity: PeerIdentity) -> None:
        """Raises PeerGoneError: it has ended."""
        self._pidfd = identity.open_pidfd()

    @property
    def visible(self) -> bool:
        """Whether its end can be seen."""
        return self._pidfd is not None

    def wait_for_end(self) -> None:
        """Its connection has ended, which a process that is killed does before it is gone."""
        if self._pidfd is not None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            poller.poll(_ENDS_S * 1000)

    def close(self) -> None:
        """Idempotent. In a forked child, too."""
        pidfd, self._pidfd = self._pidfd, None
        if pidfd is not None:
            os.close(pidfd)


class Ring:
    """Room in staging memory, which is given out and given back in the same order."""

    ALIGNED: Final = 512

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._begin = self._end = 0
        self._ends: list[int] = []

    def reserve(self, nbytes: int) -> int | None:
        """Where so many bytes have room in one piece; ``None``: nowhere just now."""
        if not self._ends:
            self._begin = self._end = 0
        nbytes = -(-nbytes // self.ALIGNED) * self.ALIGNED
        at = self._end % self.nbytes
        start = self._end if at + nbytes <= self.nbytes else self._end + self.nbytes - at
        if start + nbytes - self._begin > self.nbytes:
            return None
        self._end = start + nbytes
        self._ends.append(self._end)
        return start % self.nbytes

    def release(self) -> None:
        """The oldest piece."""
        self._begin = self._ends.pop(0)
