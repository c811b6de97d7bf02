"""Limits warnings that could come with every request to one line per cause and minute."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

_PERIOD_S: Final = 60.0


class CountedWarnings:
    """Logs the first warning of a cause at once, then at most one line a minute with the total count.

    Thread-safe.
    """

    def __init__(self, log: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._causes: dict[str, tuple[float, int]] = {}
        """For each cause, when it may be logged again, and the count that is not logged yet."""

    def warn(self, count: int, cause: str) -> None:
        """Log a cause now or later. The line is the count and ``cause``: what failed, where, and why."""
        with self._lock:
            due_at, waiting = self._causes.get(cause, (self._clock(), 0))
            self._causes[cause] = due_at, waiting + count
        self.flush()

    def flush(self, *, at_once: bool = False) -> None:
        """Log the counts that are due, or all of them."""
        now, lines = self._clock(), []
        with self._lock:
            for cause, (due_at, waiting) in list(self._causes.items()):
                if waiting and (at_once or due_at <= now):
                    lines.append((waiting, cause))
                    self._causes[cause] = now + _PERIOD_S, 0
                elif due_at <= now:
                    del self._causes[cause]
        for waiting, cause in lines:
            self._log.warning("%d %s", waiting, cause)


def at_location(name: str, location: str) -> str:
    """The name of a store, and its location."""
    return f"{name!r} ({location})" if location else repr(name)
