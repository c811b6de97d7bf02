"""What an end may have asked a store to receive, and not sent."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Reserved:
    """The bytes of all puts of one end. Thread-safe."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        """The most, or one page."""
        self._bytes = 0
        self._lock = threading.Lock()
        self._waiting: dict[Callable[[], None], None] = {}

    def take(self, nbytes: int, again: Callable[[], None]) -> bool:
        """Return whether so many bytes may be asked for now. Else ``again`` is called when there may be
        room."""
        with self._lock:
            if self._bytes and self._bytes + nbytes > self.most_bytes:
                self._waiting[again] = None
                return False
            self._bytes += nbytes
            return True

    def give_back(self, nbytes: int) -> None:
        """So many bytes were sent, or will not be. The caller holds no lock of a put."""
        with self._lock:
            self._bytes -= nbytes
            waiting, self._waiting = self._waiting, {}
        for again in waiting:
            again()
