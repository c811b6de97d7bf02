"""Pauses calls of a store that does not answer, so that requests do not wait for it one by one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)

_PAUSE_S: Final = (1.0, 30.0)
"""The first pause and the longest one. Each pause is twice as long as the previous one."""


class Pause:
    """Decides whether to call the store now. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._num_unanswered = 0
        self._until = 0.0

    def allows(self) -> bool:
        """Whether a call may be made. After a pause, a single call tests whether the store answers again."""
        with self._lock:
            now = self._clock()
            if now < self._until:
                return False
            if self._num_unanswered:
                self._until = now + self._length()  # one call at a time
            return True

    def note(self, answered: bool) -> None:
        """Record the outcome of an allowed call."""
        with self._lock:
            if answered:
                if self._num_unanswered:
                    _log.info("the store answers again")
                self._num_unanswered, self._until = 0, 0.0
                return
            if not self._num_unanswered:
                _log.warning("the store does not answer: its pages are misses, and it is tried again later")
            self._num_unanswered = min(self._num_unanswered + 1, 16)
            self._until = self._clock() + self._length()

    def _length(self) -> float:
        least, most = _PAUSE_S
        return min(least * 2.0 ** max(0, self._num_unanswered - 1), most)
