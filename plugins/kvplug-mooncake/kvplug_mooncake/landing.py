"""The landing area: memory shared with the client process, lent in slots."""

from __future__ import annotations

import bisect
import threading

from kvplug import CapacityError
from kvplug.transport import Deadline

_ALIGNED: int = 64


class LateError(Exception):
    """A slot or an answer did not arrive in time."""


class Slot:
    """A piece of the area, lent until :meth:`Landing.give`."""

    __slots__ = ("at", "is_awaited", "nbytes", "view")

    def __init__(self, view: memoryview, at: int, nbytes: int) -> None:
        self.at = at
        self.nbytes = nbytes
        self.view = view[at : at + nbytes]
        self.is_awaited = False
        """Whether a call that was given up may still write to it. It is lent again after the call's end."""


class Landing:
    """Lends slots by first fit. Thread-safe."""

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.nbytes = len(memory)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._free = [(0, len(memory))]
        """Offsets and sizes of the free ranges, in order. No two are adjacent."""

    def take(self, nbytes: int, deadline: Deadline) -> Slot:
        """Raises CapacityError: it never fits. LateError: other calls hold the memory."""
        need = -(-nbytes // _ALIGNED) * _ALIGNED
        if need > self.nbytes:
            raise CapacityError(
                f"a page has {nbytes} bytes, but options.mooncake.landing_bytes is {self.nbytes}"
            )
        with self._lock:
            while (at := self._found(need)) is None:
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    raise LateError("no room in the landing area")
        return Slot(self.memory, at, nbytes)

    def _found(self, need: int) -> int | None:
        for index, (at, size) in enumerate(self._free):
            if size >= need:
                self._free[index : index + 1] = [(at + need, size - need)] if size > need else []
                return at
        return None

    def give(self, slot: Slot) -> None:
        """Free the slot. Its view must not be used any more."""
        at, size = slot.at, -(-slot.nbytes // _ALIGNED) * _ALIGNED
        slot.view.release()
        with self._lock:
            index = bisect.bisect(self._free, (at, size))
            if index < len(self._free) and self._free[index][0] == at + size:
                size += self._free.pop(index)[1]
            if index and sum(self._free[index - 1]) == at:
                at, before = self._free.pop(index - 1)
                size += before
                index -= 1
            self._free.insert(index, (at, size))
            self._changed.notify_all()
