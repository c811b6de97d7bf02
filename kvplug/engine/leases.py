"""How often each key is leased: a store's own leases are not counted, and end with the first release."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

_MANY: Final = 1000


class LeaseCounts:
    """Counts the leases on keys. A lease that is not given back ends after its time, as in the store.

    Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._leases: dict[bytes, tuple[int, float]] = {}
        """Of each key: how many, and until when."""
        self._purge_at = _MANY

    def __len__(self) -> int:
        """Keys that are leased."""
        with self._lock:
            self._purge()
            return len(self._leases)

    def hold(self, keys: Sequence[bytes], lease_s: float) -> None:
        """One more lease on each key. All leases on it last at least so long."""
        with self._lock:
            now = self._clock()
            for key in keys:
                count, until = self._leases.get(key, (0, now))
                self._leases[key] = (count if until > now else 0) + 1, max(until, now + lease_s)
            if len(self._leases) >= self._purge_at:
                self._purge()
                self._purge_at = max(_MANY, 2 * len(self._leases))

    def release(self, keys: Sequence[bytes]) -> list[bytes]:
        """One lease less on each key. Returns the keys that have none left."""
        last = []
        with self._lock:
            for key in keys:
                count, until = self._leases.pop(key, (0, 0.0))
                if count > 1:
                    self._leases[key] = count - 1, until
                elif count:
                    last.append(key)
        return last

    def is_leased(self, key: bytes) -> bool:
        """Whether the key has a lease whose time is not over."""
        with self._lock:
            return self._leases.get(key, (0, 0.0))[1] > self._clock()

    def _purge(self) -> None:
        now = self._clock()
        self._leases = {key: lease for key, lease in self._leases.items() if lease[1] > now}
