"""The producer's door: peers come for events or for entries, each in its own thread."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable
from functools import partial

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug.engine import PeerLink, PeerListener
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    LookupStore,
    Pipe,
    Stored,
    StoreEvent,
    WireError,
    event_to_plain,
)

_log = logging.getLogger(__name__)

_MAX_LAG_BYTES = 64 << 20
"""A follower that has more than this to read, beyond the snapshot it began with, is dropped; when it
connects again it gets a snapshot."""
_EVENT_BYTES = 256
"""Of an event, besides its tokens and extra."""
_CLOSE_S = 2.0


class _Publisher:
    """Sends one follower every event of the store, and answers its pings in line."""

    def __init__(self, link: PeerLink, store: LookupStore, settle: Callable[[], None]) -> None:
        self._link = link
        self._settle = settle
        self._queue: queue.SimpleQueue[tuple[dict[str, object], int] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._lag_bytes = 0
        self._max_lag_bytes = math.inf
        self._ended = threading.Event()
        self._sender = BackgroundThread(self._send_all, name="kvplug-lookup-events", stop=self._stop)
        self._unsubscribe = store.subscribe(self._put_event)  # calls it with the snapshot, however large
        with self._lock:
            self._max_lag_bytes = self._lag_bytes + _MAX_LAG_BYTES
        self._sender.start()

    def run(self) -> None:
        """Answer pings until the follower goes."""
        try:
            while not self._ended.is_set():
                message = self._link.channel.recv(timeout=None)
                if not isinstance(message, dict) or type(message.get("ping")) is not int:
                    raise WireError("a follower sent something else than a ping")
                self._settle()
                self._put({"pong": message["ping"]}, 0)
        except KvplugError as e:
            _log.debug("%s follows no more: %s", self._link.agreement.remote.engine_id, e)
        finally:
            self.end()

    def end(self) -> None:
        self._unsubscribe()
        self._stop()

    def _stop(self) -> None:
        self._ended.set()
        self._queue.put(None)
        self._link.close()

    def _put_event(self, event: StoreEvent) -> None:
        size = len(event.packed_tokens) + len(event.extra) if isinstance(event, Stored) else 0
        self._put(event_to_plain(event), size)

    def _put(self, message: dict[str, object], size: int) -> None:
        size += _EVENT_BYTES
        with self._lock:
            self._lag_bytes += size
            too_far = self._lag_bytes > self._max_lag_bytes
        if not too_far:
            self._queue.put((message, size))
        elif not self._ended.is_set():
            _log.warning("%s does not read the events it asked for: dropped", self._link)
            self._ended.set()
            self._link.close()

    def _send_all(self) -> None:
        try:
            while (item := self._queue.get()) is not None and not self._ended.is_set():
                message, size = item
                self._link.channel.send(message, timeout=None)
                with self._lock:
                    self._lag_bytes -= size
        except KvplugError as e:
            _log.debug("no more events for %s: %s", self._link, e)
        finally:
            self._ended.set()
            self._link.close()  # so that the follower knows, and whoever waits for its pings


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
        self._served: dict[PeerLink, BackgroundThread] = {}
        """Links in use, and who serves them."""
        self._closed = False
        self._thread = BackgroundThread(self._run, name="kvplug-lookup-serve", stop=listener.close)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody. Pipes that are attached belong to the store."""
        with self._lock:
            self._closed = True
            served = list(self._served.items())
        self._listener.close()
        for link, _ in served:
            link.close()
        deadline = Deadline.after(_CLOSE_S)
        for thread in (self._thread, *(thread for _, thread in served)):
            thread.join(deadline.remaining())

    def _run(self) -> None:
        while True:
            try:
                link = self._listener.accept(timeout=None)
            except ClosedError:
                return
            except TimeoutError:
                continue
            thread = BackgroundThread(
                self._serve, args=(link,), name="kvplug-lookup-peer", stop=partial(self._drop, link)
            )
            with self._lock:
                closed = self._closed
                self._served[link] = thread
                try:
                    if not closed:
                        thread.start()
                except RuntimeError as e:  # no more threads
                    _log.warning("%s is not served: %s", link, e)
                    closed = True
                if closed:
                    del self._served[link]
            if closed:
                link.close()

    def _drop(self, link: PeerLink) -> None:
        """The program leaves."""
        self._closed = True
        link.close()

    def _serve(self, link: PeerLink) -> None:
        remote = link.agreement.remote
        try:
            if remote.purpose == "events":
                _Publisher(link, self._store, self._settle).run()
            elif remote.purpose == "entries":
                self._attach(link)
            else:
                _log.warning("a peer came for %r, which connector 'lookup' does not know", remote.purpose)
        except KvplugError as e:
            if not self._closed:
                _log.warning("serving %s for %r failed: %s", remote.engine_id, remote.purpose, e)
        except Exception:
            _log.exception("serving %s for %r failed", remote.engine_id, remote.purpose)
        finally:
            link.close()
            with self._lock:
                self._served.pop(link, None)

    def _attach(self, link: PeerLink) -> None:
        pipes = list[Pipe]()
        try:
            pipes.append(link.open_pipe("signal"))
            pipes.append(link.open_pipe("data", device=self._device))
            self._store.attach(*pipes)
        except BaseException:
            for pipe in pipes:
                pipe.abort()
            raise
