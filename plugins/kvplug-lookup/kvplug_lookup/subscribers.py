"""Who wants to know what is stored and removed, and how they are told: in order, without a gap."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

from kvplug.transport import StoreEvent

_log = logging.getLogger(__name__)


class Subscribers:
    """Events are noted under the store's lock and delivered outside it.

    A call that changed the store returns only after its events were delivered, be it by another thread.
    """

    def __init__(self) -> None:
        self._all: list[Subscriber] = []

    def add(self, listener: Callable[[StoreEvent], None], snapshot: Iterable[StoreEvent]) -> Subscriber:
        """Under the store's lock. The caller delivers afterwards and releases ``turn``."""
        subscriber = Subscriber(listener, snapshot)
        subscriber.turn.acquire()
        self._all.append(subscriber)
        return subscriber

    def remove(self, subscriber: Subscriber) -> None:
        """Under the store's lock. Idempotent."""
        subscriber.ended = True
        if subscriber in self._all:
            self._all.remove(subscriber)

    def clear(self) -> None:
        """Under the store's lock."""
        for subscriber in list(self._all):
            self.remove(subscriber)

    def note(self, event: StoreEvent) -> None:
        """Under the store's lock."""
        for subscriber in self._all:
            subscriber.pending.append(event)

    def deliver(self) -> None:
        """Outside the store's lock: everything noted so far has reached every listener afterwards."""
        for subscriber in list(self._all):
            subscriber.deliver()


class Subscriber:
    """One listener and what it has not been told yet."""

    def __init__(self, listener: Callable[[StoreEvent], None], pending: Iterable[StoreEvent]) -> None:
        self._listener = listener
        self.pending: deque[StoreEvent] = deque(pending)
        self.turn = threading.RLock()
        """Held by the thread that calls the listener."""
        self.ended = False

    def deliver(self) -> None:
        # Also where nothing is pending: another thread may have our event in hand, and be just calling.
        with self.turn:
            while self.pending and not self.ended:
                event = self.pending.popleft()
                try:
                    self._listener(event)
                except Exception:
                    _log.exception("a listener of a lookup store failed on event %d", event.seq)
