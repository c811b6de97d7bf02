"""One process that uses the store over a link."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from kvplug import ClosedError, HandshakeError, PeerGoneError, TimeoutError, TransportError
from kvplug.engine import BlockViews
from kvplug.net.wire import to_plain
from kvplug.transport import (
    BackgroundThread,
    Deadline,
    JobEngine,
    MissReason,
    Outbox,
    PageEvent,
    PageRequest,
    PageRows,
    PageSeal,
    Pipe,
    Series,
    Store,
    Usage,
    WireError,
)
from kvplug_host import protocol
from kvplug_host.jobs import ranges_of
from kvplug_host.link_end import failing
from kvplug_host.pages.index import Entry
from kvplug_host.pages.pages import Pages
from kvplug_host.protocol import Place
from kvplug_host.serving.arrivals import Arrival, PipedPages
from kvplug_host.serving.fetch import Fetch
from kvplug_host.serving.memory_door import MemoryDoor

_log = logging.getLogger(__name__)

_LEAST_S: Final = 1.0
"""How long a peer may take for pages that are on their way when its request has run out of time."""
_MOST_S: Final = 60.0
"""The longest time that pages stay in their slots for a peer that does not take them."""
_MAX_DROPPED: Final = 1 << 30
"""Bytes of one message of a put that has ended: it is received, and dropped."""
_MAX_VIEWS: Final = 256
"""Views of the memory that are kept for the next fetch."""
_MAX_SUBSCRIPTIONS: Final = 1024
_MAX_ARRIVALS: Final = 2 * protocol.MAX_PUTS
"""Twice as many as the peer may have under way: one that it has given up may end a moment later."""


class Session:
    """Answers the requests of one peer until it is gone, in the thread that calls :meth:`run`."""

    def __init__(
        self,
        pages: Pages,
        link: Store.Link,
        door: MemoryDoor | None,
        context: Store.Context,
    ) -> None:
        """``context``: its ``timeout_s`` is how long the peer may take for the first messages."""
        self._pages = pages
        self._timeout_s, self._on_served = context.timeout_s, context.on_served
        self._link = link
        self._door = door
        self._peer = str(link.channel.peer)
        self._ticket = door.ticket() if door is not None else b""
        self._outbox = Outbox(link.channel, "kvplug-host-send")
        self._pipe: Pipe | None = None
        self._memory = pages.segments.view
        self._views = functools.lru_cache(maxsize=_MAX_VIEWS)(self._views_of)
        self._sender = JobEngine("host-pages", 1, stop=link.close)
        self._receiver: BackgroundThread | None = None
        self._lent: memoryview | None = None
        """Memory of the peer."""
        self._lend_id = 0
        """The number of the request that is answered when it was read."""
        self._lock = threading.Lock()
        self._over = False
        self._end_of_peer = object()
        """The peer as a reader, and as one that expects readers. Outlives this session in the index."""
        self._reads: dict[int, tuple[list[Entry], JobEngine.Alarm, Callable[[int], object]]] = {}
        """Leased pages of each read, what ends it at the end of its lease, and what to call at its end."""
        self._fetches: dict[int, Fetch] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._received = memoryview(b"")
        """Memory for the pages of one message."""
        self._subscriptions: dict[int, Callable[[], None]] = {}

    def run(self) -> None:
        """Serve the peer. Returns when it is gone, or the link is closed here."""
        channel = self._link.channel
        try:
            self._begin()
            while True:
                request = protocol.request_in(channel.recv(timeout=None), _KINDS)
                _HANDLERS[type(request)](self, request)
        except (PeerGoneError, ClosedError):
            return
        except (WireError, TimeoutError) as e:
            _log.warning("the store is not served to %s any more: %s", self._peer, e)
        finally:
            self._end()

    def _begin(self) -> None:
        segments, channel = self._pages.segments, self._link.channel
        hello = protocol.Hello(
            epoch=self._pages.index.epoch,
            memory_bytes=segments.total_bytes,
            memory=self._door.contact if self._door is not None else "",
            ticket=self._ticket,
            usage=self._pages.usage(),
        )
        channel.send(to_plain(hello), timeout=self._timeout_s)
        try:
            self._pipe = self._link.open_pipe(protocol.PIPE, timeout=self._timeout_s)
            self._pipe.limit_messages(_MAX_DROPPED)
        except (HandshakeError, TransportError) as e:  # both ends have the reason
            _log.info("%s has no pipe to the store: %s", self._peer, e)

    def fail(self, reason: str | None) -> None:
        """Close the link, since the peer broke the protocol, or does not receive what it requested.

        ``reason``: ``None`` if the peer is gone.
        """
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
        self._views.cache_clear()
        for arrival in list(self._arrivals.values()):
            arrival.end(MissReason.CANCELLED)
        if self._door is not None:
            self._door.forget(self._ticket)
        reads = {request: self._reads.pop(request, None) for request in list(self._reads)}
        for read in reads.values():
            if read is not None:
                read[1].cancel()
        if not self._pages.is_closed:
            self._pages.forget_holders([self, *((self, request) for request in reads)])

    def _answer(self, answer: protocol.Answer) -> None:
        self._send(to_plain(answer))

    def _usage(self) -> Usage | None:
        return None if self._pages.is_closed else self._pages.usage()

    def _send(self, message: dict[str, Any]) -> None:
        if not self._outbox.send(message):
            if self._outbox.is_full:
                self.fail("it does not read its answers and events")
            else:
                self._link.close()  # it is gone

    # -- questions, and notes ------------------------------------------------------------------

    def _lookup(self, request: protocol.Lookup) -> None:
        found = self._pages.lookup(request.each, self, request.lease_s)
        codes = protocol.codes_of(protocol.PRESENCES, found)
        self._answer(protocol.Results(id=request.id, codes=codes, usage=self._usage()))

    def _list(self, request: protocol.List) -> None:
        keys = self._pages.keys(request.series)
        for at in range(0, max(1, len(keys)), protocol.MAX_LISTED):
            end = at + protocol.MAX_LISTED
            part = b"".join(keys[at:end])
            self._answer(protocol.Listed(id=request.id, keys=part, is_last=end >= len(keys)))

    def _remove(self, request: protocol.Remove) -> None:
        self._pages.remove(request.each)
        self._answer(protocol.Answer(id=request.id, usage=self._usage()))

    def _declare(self, request: protocol.Declare) -> None:
        self._pages.declare(self, request.series, request.each, request.for_s)

    def _withdraw(self, request: protocol.Withdraw) -> None:
        self._pages.withdraw(request.each, self)

    def _release(self, request: protocol.Release) -> None:
        self._pages.release(request.each, self)

    def _touch(self, request: protocol.Touch) -> None:
        self._pages.use(request.each)

    def _expect(self, request: protocol.Expect) -> None:
        self._pages.expect_reader(request.each, self._end_of_peer)

    def _subscribe(self, request: protocol.Subscribe) -> None:
        number = request.id
        if number in self._subscriptions or len(self._subscriptions) >= _MAX_SUBSCRIPTIONS:
            raise WireError("a message to a store: too many subscriptions")

        def listener(event: PageEvent) -> None:
            self._send({"id": number, **event.to_plain()})

        self._subscriptions[number] = self._pages.subscribe(listener)

    def _unsubscribe(self, request: protocol.Unsubscribe) -> None:
        unsubscribe = self._subscriptions.pop(request.id, None)
        if unsubscribe is not None:
            unsubscribe()

    # -- pages that the peer reads itself ------------------------------------------------------

    def _read(self, request: protocol.Read) -> None:
        number, lease_s = request.id, min(request.lease_s, _MOST_S)
        if number in self._reads or self._door is None:
            raise WireError("a message to a store: a read that is not possible")
        entries = self._pages.lease(request.each, (self, number), lease_s)
        if lease_s > 0:
            end = functools.partial(self._done, protocol.Done(id=number, read=False))
            there = [entry for entry in entries if entry is not None]
            self._reads[number] = there, self._at(time.monotonic() + lease_s, end), self._served(request)
        places = [
            protocol.ABSENT if entry is None else protocol.place_to_bytes(_place(entry)) for entry in entries
        ]
        self._answer(protocol.Places(id=number, places=b"".join(places)))

    def _served(self, request: protocol.Read | protocol.Fetch) -> Callable[[int], object]:
        """Return a function to call with the number of pages that were served."""
        begun = time.monotonic()
        if not request.traceparent:
            return lambda num_pages: None
        return functools.partial(self._on_served, request.traceparent, begun)

    def _at(self, when: float, call: Callable[[], None]) -> JobEngine.Alarm:
        try:
            return self._pages.jobs.at(when, call)
        except RuntimeError as e:
            raise PeerGoneError(f"no thread could start that ends the peer's leases in time: {e}") from e

    def _done(self, request: protocol.Done) -> None:
        read = self._reads.pop(request.id, None)
        if read is None:
            return
        entries, alarm, served = read
        alarm.cancel()
        served(len(entries))
        self._pages.forget_holders([(self, request.id)])
        if request.read:
            self._pages.read([entry.key for entry in entries], self._end_of_peer)

    def _wrong(self, request: protocol.Wrong) -> None:
        """The peer has found wrong bytes. Peers may remove pages, so this is not verified."""
        for entry in self._pages.lease(request.each, self, 0.0):
            if entry is not None and request.generation in (0, entry.generation):
                self._pages.discard(entry, MissReason.CORRUPT)

    # -- pages over the pipe -------------------------------------------------------------------

    def _views_of(self, payload_bytes: int, row_bytes: int, rows: range, as_blocks: bool) -> BlockViews:
        """All slots, as the blocks of a piece. A block's id is the offset of its slot."""
        begins = [at * row_bytes for at in rows] if as_blocks else [rows.start * row_bytes]
        slots = PageRows(self._memory, (), payload_bytes)
        return slots.views(begins, row_bytes if as_blocks else len(rows) * row_bytes)

    def _fetch(self, request: protocol.Fetch) -> None:
        if self._pipe is None or request.id in self._fetches:
            raise WireError("a message to a store: a fetch that is not possible")
        deadline = Deadline.after(min(max(request.timeout_s, _LEAST_S), _MOST_S))
        entries = self._pages.pin(request.each)
        codes, headers, view = bytearray(), list[bytes](), self._pages.segments.view
        sent: list[Entry | None] = []
        for entry in entries:
            code, header = protocol.ABSENT_PAGE, b""
            if entry is not None:
                begin = entry.offset + entry.payload_bytes
                header = bytes(view[begin : begin + entry.header_bytes])
                fits = entry.payload_bytes == request.payload_bytes
                code = protocol.SENT if fits else protocol.OTHER_SIZE
            codes.append(code)
            headers.append(header)
            sent.append(entry if code == protocol.SENT else None)

        served = self._served(request)

        def settled(fetch: Fetch) -> None:
            served(sum(each is not None for each in sent))
            self._fetches.pop(request.id, None)
            self._pages.unpin(entries, self._end_of_peer, were_used=fetch.is_sent)

        fetch = self._fetches[request.id] = Fetch(
            request,
            sent,
            pipe=self._pipe,
            views=self._views,
            deadline=deadline,
            settled=settled,
            failed=self.fail,
        )
        for part in ranges_of(len(headers), max(map(len, headers)), protocol.HEADERS):
            begin, end = part.start, part.stop
            self._answer(
                protocol.Fetched(
                    id=request.id,
                    is_last=end == len(headers),
                    codes=bytes(codes[begin:end]),
                    headers=headers[begin:end],
                )
            )
        if not self._sender.add(fetch):
            settled(fetch)
            self.fail("no thread could start that sends pages")

    def _cancel(self, request: protocol.Cancel) -> None:
        fetch, arrival = self._fetches.get(request.id), self._arrivals.get(request.id)
        if fetch is not None:
            fetch.cancel()
        if arrival is not None:
            arrival.end(MissReason.CANCELLED)

    def _put(self, request: protocol.Put) -> None:
        number, keys = request.id, request.each
        if self._pipe is None or number in self._arrivals or len(self._arrivals) >= _MAX_ARRIVALS:
            raise WireError("a message to a store: a put that is not possible")
        seal = PageSeal(checksums=request.checksums)
        pages = PageRequest(
            series=Series(request.format, request.shard, seal.id),
            keys=keys,
            identities=request.identities,
            memory=PipedPages(len(keys)),
        )
        deadline = Deadline.after(min(request.timeout_s, _MOST_S))

        def done(results: list[Any]) -> None:
            self._arrivals.pop(number, None)
            codes = protocol.codes_of(protocol.PUT_RESULTS, results)
            self._answer(protocol.Results(id=number, codes=codes, usage=self._usage()))

        self._listen_to_pipe()
        arrival = self._arrivals[number] = Arrival(self._pages, seal, pages, deadline, done)
        codes = arrival.begin()
        if codes is not None:
            self._answer(protocol.Results(id=number, codes=codes, is_last=False))
            arrival.resolved(0)

    def _lend(self, request: protocol.Lend) -> None:
        if self._door is None:
            raise WireError("a message to a store: memory is lent to it, and it maps none")
        self._lend_id, self._lent = request.id, self._door.lent(self._ticket)

    def _listen_to_pipe(self) -> None:
        if self._receiver is None:
            self._receiver = BackgroundThread(
                self._receive_all, name="kvplug-host-arrivals", stop=self._link.close
            )
            try:
                self._receiver.start()
            except RuntimeError as e:
                raise PeerGoneError(f"no thread could start that receives pages: {e}") from e

    def _receive_all(self) -> None:
        pipe = self._pipe
        assert pipe is not None
        with failing(self.fail, "its pages did not come"):
            while True:
                number, first, count, region = protocol.receive_tag(pipe)
                if not count:
                    raise WireError("it sends no pages")
                arrival = self._arrivals.get(number)
                pages = arrival.next_pages(first, count) if arrival is not None else None
                if region is not None:
                    memory = self._lent_memory(region)
                elif pages is not None:
                    memory = self._receive(pipe, count, pages[1])
                else:
                    pipe.recv_tensor(timeout=None)  # pages of a put that has ended
                if arrival is not None and pages is not None:
                    arrival.keep(pages[0], PageRows.dense(memory, count, pages[1]))
                if region is not None:
                    self._answer(protocol.Results(id=self._lend_id, codes=bytes([region]), is_last=False))

    def _lent_memory(self, region: int) -> memoryview:
        if self._lent is None:
            raise WireError("its pages are in memory that it has not lent")
        begin = region * protocol.REGION_BYTES
        return self._lent[begin : begin + protocol.REGION_BYTES]

    def _receive(self, pipe: Pipe, count: int, row_bytes: int) -> memoryview:
        """Receive a message of pages into memory that the next message uses again."""
        import torch

        if len(self._received) < count * row_bytes:
            self._received = memoryview(bytearray(count * row_bytes))
        rows = torch.frombuffer(self._received, dtype=torch.uint8)[: count * row_bytes]
        pipe.recv_tensor(rows.view(1, count, row_bytes), timeout=None)
        return self._received


_HANDLERS: Final[dict[type[protocol.Request], Callable[[Session, Any], None]]] = {
    protocol.Lookup: Session._lookup,
    protocol.List: Session._list,
    protocol.Remove: Session._remove,
    protocol.Declare: Session._declare,
    protocol.Withdraw: Session._withdraw,
    protocol.Release: Session._release,
    protocol.Touch: Session._touch,
    protocol.Expect: Session._expect,
    protocol.Subscribe: Session._subscribe,
    protocol.Unsubscribe: Session._unsubscribe,
    protocol.Read: Session._read,
    protocol.Done: Session._done,
    protocol.Wrong: Session._wrong,
    protocol.Fetch: Session._fetch,
    protocol.Put: Session._put,
    protocol.Lend: Session._lend,
    protocol.Cancel: Session._cancel,
}
"""The requests of a peer, and the methods that answer them."""
_KINDS: Final = {protocol.op_of(kind): kind for kind in _HANDLERS}


def _place(entry: Entry) -> Place:
    return Place(
        offset=entry.offset,
        generation=entry.generation,
        slot_bytes=entry.chunk.size.slot_bytes,
        payload_bytes=entry.payload_bytes,
        header_bytes=entry.header_bytes,
    )
