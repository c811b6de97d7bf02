"""The messages that the peer has announced and this end has not yet taken."""

from __future__ import annotations

import threading
from collections import deque

from kvplug.transport import Deadline, Lifecycle, WireError
from kvplug_nixl.pipe.frames import MAX_MESSAGES, Inline, Offer


class AnnouncedMessages:
    """In the order in which they were announced. The pipe's reader adds them, a receiver takes them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._lock = threading.RLock()  # a signal's handler may abort the pipe while its thread holds it
        self._changed = threading.Condition(self._lock)
        self._messages: deque[Inline | Offer] = deque()
        self._no_more = False
        self._stopped = False

    def add(self, message: Inline | Offer) -> None:
        """Raises WireError: it is one too many."""
        with self._lock:
            if len(self._messages) >= MAX_MESSAGES:
                raise WireError(f"it announces more than {MAX_MESSAGES} messages that were not taken")
            self._messages.append(message)
            self._changed.notify_all()

    def expect_no_more(self) -> None:
        """The peer has ended. What has come inline can still be taken, up to the first that was offered."""
        with self._lock:
            self._no_more = True
            here: deque[Inline | Offer] = deque()
            for message in self._messages:
                if isinstance(message, Offer):
                    break
                here.append(message)
            self._messages = here
            self._changed.notify_all()

    @property
    def has_offers(self) -> bool:
        """Whether messages wait here that lie in the peer's memory."""
        with self._lock:
            return any(isinstance(message, Offer) for message in self._messages)

    def stop(self) -> None:
        """Nothing more is taken. Wakes the threads that wait; blocks nowhere."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """Raises KvplugError: the pipe has ended here, and how."""
        if self._stopped or self._lifecycle.broken:
            raise self._lifecycle.error()

    def check_offered(self) -> None:
        """Raises KvplugError: what the peer has offered cannot be read any more."""
        self.check()
        if self._no_more:
            raise self._lifecycle.error()

    def oldest(self, deadline: Deadline) -> Inline | Offer | None:
        """The oldest message, which stays. Waits for one; ``None`` at the deadline.

        Raises:
            KvplugError: none will come, and why.
        """
        with self._lock:
            while not self._messages:
                self.check()
                if self._no_more:
                    raise self._lifecycle.error()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    return None
            self.check()
            return self._messages[0]

    def take(self) -> None:
        """Remove the oldest. After the end it may be gone."""
        with self._lock:
            if self._messages:
                self._messages.popleft()

    def pause(self, seconds: float) -> None:
        """Wait for so long, or until something has changed."""
        with self._lock:
            self._changed.wait(seconds)
