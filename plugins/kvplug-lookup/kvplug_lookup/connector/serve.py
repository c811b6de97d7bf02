"""The producer's door: peers come for events or for entries, each in its own thread."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from kvplug import (
    ClosedError,
    KvplugError,
    LookupStore,
    PeerLink,
    PeerListener,
    StoreEvent,
    TimeoutError,
    event_to_plain,
)

_log = logging.getLogger(__name__)

_MAX_QUEUED_EVENTS = 100_000
"""A follower this far behind is dropped; it connects again and gets a snapshot."""


class _Publisher:
    """Sends one follower every event of the store, and answers its pings in line."""

    def __init__(self, link: PeerLink, store: LookupStore, settle: Callable[[], None]) -> None:
        self._link = link
        self._settle = settle
        self._queue: queue.Queue[dict[str, object] | None] = queue.Queue(_MAX_QUEUED_EVENTS)
        self._ended = threading.Event()
        self._sender = threading.Thread(target=self._send_all, name="kvplug-lookup-events", daemon=True)
        self._unsubscribe = store.subscribe(self._put_event)
        self._sender.start()

    def run(self) -> None:
        """Answer pings until the follower goes."""
        try:
            while not self._ended.is_set():
                message = self._link.channel.recv(timeout=None)
                self._settle()
                self._put({"pong": int(message["ping"])})
        except KvplugError as e:
            _log.debug("%s follows no more: %s", self._link.agreement.remote.engine_id, e)
        finally:
            self.end()

    def end(self) -> None:
        self._unsubscribe()
        self._ended.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the sender is blocked on the channel, which closes now
        self._link.close()

    def _put_event(self, event: StoreEvent) -> None:
        self._put(event_to_plain(event))

    def _put(self, message: dict[str, object]) -> None:
        try:
            self._queue.put_nowait(message)
        except queue.Full:
            self._ended.set()
            self._link.close()

    def _send_all(self) -> None:
        while (message := self._queue.get()) is not None and not self._ended.is_set():
            try:
                self._link.channel.send(message, timeout=None)
            except KvplugError:
                self._ended.set()
                return


class Service:
    """Accepts peers of one store until it is closed."""

    def __init__(
        self,
        listener: PeerListener,
        store: LookupStore,
        *,
        device: str,
        settle: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._store = store
        self._device = device
        self._settle = settle
        self._lock = threading.Lock()
        self._publishers: set[_Publisher] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="kvplug-lookup-serve", daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            publishers = list(self._publishers)
        self._listener.close()
        for publisher in publishers:
            publisher.end()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while True:
            try:
                link = self._listener.accept(timeout=None)
            except ClosedError:
                return
            except TimeoutError:
                continue
            threading.Thread(target=self._serve, args=(link,), name="kvplug-lookup-peer", daemon=True).start()

    def _serve(self, link: PeerLink) -> None:
        purpose = link.agreement.remote.purpose
        try:
            if purpose == "events":
                self._publish(link)
            elif purpose == "entries":
                signal = link.open_pipe("signal")
                data = link.open_pipe("data", device=self._device)
                self._store.attach(signal, data)
            else:
                _log.warning("a peer came for %r, which connector 'lookup' does not know", purpose)
        except KvplugError as e:
            if not self._closed:
                _log.warning("serving %s for %r failed: %s", link.agreement.remote.engine_id, purpose, e)
        finally:
            if purpose != "events":
                link.close()

    def _publish(self, link: PeerLink) -> None:
        publisher = _Publisher(link, self._store, self._settle)
        with self._lock:
            self._publishers.add(publisher)
            closed = self._closed
        if closed:
            publisher.end()
        try:
            publisher.run()
        finally:
            with self._lock:
                self._publishers.discard(publisher)
