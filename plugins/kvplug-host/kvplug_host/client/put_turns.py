"""How many requests of puts one end has under way at a store."""

from __future__ import annotations

import threading
from collections.abc import Callable


class PutTurns:
    """The turns of all puts of one end. Thread-safe."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._lock = threading.Lock()
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, again: Callable[[], None]) -> bool:
        """Return whether a request may be sent now. Else ``again`` is called when there may be a turn."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            self._waiting[again] = None
            return False

    def give_back(self, count: int) -> None:
        """So many requests have ended. The caller holds no lock of a put."""
        with self._lock:
            self._free += count
            waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()
