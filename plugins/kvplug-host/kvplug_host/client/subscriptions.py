"""The listeners of this end, to the events of the store in the other process."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from kvplug.transport import PageEvent
from kvplug_host.client.requests import Requests
from kvplug_host.protocol import Op

Listener = Callable[[PageEvent], None]


class Subscriptions:
    """Each listener gets a snapshot, then every event, in the thread that receives from the store."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._listeners: dict[int, Listener] = {}

    def add(self, listener: Listener) -> Callable[[], None]:
        """Returns what ends it."""
        requests = self._requests
        number = requests.new_number()

        def answer(message: Any) -> None:
            event = PageEvent.from_plain(message.get("event"))
            current = self._listeners.get(number)
            if current is not None:
                current(event)

        self._listeners[number] = listener
        if not requests.listen(number, {"op": Op.SUBSCRIBE}, answer):
            listener(nothing_there())

        def end() -> None:
            if self._listeners.pop(number, None) is not None:
                requests.forget(number)
                requests.tell({"op": Op.UNSUBSCRIBE, "id": number})

        return end

    def lose(self) -> None:
        """The store is gone, and its pages with it."""
        for listener in list(self._listeners.values()):
            listener(nothing_there())

    def end(self) -> None:
        """No listener is called any more."""
        self._listeners.clear()


def nothing_there() -> PageEvent:
    """The event of a store that is gone."""
    return PageEvent(kind="snapshot", epoch=uuid.uuid4().hex, seq=0, count=0)
