"""The pinned host memory that pages cross between stores and devices."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvplug.net.fork import close_after_fork
from kvplug.net.streams import pinned_bytes

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_ALIGN: Final = 256


class PinnedMemory:
    """One piece of pinned memory, which is made once, since making it takes long, and lent in parts.

    Requests that wait for a part are served in the order of coming, and before those that do not wait. A part
    may be lent again as soon as it is given back: no copy of it is under way then.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._whole: Tensor | None = None
        self._free: list[tuple[int, int]] = []
        """Where free parts begin and end, in their order."""
        self._waiting: deque[object] = deque()
        self._listeners: list[Callable[[], None]] = []
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self._waiting, self._listeners = deque(), []

    def prepare(self, device: torch.device) -> None:
        """Make it, if it was not.

        Raises:
            RuntimeError: the device's driver gives no more.
        """
        with self._lock:
            if self._whole is None:
                self._whole = pinned_bytes(self.nbytes, device)
                self._free = [(0, self.nbytes)]

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a part was given back. It must not block."""
        with self._lock:
            self._listeners.append(listener)

    def ignore(self, listener: Callable[[], None]) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)

    def largest(self) -> int:
        """Bytes of the largest part that is free for those who do not wait."""
        with self._lock:
            return 0 if self._waiting else max((end - begin for begin, end in self._free), default=0)

    def take(self, nbytes: int, waiter: object = None) -> Tensor | None:
        """A part, of any content; ``None``: not now. A ``waiter`` has a turn from then on; the other callers
        do not."""
        with self._lock:
            is_next = not self._waiting or self._waiting[0] is waiter
            at = next((at for at, (begin, end) in enumerate(self._free) if end - begin >= nbytes), None)
            if not is_next or at is None:
                if waiter is not None and waiter not in self._waiting:
                    self._waiting.append(waiter)
                return None
            if self._waiting and waiter is not None:
                self._waiting.popleft()
            begin, end = self._free[at]
            taken = min(end, begin + -(-nbytes // _ALIGN) * _ALIGN)
            self._free[at : at + 1] = [(taken, end)] if taken < end else []
            assert self._whole is not None
            return self._whole[begin : begin + nbytes]

    def give_back(self, part: Tensor) -> None:
        assert self._whole is not None
        begin = part.storage_offset()
        end = min(self.nbytes, begin + -(-part.numel() // _ALIGN) * _ALIGN)
        with self._lock:
            merged: list[tuple[int, int]] = []
            for one in sorted([*self._free, (begin, end)]):
                if merged and merged[-1][1] == one[0]:
                    merged[-1] = (merged[-1][0], one[1])
                else:
                    merged.append(one)
            self._free = merged
        self._tell()

    def forget(self, waiter: object) -> None:
        """It waits no more."""
        with self._lock:
            if waiter not in self._waiting:
                return
            self._waiting.remove(waiter)
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            listener()
