"""Closing descriptors only when no thread is inside a system call on them.

A descriptor that is closed under a blocked call may be reused for another file, and the call continues with
that file. So ending a pipe shuts its sockets down, which wakes every thread, and the last thread to leave
closes them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kvplug.net.fork import close_after_fork


class DescriptorGuard:
    """Counts the threads that use descriptors, and closes them when the last has left after the end.

    ``with guard:`` around a call that uses them; it raises what ``refusal`` makes once they are retired. In a
    forked child they are closed at once.
    """

    def __init__(self, close: Callable[[], None], refusal: Callable[[], Exception]) -> None:
        """``close`` must be idempotent: a forked child calls it also for what its parent had closed. A number
        that is closed twice may be another file's by then.
        """
        self._close = close
        self._refusal = refusal
        self._lock = threading.Lock()
        self._inside = 0
        self._over = False
        self._closed = False
        close_after_fork(self)

    @property
    def retired(self) -> bool:
        """Whether no thread enters any more."""
        return self._over

    def enter(self) -> bool:
        """Whether the descriptors may be used; if so, call :meth:`leave` afterwards."""
        with self._lock:
            if self._over:
                return False
            self._inside += 1
            return True

    def leave(self) -> None:
        """The thread uses them no more."""
        with self._lock:
            self._inside -= 1
        if self._over:
            self._maybe_close()

    def retire(self) -> None:
        """No thread enters any more; close them when the last one has left. Idempotent."""
        with self._lock:
            self._over = True
        self._maybe_close()

    def _after_fork_in_child(self) -> None:
        """Close them now, even if threads of the parent were inside."""
        self._over = self._closed = True
        self._close()

    def __enter__(self) -> None:
        if not self.enter():
            raise self._refusal()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def _maybe_close(self) -> None:
        with self._lock:
            if not self._over or self._inside or self._closed:
                return
            self._closed = True
        self._close()
