"""A lock whose holder can let others go first."""

from __future__ import annotations

import threading
import time


class YieldingLock:
    """A reentrant lock. A thread that takes it many times calls :meth:`give_way` in between.

    Without that call others might never get it: a waiting thread also needs the interpreter's lock when it
    wakes up, and by then the thread that has released this lock has it again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[None] = []
        """An item for each thread that waits."""

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self._waiting.append(None)
            try:
                self._lock.acquire()
            finally:
                self._waiting.pop()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def give_way(self) -> None:
        """Without the lock: if a thread waits for it, let that thread wake up and take it."""
        if self._waiting:
            time.sleep(0)  # takes some 50 microseconds, in which the interpreter's lock is free
