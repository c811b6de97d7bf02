"""Closing descriptors only when no thread is inside a system call on them.

A descriptor closed under a blocked call may be given to another file, and the call goes on with that
one. So ending a pipe shuts its sockets down, which wakes everybody, and the last one out closes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Descriptors:
    """Counts who is inside. ``refusal`` makes the error for those who come too late."""

    def __init__(self, close: Callable[[], None], refusal: Callable[[], Exception]) -> None:
        self._close = close
        self._refusal = refusal
        self._lock = threading.Lock()
        self._inside = 0
        self._over = False
        self._closed = False

    @property
    def retired(self) -> bool:
        return self._over

    def enter(self) -> bool:
        """Whether the descriptors may be used; if so, ``leave`` afterwards."""
        with self._lock:
            if self._over:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        with self._lock:
            self._inside -= 1
        if self._over:
            self._maybe_close()

    def retire(self) -> None:
        """Nobody enters any more; close them when the last one has left."""
        with self._lock:
            self._over = True
        self._maybe_close()

    def disown(self) -> None:
        """In a forked child: close them now, whoever was inside in the parent. Takes no lock."""
        self._over = self._closed = True
        self._close()

    def __enter__(self) -> bool:
        """``enter`` for a ``with`` statement, which it makes raise when they may not be used."""
        if not self.enter():
            raise self._refusal()
        return True

    def __exit__(self, *_: object) -> None:
        self.leave()

    def _maybe_close(self) -> None:
        with self._lock:
            if not self._over or self._inside or self._closed:
                return
            self._closed = True
        self._close()
