"""The speed of page transfers, in the form of SGLang's own storage metrics."""

from __future__ import annotations

import threading


class Speeds:
    """Pages and gigabytes per second of each batch since the last :meth:`take`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found = self._empty()

    @staticmethod
    def _empty() -> dict[str, list[float]]:
        return {"prefetch_pgs": [], "prefetch_bandwidth": [], "backup_pgs": [], "backup_bandwidth": []}

    def note(self, op: str, num_pages: int, nbytes: int, seconds: float) -> None:
        """Record a transferred batch: ``op`` is ``get`` or ``put``."""
        kind = "prefetch" if op == "get" else "backup"
        with self._lock:
            if len(self._found[f"{kind}_pgs"]) < 10_000:  # SGLang reads them about every second
                self._found[f"{kind}_pgs"].append(num_pages)
                self._found[f"{kind}_bandwidth"].append(nbytes / 1e9 / max(seconds, 1e-9))

    def take(self) -> dict[str, list[float]]:
        """Return and reset the lists for SGLang's ``StorageMetrics``."""
        with self._lock:
            found, self._found = self._found, self._empty()
            return found
