"""Whether an object with a peer has ended, what its calls raise then, and when its descriptors are closed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from kvplug.errors import ClosedError, KvplugError, PeerGoneError, TransportError
from kvplug.net.fork import close_after_fork


class Lifecycle:
    """Whether a pipe, for example, has ended, and why. The first reason is kept, but closing here replaces
    it.

    A forked child finds it closed.

    >>> pipe = Lifecycle("the pipe to pid 7")
    >>> pipe.lose_peer("it was killed"), pipe.lose_peer("it hung up")
    (True, False)
    >>> pipe.error()
    PeerGoneError('the pipe to pid 7: it was killed')
    """

    CLOSED_BY_PEER = "the peer closed it"
    """The reason of :meth:`lose_peer` where the peer has said so, and all that it sent was received."""

    def __init__(self, what: str) -> None:
        """``what`` names it in errors: "the pipe to pid 7"."""
        self._what = what
        self._lock = threading.Lock()
        self._error: type[KvplugError] = KvplugError
        self._reason = ""
        self._closed = ""
        close_after_fork(self)

    @property
    def closed(self) -> bool:
        """Whether it was closed here, or this is a forked child."""
        return bool(self._closed)

    @property
    def ended(self) -> bool:
        """Whether it ended in any way."""
        return bool(self._closed or self._reason)

    @property
    def peer_lost(self) -> bool:
        """Whether the peer ended it."""
        return self._error is PeerGoneError

    @property
    def broken(self) -> bool:
        """Whether the stream's position is lost: even messages that have arrived cannot be received."""
        return self._error is TransportError

    @property
    def state(self) -> str:
        """One of open, closed (here) and ended, for a ``repr``."""
        return "closed" if self.closed else "ended" if self.ended else "open"

    def close(self, reason: str) -> bool:
        """It was closed here; False if it already was."""
        with self._lock:
            if self._closed:
                return False
            self._closed = reason
            return True

    def lose_peer(self, reason: str) -> bool:
        """The peer is gone; False if it had ended before.

        That it has said so counts more than that its connection ended, which may be seen first.
        """
        if reason == self.CLOSED_BY_PEER and self.peer_lost:
            self._reason = reason
        return self._end(PeerGoneError, reason)

    def fail(self, reason: str) -> bool:
        """The stream cannot be trusted any more; False if it had ended before."""
        return self._end(TransportError, reason)

    def _after_fork_in_child(self) -> None:
        self._closed = self._closed or "belongs to the process that this one was forked from"

    def error(self) -> KvplugError:
        """A fresh exception that says how it ended."""
        if self._closed:
            return ClosedError(f"{self._what} {self._closed}")
        if self._reason:
            error = self._error(f"{self._what}: {self._reason}")
            if isinstance(error, PeerGoneError):
                error.closed = self._reason == self.CLOSED_BY_PEER
            return error
        return PeerGoneError(f"{self._what}: the connection ended")

    def _end(self, error: type[KvplugError], reason: str) -> bool:
        with self._lock:
            if self._reason:
                return False
            self._error, self._reason = error, reason
            return True


class DescriptorGuard:
    """Counts the threads that use descriptors, and closes them when the last has left after the end.

    A descriptor that is closed under a blocked call may be reused for another file, and the call continues
    with that file. So ending a pipe shuts its sockets down, which wakes every thread, and the last thread to
    leave closes them.

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
