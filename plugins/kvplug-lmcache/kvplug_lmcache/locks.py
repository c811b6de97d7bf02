"""Which pages LMCache has locked, and how often."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

_MANY: Final = 1000


class LockTable:
    """Counts the locks on keys. A lock that is not given back ends after a time, as the store's lease does.

    Thread-safe.
    """

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._locks: dict[bytes, tuple[int, float]] = {}
        self._purge_at = _MANY

    def __len__(self) -> int:
        """Keys that are locked."""
        with self._lock:
            self._purge()
            return len(self._locks)

    def hold(self, keys: Sequence[bytes]) -> None:
        """One more lock on each key."""
        with self._lock:
            now = self._clock()
            for key in keys:
                count, until = self._locks.get(key, (0, now))
                self._locks[key] = (count if until > now else 0) + 1, now + self._lease_s
            if len(self._locks) >= self._purge_at:
                self._purge()
                self._purge_at = max(_MANY, 2 * len(self._locks))

    def release(self, keys: Sequence[bytes]) -> list[bytes]:
        """One lock less on each key. Returns the keys that have none left."""
        last = []
        with self._lock:
            for key in keys:
                count, until = self._locks.pop(key, (0, 0.0))
                if count > 1:
                    self._locks[key] = count - 1, until
                elif count:
                    last.append(key)
        return last

    def is_locked(self, key: bytes) -> bool:
        """Whether the key has a lock whose time is not over."""
        with self._lock:
            return self._locks.get(key, (0, 0.0))[1] > self._clock()

    def _purge(self) -> None:
        now = self._clock()
        self._locks = {key: held for key, held in self._locks.items() if held[1] > now}
