"""What was sent: one message under way, and the window of messages that are not taken yet."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from kvplug.errors import ClosedError, TimeoutError
from kvplug.net.deadline import Deadline, Timeout

if TYPE_CHECKING:
    from kvplug.transport.pipe.pipe import Lifecycle

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


class SendWindow:
    """Counts what was sent and is not yet taken, in bytes, and makes senders wait while that is too much.

    An outbox has one, and uses its lock for what it queues as well. The lock is re-entrant: a signal's
    handler may abort the pipe while its own thread is in here.
    """

    SMALLEST_COST: ClassVar[int] = 256
    """The cost of an empty message, so that the number of messages in flight is bounded too."""

    def __init__(self, *, limit: int, peer: str, lifecycle: Lifecycle) -> None:
        """``limit`` is the option ``max_in_flight_bytes``."""
        self.limit = limit
        """Bytes that may be unsent."""
        self.lock = threading.RLock()
        """Guards the window, and the transport's own queue beside it."""
        self.room = threading.Condition(self.lock)
        """Notified when there may be room, and at the end."""
        self.in_flight = 0
        """Bytes that were sent and not yet taken, each message at its cost."""
        self.ended = False
        """Nothing is sent any more. Set by :meth:`end`."""
        self._peer = peer
        self._lifecycle = lifecycle

    @property
    def held(self) -> int:
        """Bytes that count against the limit."""
        return self.in_flight

    def cost(self, nbytes: int) -> int:
        """The cost of a message of ``nbytes`` bytes."""
        return max(self.SMALLEST_COST, nbytes)

    def wait_for_room(self, nbytes: int, deadline: Deadline) -> None:
        """Return when a message of ``nbytes`` may be added. Call it with the lock, which is released
        meanwhile.

        One message larger than the limit passes alone.

        Raises:
            TimeoutError: there was no room in time.
            KvplugError: the pipe has ended, and how.
        """
        cost = self.cost(nbytes)
        while True:
            if self._lifecycle.ended or self.ended:
                raise self._lifecycle.error()
            held = self.held
            if not held or held + cost <= self.limit:
                return
            if not self._wait(cost, deadline) and deadline.expired:
                raise TimeoutError(
                    f"{self._peer} has not taken the {held} bytes that are queued for it;"
                    f" there was no room for {nbytes} more (max_in_flight_bytes is"
                    f" {self.limit}), and nothing was queued"
                )

    def add(self, cost: int) -> None:
        """A message was queued. With the lock."""
        self.in_flight += cost

    def settle(self, cost: int) -> None:
        """A message was taken, or is not sent after all. With the lock."""
        self.in_flight -= cost
        self.room.notify_all()

    def drain(self, deadline: Deadline) -> bool:
        """Refuse senders that wait for room, then wait until nothing is in flight.

        The pipe was closed before. Returns False at the deadline, and when sending has ended otherwise.
        """
        with self.lock:
            self.room.notify_all()
            while self.in_flight and not self.ended:
                if not self.room.wait(deadline.remaining()) and deadline.expired:
                    return False
            return not self.ended

    def end(self) -> None:
        """Nothing is sent any more; threads that wait are woken. With the lock."""
        self.ended = True
        self.room.notify_all()

    def _wait(self, cost: int, deadline: Deadline) -> bool:
        """Whether something changed before the deadline."""
        return self.room.wait(deadline.remaining())


def _in_child() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_in_child)
