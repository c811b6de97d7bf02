"""The listeners of this end, to the events of the store in the other process."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable

from kvplug.transport import PageEvent
from kvplug_host.client.requests import Requests
from kvplug_host.protocol import Subscribe, Unsubscribe

_log = logging.getLogger(__name__)

Listener = Callable[[PageEvent], None]


class Subscriptions:
    """Each listener gets a snapshot, then every event, in the thread that receives from the store. From a
    store that is gone it gets the snapshot of an empty store."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._requests = Requests()
        self._listeners: dict[object, Listener] = {}
        self._numbers: dict[object, int] = {}
        """The request of each listener, to the current store."""

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns what ends it."""
        key = object()
        with self._lock:
            self._listeners[key] = listener
            is_sent = self._subscribe(key)
        if not is_sent:
            self._call(key, _nothing_there())

        return lambda: self._end(key)

    def _end(self, key: object) -> None:
        with self._lock:
            number = self._numbers.pop(key, None)
            if self._listeners.pop(key, None) is not None and number is not None:
                self._requests.forget(number)
                self._requests.notify(Unsubscribe(id=number))

    def _subscribe(self, key: object) -> bool:
        requests = self._requests
        number = self._numbers[key] = requests.new_number()
        return requests.listen(Subscribe(id=number), lambda event: self._call(key, event))

    def _call(self, key: object, event: PageEvent) -> None:
        listener = self._listeners.get(key)
        if listener is None:
            return
        try:
            listener(event)
        except Exception:  # the link is used by others
            _log.exception("a listener of the store's events failed, and gets no more of them")
            self._end(key)

    def move_to(self, requests: Requests) -> None:
        """Subscribe at a store that is there now."""
        with self._lock:
            self._requests = requests
            for key in self._listeners:
                self._subscribe(key)

    def lose(self) -> None:
        """The store is gone, and its pages with it."""
        for key in list(self._listeners):
            self._call(key, _nothing_there())

    def end(self) -> None:
        """No listener is called any more."""
        self._listeners.clear()


def _nothing_there() -> PageEvent:
    return PageEvent(kind="snapshot", epoch=uuid.uuid4().hex, seq=0, count=0)
