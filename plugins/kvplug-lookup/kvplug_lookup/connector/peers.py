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
        self._store: Store | None = None
        self._series: Series | None = None
        self._closed = False
        self.is_refused = False
        """The two workers refused each other. Reset when a connection succeeds."""
        self.link: PeerLink | None = None
        self._waiting: queue.SimpleQueue[tuple[Use, GiveUp, Deadline] | None] = queue.SimpleQueue()
        self._thread: BackgroundThread | None = None

    def use(self, use: Use, give_up: GiveUp, deadline: Deadline) -> None:
        """Call ``use`` with the store: at once if it is connected, else from another thread."""
        shortage: Exception | None = None
        with self._lock:
            if self._closed:
                closed = True
            else:
                closed = False
                store, series = self._store, self._series
                if store is None or series is None or store.is_lost:
                    store = None
                    if self._thread is None:
                        thread = BackgroundThread(self._run, name="kvplug-lookup-peer", stop=self._stop)
                        try:
                            thread.start()
                        except RuntimeError as e:  # no more threads
                            shortage = e
                        else:
                            self._thread = thread
                    if shortage is None:
                        self._waiting.put((use, give_up, deadline))
        if closed:
            give_up(ClosedError("the connector was shut down"))
        elif shortage is not None:
            give_up(NamedExhaustion.of(shortage, f"connecting to {self.name}") or shortage)
        elif store is not None and series is not None:
            use(store, series)

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
                if self._closed:
                    raise ClosedError("the connector was shut down")
                store, series = self._store, self._series
            if store is not None and series is not None and not store.is_lost:
                return store, series
            if store is not None:
                store.abort()
            return self._connect(deadline, retry=retry)
        finally:
            self._connecting.release()

    def _connect(self, deadline: Deadline, *, retry: bool) -> tuple[Store, Series]:
        context, rank = self._context, self._context.parallelism.worker_rank
        store: Store | None = None
        try:
            link = context.peers.connect(
                rank, "store", timeout=deadline.remaining(), retry=retry, peer=self._address
            )
        except HandshakeError:
            self.is_refused = True
            raise
        try:
            with self._lock:
                self.link = link  # a concurrent shutdown closes it
                if self._closed:
                    raise ClosedError("the connector was shut down")
            left = deadline.remaining()
            within = _HELLO_S if left is None else min(_HELLO_S, left)
            hello = StoreHello.from_plain(link.channel.recv(timeout=within))
            differences = [*self._shard.differences(hello.shard), *hello.differences(context.model)]
            if differences:
                self.is_refused = True
                raise HandshakeError(*differences, peer=str(link.channel.peer))
            store = context.store_client(hello.store, link)
            if store.seal.id != hello.seal:
                self.is_refused = True
                raise HandshakeError(
                    "integrity: the two ends protect pages in different ways; set it alike at both",
                    peer=str(link.channel.peer),
                )
            with self._lock:
                if self._closed:
                    raise ClosedError("the connector was shut down")
                self._store, self._series = store, hello.series()
                self.is_refused = False
                return store, self._series
        except BaseException:
            if store is not None:
                store.abort()
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
        """End the connection, and fail the calls that wait for it. Idempotent."""
        self._stop()
        with self._lock:
            store, self._store = self._store, None
            thread = self._thread
        if store is not None:
            store.abort()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=5)
        while True:
            try:
                left = self._waiting.get_nowait()
            except queue.Empty:
                break
            if left is not None:
                left[1](ClosedError("the connector was shut down"))
