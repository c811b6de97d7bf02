"""The listeners of a store: each gets a snapshot, then every event, in order and without a gap.

Events are queued under the store's lock and handed out afterwards, by whichever thread comes first: a
listener is never called under the lock."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence

from kvplug.transport import PageEvent

_log = logging.getLogger(__name__)

Listener = Callable[[PageEvent], None]


class _Subscription:
    __slots__ = ("is_over", "listener")

    def __init__(self, listener: Listener) -> None:
        self.listener = listener
        self.is_over = False


class Subscribers:
    """The listeners of one store."""

    def __init__(self) -> None:
        self._all: tuple[_Subscription, ...] = ()
        self._queue: deque[tuple[Sequence[_Subscription], Sequence[PageEvent]]] = deque()
        self._handing_out = threading.Lock()

    def add(self, listener: Listener, first: Sequence[PageEvent]) -> Callable[[], None]:
        """With the store's lock. ``first``: the snapshot. Returns what ends it; call :meth:`hand_out`."""
        subscription = _Subscription(listener)
        self._all = (*self._all, subscription)
        self._queue.append(((subscription,), first))

        def end() -> None:
            subscription.is_over = True
            self._all = tuple(each for each in self._all if each is not subscription)

        return end

    def queue(self, events: Sequence[PageEvent]) -> None:
        """With the store's lock: these happened."""
        if events and self._all:
            self._queue.append((self._all, events))

    def hand_out(self) -> None:
        """Without the store's lock: call the listeners, unless another thread does so already."""
        while self._queue and self._handing_out.acquire(blocking=False):
            try:
                while self._queue:
                    subscriptions, events = self._queue.popleft()
                    for event in events:
                        for each in subscriptions:
                            self._call(each, event)
            finally:
                self._handing_out.release()

    @staticmethod
    def _call(subscription: _Subscription, event: PageEvent) -> None:
        if subscription.is_over:
            return
        try:
            subscription.listener(event)
        except Exception:  # the others get the event all the same
            _log.exception("a listener of the store's events failed, and gets no more of them")
            subscription.is_over = True

    def end(self) -> None:
        """No listener is called any more."""
        for each in self._all:
            each.is_over = True
        self._all = ()
        self._queue.clear()
