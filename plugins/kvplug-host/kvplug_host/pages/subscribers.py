"""The listeners of a store: each gets a snapshot, then every event, in order and without a gap.

Events are queued under the store's lock and handed out afterwards, by the first thread that can: a
listener is never called under the lock."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvplug.transport import PageEvent
from kvplug_host.pages.snapshot import Snapshot

_log = logging.getLogger(__name__)

Listener = Callable[[PageEvent], None]


class Subscription:
    """A listener. Until its snapshot is complete, it collects the events that follow the snapshot's first
    copy."""

    __slots__ = ("early", "is_over", "listener")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.early: list[PageEvent] | None = []
        """Events that have come before the snapshot; ``None``: it has come."""
        self.is_over = False


class Subscribers:
    """The listeners of one store."""

    def __init__(self) -> None:
        self._all: dict[Subscription, None] = {}
        self._queue: deque[tuple[Sequence[Subscription], Sequence[PageEvent] | Snapshot]] = deque()
        self._handing_out = threading.Lock()

    def add(self, subscription: Subscription) -> None:
        """With the store's lock, before the first copy of the snapshot."""
        self._all[subscription] = None

    def begin(self, subscription: Subscription, snapshot: Snapshot) -> None:
        """With the store's lock, when all events until the end of the snapshot are queued: the listener gets
        the snapshot, and every event after it."""
        self._queue.append(((subscription,), snapshot))

    def end_one(self, subscription: Subscription) -> None:
        """With the store's lock: a listener is not called any more."""
        subscription.is_over = True
        self._all.pop(subscription, None)

    def queue(self, events: Sequence[PageEvent]) -> None:
        """With the store's lock: these happened."""
        if events and self._all:
            self._queue.append((tuple(self._all), events))

    def hand_out(self) -> None:
        """Without the store's lock: call the listeners, unless another thread does so already."""
        while self._queue and not self._handing_out.locked():
            with self._handing_out:
                while self._queue:
                    subscriptions, events = self._queue.popleft()
                    if isinstance(events, Snapshot):
                        (subscription,) = subscriptions
                        early, subscription.early = subscription.early, None
                        events = events.events(early or ())
                    for event in events:
                        for each in subscriptions:
                            self._call(each, event)

    @staticmethod
    def _call(subscription: Subscription, event: PageEvent) -> None:
        if subscription.is_over:
            return
        if subscription.early is not None:
            subscription.early.append(event)
            return
        try:
            subscription.listener(event)
        except Exception:  # the others get the event all the same
            _log.exception("a listener of the store's events failed, and gets no more of them")
            subscription.is_over = True

    def end(self) -> None:
        """No listener is called any more."""
        for each in tuple(self._all):
            self.end_one(each)
