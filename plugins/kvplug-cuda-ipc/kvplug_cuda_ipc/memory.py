"""Device memory that another process copies from: ours, and the peer's.

Ours is an allocation of its own. What PyTorch hands out may lie in an expandable segment, which cannot be
exported, or beside somebody else's tensors, which would be exported with it.
"""

from __future__ import annotations

import os
import secrets
import select
import threading
import weakref
from typing import Final

from kvplug.transport import PeerIdentity
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
        self._lock = threading.Lock()
        self._lent = 0
        """How many ends in this process copy from it: they cannot map it, so nothing else tells."""
        self._over = False
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
        """No other process has it mapped any more. Waits for what the device was given. Idempotent.

        What an end in this process still copies from is freed when that end gives it back.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            self._over = True
            if self._lent:
                return
            address, self.address = self.address, 0
        if address:
            self._runtime.free(address)

    def lend(self) -> bool:
        """To an end in this process. Whether it was not freed by then."""
        with self._lock:
            self._lent += not self._over
            return not self._over

    def give_back(self) -> None:
        """Once for each time it was lent. Raises as :meth:`free`, if that was waited with."""
        with self._lock:
            self._lent -= 1
            over = self._over
        if over:
            self.free()


class Mapping:
    """The peer's, for as long as it is open."""

    def __init__(self, runtime: Runtime, token: bytes, handle: bytes, nbytes: int) -> None:
        """Raises CudaError: it cannot be mapped."""
        self._runtime = runtime
        self._pid = os.getpid()
        own = _ours.get(token)  # no process can open its own handles
        if own is None or own.nbytes != nbytes or not own.lend():
            own = None  # whoever says so is not this process
        self._own = own
        self.nbytes = nbytes
        self.address = runtime.ipc_open_mem_handle(handle) if own is None else own.address

    def close(self) -> None:
        """Nothing is copied from it any more. Idempotent."""
        address, self.address = self.address, 0
        own, self._own = self._own, None
        if self._pid != os.getpid():
            return
        if own is not None:
            own.give_back()
        elif address:
            self._runtime.ipc_close_mem_handle(address)


class Borrower:
    """The process at the other end, which may have memory of ours mapped for as long as it lives."""

    def __init__(self, identity: PeerIdentity) -> None:
        """Raises PeerGoneError: it has ended."""
        self._pidfd = identity.open_pidfd()
        self._is_self = identity.visible and identity.pid == os.getpid()

    @property
    def visible(self) -> bool:
        """Whether its end can be seen."""
        return self._pidfd is not None

    def wait_for_end(self) -> None:
        """Its connection has ended, which a process that is killed does before it is gone.

        This process does not end, and what of ours it has, it gives back to ours.
        """
        if self._pidfd is not None and not self._is_self:
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
