"""One message being sent, and the window of messages that the peer has not taken yet."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from kvplug.errors import ClosedError, TimeoutError
from kvplug.net.deadline import Deadline, Timeout

if TYPE_CHECKING:
    from kvplug.transport.pipe.pipe import DuplexPipe

logger = logging.getLogger(__name__)


_process = object()
"""Identifies this process. Each forked child replaces it."""


class Transfer:
    """One ``send_tensor`` under way. It always ends, in success or in an error.

    Thread-safe. The transport calls :meth:`finish` or :meth:`fail` exactly once; users wait. In a forked
    child, transfers of the parent that were under way have failed with ``ClosedError``, because the parent's
    threads that would have ended them do not exist there.

    >>> transfer = Transfer(4096)
    >>> transfer.finish()
    >>> transfer
    <Transfer of 4096 bytes, done>
    """

    # Most transfers of small messages end before any thread waits, so the first waiter creates the event.
    __slots__ = ("__weakref__", "_callbacks", "_done", "_error", "_event", "_lock", "_process", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        """Bytes of the message."""
        self._done = False
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # a signal handler may end the transfer whose lock its thread holds
        self._process = _process
        self._event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    def __repr__(self) -> str:
        state = "under way" if not self.done() else f"failed: {self._error}" if self._error else "done"
        return f"<Transfer of {self.nbytes} bytes, {state}>"

    def done(self) -> bool:
        """Whether the transfer has ended. From then on the caller may overwrite the tensor it sent."""
        self._look_for_fork()
        return self._done

    def error(self) -> BaseException | None:
        """Return the error that the transfer failed with; ``None`` while under way and after success."""
        self._look_for_fork()
        return self._error

    def wait(self, timeout: Timeout = None) -> None:
        """Return when the transfer has succeeded.

        Raises:
            TimeoutError: the transfer is still under way.
            KvplugError: the transfer failed with this error.
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
        """Call ``callback(self)`` when the transfer ends: now if it has ended, else in the thread that ends
        it."""
        self._look_for_fork()
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(self) -> None:
        """Record that the transfer succeeded. For transports."""
        self._end(None)

    def fail(self, error: BaseException) -> None:
        """Record that the transfer failed with ``error``. For transports."""
        self._end(error)

    def _look_for_fork(self) -> None:
        """End the transfer in a forked child, without calling its callbacks: both belong to the parent."""
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
            except Exception:  # the callback runs in a transport's thread, which must survive
                logger.exception("a callback of %r failed", self)


class SendWindow:
    """Counts the bytes that were sent but not yet taken, and makes senders wait while there are too many.

    An outbox has one window, and guards its own queue with the window's lock. The lock is re-entrant: a
    signal handler may abort the pipe while its own thread holds the lock.
    """

    SMALLEST_COST: ClassVar[int] = 256
    """The cost of an empty message, so that the number of messages in flight is bounded too."""

    def __init__(self, *, limit: int, peer: str, lifecycle: DuplexPipe.Lifecycle) -> None:
        """``limit`` is the option ``max_in_flight_bytes``."""
        self.limit = limit
        """The most bytes that may be in flight."""
        self.lock = threading.RLock()
        """Guards the window, and the transport's own queue beside it."""
        self.room = threading.Condition(self.lock)
        """Notified when there may be room, and at the end."""
        self.in_flight = 0
        """The sum of the costs of all messages that were sent but not yet taken."""
        self.ended = False
        """Whether sending has ended. Set by :meth:`end`."""
        self._peer = peer
        self._lifecycle = lifecycle

    @property
    def held(self) -> int:
        """Bytes that count against the limit."""
        return self.in_flight

    def cost(self, nbytes: int) -> int:
        """Return how much a message of ``nbytes`` bytes counts against the limit."""
        return max(self.SMALLEST_COST, nbytes)

    def wait_for_room(self, nbytes: int, deadline: Deadline) -> None:
        """Wait until a message of ``nbytes`` may be added. Call this with the lock held; it is released while
        waiting.

        A message larger than the limit may be added when nothing else is in flight.

        Raises:
            TimeoutError: there was no room in time.
            KvplugError: the pipe has ended; the error says how.
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
        """Count a message that was queued. Call this with the lock held."""
        self.in_flight += cost

    def settle(self, cost: int) -> None:
        """Stop counting a message that was taken or will not be sent. Call this with the lock held."""
        self.in_flight -= cost
        self.room.notify_all()

    def drain(self, deadline: Deadline) -> bool:
        """Refuse senders that wait for room, then wait until nothing is in flight.

        Call this after closing the pipe. Returns False at the deadline, or if sending has ended otherwise.
        """
        with self.lock:
            self.room.notify_all()
            while self.in_flight and not self.ended:
                if not self.room.wait(deadline.remaining()) and deadline.expired:
                    return False
            return not self.ended

    def end(self) -> None:
        """End sending and wake all waiting threads. Call this with the lock held."""
        self.ended = True
        self.room.notify_all()

    def _wait(self, cost: int, deadline: Deadline) -> bool:
        """Wait for a change. Return False if the deadline passed first."""
        return self.room.wait(deadline.remaining())


def _in_child() -> None:
    global _process
    _process = object()


os.register_at_fork(after_in_child=_in_child)
