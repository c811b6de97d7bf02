"""The worker's clients of peer engines' stores. They connect on first use, and again after a loss."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping

from kvplug import ClosedError, HandshakeError, PeerGoneError, TimeoutError
from kvplug.engine import ConnectorContext, PeerLink
from kvplug.transport import BackgroundThread, Deadline, NamedExhaustion, Series, Store
from kvplug_lookup.connector.keys import Shard, StoreHello

_log = logging.getLogger(__name__)

_HELLO_S = 10.0
_CLOSE_S = 5.0

Use = Callable[[Store, Series], None]
"""Called with the store once it is connected."""
GiveUp = Callable[[Exception], None]
"""Called if the connection fails."""


class PeerStore:
    """The store of one peer engine's worker, the one with this worker's rank.

    It connects in its own thread, so that a silent peer does not delay loads from others.
    """

    def __init__(
        self, context: ConnectorContext, address: str | Mapping[int, str] | None, shard: Shard, name: str
    ) -> None:
        """
        Args:
            address: the address of the peer engine's worker 0, or the contacts of its workers.
            name: the source's name.
        """
        self._context = context
        self._address = address
        self._shard = shard
        self.name = name
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
        """Held by the thread that connects."""
        self._client: tuple[Store, Series] | None = None
        """The connected store, which may be lost, and the series of its pages."""
        self._closed = False
        self.is_refused = False
        """The two workers refused each other. Reset when a connection succeeds."""
        self.link: PeerLink | None = None
        self._waiting: queue.SimpleQueue[tuple[Use, GiveUp, Deadline] | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None

    def use(self, use: Use, give_up: GiveUp, deadline: Deadline) -> None:
        """Call ``use`` with the store: at once if it is connected, else from another thread."""
        try:
            with self._lock:
                client = self._usable()
                if client is None:
                    self._start()
                    self._waiting.put((use, give_up, deadline))
        except (ClosedError, RuntimeError) as e:
            give_up(NamedExhaustion.of(e, f"connecting to {self.name}") or e)
        else:
            if client is not None:
                use(*client)

    def _usable(self) -> tuple[Store, Series] | None:
        """The connected store, unless it is lost. Needs the lock. Raises ClosedError."""
        if self._closed:
            raise ClosedError("the connector was shut down")
        return None if self._client is None or self._client[0].is_lost else self._client

    def _start(self) -> None:
        """Start the thread that connects. Needs the lock. Raises RuntimeError: no more threads."""
        if self._thread is None:
            thread = BackgroundThread(self._run, name="kvplug-lookup-peer", stop=self._stop)
            thread.start()
            self._thread = thread

    def connected(self, deadline: Deadline, *, retry: bool) -> tuple[Store, Series]:
        """Return the store; connect if needed.

        ``retry``: wait for a peer that is not up. A peer whose pages were promised must be up.

        Raises what a handshake raises.
        """
        left = deadline.remaining()
        if not self._connecting.acquire(timeout=-1 if left is None else left):
            where = self._context.peers.address_of(self._context.parallelism.worker_rank, self._address)
            raise TimeoutError(f"could not connect to {self.name} at {where} in time")
        try:
            with self._lock:
                usable, lost = self._usable(), self._client
            if usable is not None:
                return usable
            if lost is not None:
                lost[0].abort()
            return self._connect(deadline, retry=retry)
        finally:
            self._connecting.release()

    def _connect(self, deadline: Deadline, *, retry: bool) -> tuple[Store, Series]:
        context, rank = self._context, self._context.parallelism.worker_rank
        store: Store | None = None
        link: PeerLink | None = None
        try:
            link = context.peers.connect(
                rank, "store", timeout=deadline.remaining(), retry=retry, peer=self._address
            )
            with self._lock:
                self.link = link  # a concurrent shutdown closes it
                if self._closed:
                    raise ClosedError("the connector was shut down")
            left = deadline.remaining()
            within = _HELLO_S if left is None else min(_HELLO_S, left)
            hello = StoreHello.from_plain(link.channel.recv(timeout=within))
            differences = [*self._shard.differences(hello.shard), *hello.differences(context.model)]
            if differences:
                raise HandshakeError(*differences, peer=str(link.channel.peer))
            store = context.store_client(hello.store, link)
            if store.seal.id != hello.seal:
                raise HandshakeError(
                    "integrity: the two ends protect pages in different ways; set it alike at both",
                    peer=str(link.channel.peer),
                )
            with self._lock:
                if self._closed:
                    raise ClosedError("the connector was shut down")
                self._client = store, hello.series()
                self.is_refused = False
                return self._client
        except BaseException as e:
            self.is_refused |= isinstance(e, HandshakeError)
            if store is not None:
                store.abort()
            if link is not None:
                link.close()
            raise

    def _run(self) -> None:
        while (wanted := self._waiting.get()) is not None:
            use, give_up, deadline = wanted
            try:
                if deadline.expired:
                    raise PeerGoneError("could not connect to the peer engine's worker in time")
                use(*self.connected(deadline, retry=False))
            except Exception as e:
                give_up(e)

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            link = self.link
        if link is not None:
            link.close()
        self._waiting.put(None)

    def close_in_background(self) -> None:
        """:meth:`close` without waiting."""
        self._stop()
        try:
            BackgroundThread(self.close, name="kvplug-lookup-peer-close", stop=self._stop).start()
        except RuntimeError:  # no more threads
            self.close()

    def close(self) -> None:
        """End the connection. The thread fails the calls that wait for it. Idempotent."""
        self._stop()
        with self._lock:
            client, self._client = self._client, None
            thread = self._thread
        if client is not None:
            client[0].abort()
        if thread is not None and thread is not threading.current_thread():
            thread.join(_CLOSE_S)
