"""One message under way."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable

from kvplug.errors import ClosedError, TimeoutError
from kvplug.net.deadline import Deadline, Timeout

logger = logging.getLogger(__name__)


_process = object()
"""Another one in each forked child."""


class Transfer:
    """One ``send_tensor`` under way. It always ends, in success or in an error.

    Thread-safe. The transport calls :meth:`finish` or :meth:`fail` exactly once; users wait. In a forked
    child the parent's transfers have ended, those under way with ``ClosedError``: the thread of the parent
    that was about to end one does not exist there.

    >>> transfer = Transfer(4096)
    >>> transfer.finish()
    >>> transfer
    <Transfer of 4096 bytes, done>
    """

    # Most transfers of small messages have ended before any thread waits, so the first waiter makes the
    # event.
    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_event", "_lock", "_process", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes of the message."""
        self._done = False
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # a signal's handler may end the transfer whose lock its thread holds
        self._process = _process
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    def __repr__(self) -> str:
        state = "under way" if not self.done() else f"failed: {self._error}" if self._error else "done"
        return f"<Transfer of {self.nbytes} bytes, {state}>"

    def done(self) -> bool:
        """Whether it has ended. From then on the caller may overwrite the tensor it sent."""
        self._look_for_fork()
        return self._done

    def error(self) -> BaseException | None:
        """What it failed with; ``None`` while under way and after success."""
        self._look_for_fork()
        return self._error

    def wait(self, timeout: Timeout = None) -> None:
        """Return when the transfer has succeeded.

        Raises:
            TimeoutError: it is still under way.
            KvplugError: what it failed with.
        """
        deadline = Deadline.after(timeout)
        self._look_for_fork()
        with self._lock:
            if not self._done and self._event is None:
                self._event = threading.Event()
        if not self._done and self._event is not None and not self._event.wait(deadline.remaining()):
            raise TimeoutError(f"a transfer of {self.nbytes} bytes is still under way after {timeout} s")
        if self._error is not None:
            raise self._error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Call ``callback(self)`` once it has ended: at once if it has, else in the thread that ends it."""
        self._look_for_fork()
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self) -> None:
        """For transports: it succeeded."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """For transports: it failed, and why."""
        self._end(error)

    def _look_for_fork(self) -> None:
        """In a forked child: it is the parent's, and so are its callbacks, which are not called here."""
        if self._process is not _process:
            self._lock = threading.RLock()
            self._callbacks = []
            if not self._done:
                self._error = ClosedError("the transfer belongs to the process that this one was forked from")
                self._done = True
            self._process = _process

    def _end(self, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._error = error
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            if self._event is not None:
                self._event.set()
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # it runs in a transport's thread, which others depend on
                logger.exception("a callback of %r failed", self)


def _in_child() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_in_child)
