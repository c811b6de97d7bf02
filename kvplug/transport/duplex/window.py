"""The window of a sender: how many bytes may be sent and not yet taken, and the wait for room."""

from __future__ import annotations

import threading
from typing import ClassVar

from kvplug.errors import TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.transport.duplex.lifecycle import Lifecycle


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
