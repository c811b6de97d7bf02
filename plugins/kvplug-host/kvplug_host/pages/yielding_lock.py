"""A lock whose holder can let waiting threads take it first."""

from __future__ import annotations

import threading
import time
from typing import Any

_RLock: Any = type(threading.RLock())


class YieldingLock(_RLock):  # type: ignore[misc]
    """A reentrant lock. A thread that takes it many times calls :meth:`give_way` in between.

    Without that call others might never get it: a waiting thread also needs the interpreter's lock when it
    wakes up, and by then the thread that has released this lock has it again.

    An exception of a signal's handler does not leave it taken. So ``__exit__`` is that of the built-in lock:
    a method in Python could be interrupted before its first line.
    """

    def __init__(self) -> None:
        self._waiting: list[None] = []
        """An item for each thread that waits."""

    def __enter__(self) -> None:
        try:
            if not self.acquire(blocking=False):
                try:
                    self._waiting.append(None)
                    self.acquire()
                finally:
                    self._waiting.pop()
        except BaseException:
            if self._is_owned():
                self.release()
            raise

    def give_way(self) -> None:
        """Without the lock: if a thread waits for it, let that thread wake up and take it."""
        if self._waiting:
            time.sleep(0)  # takes some 50 microseconds, in which the interpreter's lock is free
