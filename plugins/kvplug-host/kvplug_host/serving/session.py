"""One process that uses the store over a link."""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from kvplug import ClosedError, HandshakeError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    JobEngine,
    JobTask,
    MissReason,
    PageEvent,
    PageRequest,
    PageSeal,
    Pipe,
    Series,
    Store,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.outbox import Outbox
from kvplug_host.pages.index import Entry
from kvplug_host.pages.pages import Pages
from kvplug_host.protocol import Op, Pieces, Place
from kvplug_host.serving.arrivals import Arrival, Elsewhere, drop
from kvplug_host.serving.fetch import Fetch
from kvplug_host.serving.memory_door import MemoryDoor

_log = logging.getLogger(__name__)

_LEAST_S: Final = 1.0
"""How long a peer may take for pages that are on their way when its request has run out of time."""
_MOST_S: Final = 60.0
"""The longest time that pages stay in their slots for a peer that does not take them."""
_FOUND: Final = {"absent": 0, "sent": 1, "other size": 2}
_MAX_SUBSCRIPTIONS: Final = 1024


class Session:
    """Answers the requests of one peer until it is gone, in the thread that calls :meth:`run`."""

    def __init__(
        self,
        pages: Pages,
        link: Store.Link,
        door: MemoryDoor | None,
        timeout_s: float,
        stall_timeout_s: float,
    ) -> None:
        """
        Args:
            timeout_s: how long the peer may take for the first messages.
            stall_timeout_s: how long slots for pages of the peer are kept while it sends none.
        """
        self._pages = pages
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._link = link
        self._door = door
        self._peer = str(link.channel.peer)
        self._ticket = door.ticket() if door is not None else b""
        self._outbox = Outbox(link.channel, "kvplug-host")
        self._pipe: Pipe | None = None
        self._memory: Any = None
        self._sender = JobEngine("host-pages", 1, stop=link.close)
        self._receiver: BackgroundThread | None = None
        self._lock = threading.Lock()
        self._over = False
        self._end_of_peer = object()
        """The peer as a reader, and as one that expects readers. Outlives this session in the index."""
        self._reads: dict[int, tuple[list[Entry], JobEngine.Alarm]] = {}
        """Leased pages of each read, and what ends it at the end of its lease."""
        self._fetches: dict[int, Fetch] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._received_at = 0.0
        """When the latest page came; ``math.inf`` while one comes."""
        self._stall: JobEngine.Alarm | None = None
        """Set while pages are to come."""
        self._subscriptions: dict[int, Callable[[], None]] = {}
        self._handlers: dict[str, Callable[[Any], None]] = {
            Op.LOOKUP: self._lookup,
            Op.READ: self._read,
            Op.DONE: self._done,
            Op.SEGMENT: self._segment,
            Op.FETCH: self._fetch,
            Op.CANCEL: self._cancel,
            Op.PUT: self._put,
            Op.REMOVE: self._remove,
            Op.DECLARE: self._declare,
            Op.WITHDRAW: self._withdraw,
            Op.RELEASE: self._release,
            Op.TOUCH: self._touch,
            Op.EXPECT: self._expect,
            Op.WRONG: self._wrong,
            Op.KEYS: self._keys,
            Op.SUBSCRIBE: self._subscribe,
            Op.UNSUBSCRIBE: self._unsubscribe,
            Op.USAGE: self._usage,
        }

    def run(self) -> None:
        """Serve the peer. Returns when it is gone, or the link is closed here."""
        channel = self._link.channel
        try:
            self._begin()
            while True:
                message = channel.recv(timeout=None)
                handle = self._handlers.get(protocol.field(message, "op", str))
                if handle is None:
                    raise WireError(f"a message of a store: nothing is called {message['op']!r:.40}")
                handle(message)
        except (PeerGoneError, ClosedError):
            return
        except (WireError, TimeoutError) as e:
            _log.warning("the store is not served to %s any more: %s", self._peer, e)
        finally:
            self._end()

    def _begin(self) -> None:
        segments, channel = self._pages.segments, self._link.channel
        channel.send(
            {
                "store": protocol.STORE,
                "version": protocol.VERSION,
                "epoch": self._pages.index.epoch,
                "segment_bytes": segments.nbytes,
                "num_segments": segments.count,
                "memory": self._door.contact if self._door is not None else "",
                "ticket": self._ticket,
                "usage": protocol.usage_to_plain(self._pages.usage()),
            },
            timeout=self._timeout_s,
        )
        try:
            self._pipe = self._link.open_pipe(protocol.PIPE, timeout=self._timeout_s)
        except (HandshakeError, TransportError) as e:  # both ends know
            _log.info("%s has no pipe to the store: %s", self._peer, e)

    def fail(self, reason: str | None) -> None:
        """The peer breaks the rules, or does not take what it asked for: hang up. ``None``: it is gone."""
        if reason is not None and not self._over:
            _log.warning("the store is not served to %s any more: %s", self._peer, reason)
        self._link.close()

    def _end(self) -> None:
        with self._lock:
            self._over = True
        self._outbox.end()
        self._link.close()
        if self._pipe is not None:
            self._pipe.abort()
        for unsubscribe in list(self._subscriptions.values()):
            unsubscribe()
        for fetch in list(self._fetches.values()):
            fetch.cancel()
        self._sender.give_up()
        for arrival in list(self._arrivals.values()):
            arrival.put.end(MissReason.CANCELLED)
        if self._stall is not None:
            self._stall.cancel()
        if self._door is not None:
            self._door.forget(self._ticket)
        reads = {request: self._reads.pop(request, None) for request in list(self._reads)}
        for read in reads.values():
            if read is not None:
                read[1].cancel()
        if not self._pages.is_closed:
            self._pages.forget_holders([self, *((self, request) for request in reads)])

    def _answer(self, message: Any, **answer: Any) -> None:
        self._send({"id": protocol.number(message, "id"), **answer})

    def _send(self, message: dict[str, Any]) -> None:
        if not self._outbox.send(message):
            if self._outbox.is_full:
                self.fail("it does not read its answers and events")
            else:
                self._link.close()  # it is gone

    # -- questions, and what is told -----------------------------------------------------------

    def _lookup(self, message: Any) -> None:
        keys, lease_s = protocol.keys_of(message), protocol.seconds(message, "lease_s")
        with self._pages.changing() as index:
            found = index.lookup(keys, self, lease_s)
        usage = protocol.usage_to_plain(self._pages.usage())
        self._answer(message, results=protocol.presences_to_bytes(found), usage=usage)

    def _usage(self, message: Any) -> None:
        self._answer(message, usage=protocol.usage_to_plain(self._pages.usage()))

    def _keys(self, message: Any) -> None:
        series = protocol.field(message, "series", bytes)
        with self._pages.changing() as index:
            keys = index.keys(series)
        for at in range(0, max(1, len(keys)), protocol.MAX_LISTED):
            part = keys[at : at + protocol.MAX_LISTED]
            self._answer(message, keys=b"".join(part), more=at + protocol.MAX_LISTED < len(keys))

    def _remove(self, message: Any) -> None:
        self._pages.remove(protocol.keys_of(message))
        self._answer(message, usage=protocol.usage_to_plain(self._pages.usage()))

    def _declare(self, message: Any) -> None:
        for_s = protocol.field(message, "for_s", float)
        if not for_s >= 0:
            raise WireError(f"a message of a store: pages are declared for {for_s!r} s")
        series = protocol.field(message, "series", bytes)
        if len(series) != 16:
            raise WireError("a message of a store: a series has 16 bytes")
        keys = protocol.keys_of(message)
        self._pages.declare(self, series, keys, None if for_s == math.inf else for_s)

    def _withdraw(self, message: Any) -> None:
        with self._pages.changing() as index:
            index.withdraw(protocol.keys_of(message), self)

    def _release(self, message: Any) -> None:
        with self._pages.changing() as index:
            index.release(protocol.keys_of(message), self)

    def _touch(self, message: Any) -> None:
        with self._pages.changing() as index:
            index.use(protocol.keys_of(message))

    def _expect(self, message: Any) -> None:
        with self._pages.changing() as index:
            index.expect_reader(protocol.keys_of(message), self._end_of_peer)

    def _subscribe(self, message: Any) -> None:
        number = protocol.number(message, "id")
        if number in self._subscriptions or len(self._subscriptions) >= _MAX_SUBSCRIPTIONS:
            raise WireError("a message of a store: too many subscriptions")

        def listener(event: PageEvent) -> None:
            self._send({"id": number, "event": event.to_plain()})

        self._subscriptions[number] = self._pages.subscribe(listener)

    def _unsubscribe(self, message: Any) -> None:
        unsubscribe = self._subscriptions.pop(protocol.number(message, "id"), None)
        if unsubscribe is not None:
            unsubscribe()

    # -- pages that the peer reads itself ------------------------------------------------------

    def _read(self, message: Any) -> None:
        request, keys = protocol.number(message, "id"), protocol.keys_of(message)
        lease_s = min(protocol.seconds(message, "lease_s"), _MOST_S)
        if request in self._reads or self._door is None:
            raise WireError("a message of a store: a read that is not possible")
        with self._pages.changing() as index:
            entries = [index.pages.get(key) for key in keys]
            there = [entry for entry in entries if entry is not None]
            if lease_s > 0:
                index.lease(there, (self, request), lease_s)
                end = functools.partial(self._end_read, request, is_read=False)
                self._reads[request] = there, self._at(time.monotonic() + lease_s, end)
            places = [
                protocol.ABSENT if entry is None else protocol.place_to_bytes(_place(entry))
                for entry in entries
            ]
        self._answer(message, places=b"".join(places))

    def _at(self, when: float, call: Callable[[], None]) -> JobEngine.Alarm:
        try:
            return self._pages.jobs.at(when, call)
        except RuntimeError as e:
            raise PeerGoneError(f"there is no thread that ends what the peer holds: {e}") from e

    def _done(self, message: Any) -> None:
        is_read = protocol.field(message, "read", bool)
        self._end_read(protocol.number(message, "id"), is_read=is_read)

    def _end_read(self, request: int, *, is_read: bool) -> None:
        """Nothing is left of a read. ``is_read``: the peer has got its pages."""
        entries, alarm = self._reads.pop(request, (None, None))
        if entries is None or alarm is None:
            return
        alarm.cancel()
        with self._pages.changing() as index:
            index.forget_holder((self, request))
            if is_read:
                index.read([entry.key for entry in entries], self._end_of_peer)

    def _segment(self, message: Any) -> None:
        if self._door is None:
            raise WireError("a message of a store: the memory is not handed out")
        number = protocol.number(message, "number", most=self._pages.segments.count)
        try:
            self._door.hand_over(self._ticket, number)
        except WireError:
            raise
        except KvplugError as e:
            self.fail(f"it did not take shared memory: {e}")

    def _wrong(self, message: Any) -> None:
        """The peer has found wrong bytes. It might as well have removed the page."""
        generation = protocol.number(message, "generation")
        with self._pages.changing() as index:
            entries = [index.pages.get(key) for key in protocol.keys_of(message)]
        for entry in entries:
            if entry is not None and generation in (0, entry.generation):
                self._pages.discard(entry, MissReason.CORRUPT)

    # -- pages over the pipe -------------------------------------------------------------------

    def _views(self) -> Any:
        """All slots, as a tensor of bytes."""
        if self._memory is None:
            import torch

            self._memory = torch.frombuffer(self._pages.segments.view, dtype=torch.uint8)
        return self._memory

    def _fetch(self, message: Any) -> None:
        request, keys = protocol.number(message, "id"), protocol.keys_of(message)
        payload_bytes = protocol.number(message, "payload_bytes", most=protocol.MAX_PAGE)
        pieces = Pieces.of(message, len(keys), payload_bytes)
        if self._pipe is None or request in self._fetches:
            raise WireError("a message of a store: a fetch that is not possible")
        deadline = Deadline.after(min(max(protocol.seconds(message, "timeout"), _LEAST_S), _MOST_S))
        entries = self._pages.pin(keys)
        found, headers, view = bytearray(), [], self._pages.segments.view
        sent: list[Entry | None] = []
        for entry in entries:
            if entry is None:
                found.append(_FOUND["absent"])
                sent.append(None)
                continue
            begin = entry.offset + entry.payload_bytes
            headers.append(bytes(view[begin : begin + entry.header_bytes]))
            fits = entry.payload_bytes == payload_bytes
            found.append(_FOUND["sent" if fits else "other size"])
            sent.append(entry if fits else None)

        def settled(fetch: Fetch) -> None:
            self._fetches.pop(request, None)
            self._pages.unpin(entries, self._end_of_peer, were_used=fetch.is_sent)

        fetch = Fetch(
            request,
            sent,
            pieces,
            pipe=self._pipe,
            memory=self._views(),
            deadline=deadline,
            settled=settled,
            failed=self.fail,
        )
        self._fetches[request] = fetch
        self._answer(message, found=bytes(found), headers=headers)
        if not self._sender.add(fetch):
            settled(fetch)
            self.fail("there is no thread that sends pages")

    def _cancel(self, message: Any) -> None:
        request = protocol.number(message, "id")
        fetch, arrival = self._fetches.get(request), self._arrivals.get(request)
        if fetch is not None:
            fetch.cancel()
        if arrival is not None:
            arrival.put.end(MissReason.CANCELLED)

    def _put(self, message: Any) -> None:
        request, keys = protocol.number(message, "id"), protocol.keys_of(message)
        identities = protocol.identities_of(message, len(keys))
        form = protocol.format_of(message)
        shard = protocol.field(message, "shard", bytes)
        if len(shard) > protocol.MAX_SHARD:
            raise WireError("a message of a store: a shard of that length")
        if self._pipe is None or request in self._arrivals or not keys:
            raise WireError("a message of a store: a put that is not possible")
        seal = PageSeal(checksums=protocol.field(message, "checksums", bool))
        try:
            pages = PageRequest(
                series=Series(form, shard, seal.id),
                keys=keys,
                identities=identities,
                memory=Elsewhere(len(keys)),
            )
        except ValueError as e:
            raise WireError(f"a message of a store: {e}") from e
        deadline = Deadline.after(min(protocol.seconds(message, "timeout"), _MOST_S))

        def done(results: list[Any]) -> None:
            self._arrivals.pop(request, None)
            usage = protocol.usage_to_plain(self._pages.usage()) if not self._pages.is_closed else None
            self._send({"id": request, "results": protocol.results_to_bytes(results), "usage": usage})

        self._listen_to_pipe()
        arrival = Arrival(self._pages, seal, pages, deadline, done)
        reserved_bytes = sum(each.bytes_to_come for each in list(self._arrivals.values()))
        self._arrivals[request] = arrival
        try:
            codes = arrival.begin(reserved_bytes)
        except JobTask.OverError:
            return  # its results have been sent
        if self._stall is None:
            self._end_stalled()
        self._answer(message, wanted=bytes(codes))
        arrival.resolved(0)

    def _end_stalled(self) -> None:
        """End the puts of which nothing comes, and look again later."""
        self._stall, now = None, time.monotonic()
        for arrival in list(self._arrivals.values()):
            if now - max(arrival.begun_at, self._received_at) >= self._stall_timeout_s:
                arrival.put.end(MissReason.TIMEOUT)
        if self._arrivals and not self._over:
            self._stall = self._at(now + self._stall_timeout_s / 4, self._end_stalled)

    def _listen_to_pipe(self) -> None:
        if self._receiver is None:
            self._receiver = BackgroundThread(
                self._receive_all, name="kvplug-host-arrivals", stop=self._link.close
            )
            try:
                self._receiver.start()
            except RuntimeError as e:
                raise PeerGoneError(f"there is no thread that receives pages: {e}") from e

    def _receive_all(self) -> None:
        pipe = self._pipe
        assert pipe is not None
        try:
            while True:
                tag = pipe.recv_tensor(timeout=None)
                request, first, rows, row_bytes = protocol.read_tag(tag)
                if not rows:
                    raise WireError("it sends a piece without pages")
                arrival = self._arrivals.get(request)
                self._received_at = math.inf
                if arrival is None or not arrival.receive(pipe, self._views(), first, rows, row_bytes):
                    drop(pipe, rows, row_bytes, _MOST_S)
                self._received_at = time.monotonic()
        except (PeerGoneError, ClosedError) as e:
            if not self._over:
                _log.debug("the pipe to %s has ended: %s", self._peer, e)
                self._link.close()
        except KvplugError as e:
            self.fail(f"its pages did not come: {e}")
        except Exception as e:
            _log.exception("receiving pages failed: a fault of kvplug")
            self.fail(str(e))


def _place(entry: Entry) -> Place:
    return Place(
        offset=entry.offset,
        generation=entry.generation,
        slot_bytes=entry.chunk.size.slot_bytes,
        payload_bytes=entry.payload_bytes,
        header_bytes=entry.header_bytes,
    )
