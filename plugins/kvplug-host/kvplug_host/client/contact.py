"""The store "host" that another program serves, at a fixed address: connected again whenever it is lost."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from kvplug import ClosedError, ConfigError, KvplugError, PeerGoneError, TimeoutError, UnsupportedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BackgroundThread,
    Deadline,
    ExitGuard,
    GetJob,
    Job,
    MissReason,
    NamedExhaustion,
    PageEvent,
    PageRequest,
    PageSeal,
    Presence,
    PutReason,
    Series,
    Store,
    Timeout,
    Usage,
    close_after_fork,
)
from kvplug_host.client.client import HostClient
from kvplug_host.client.subscriptions import nothing_there

_log = logging.getLogger(__name__)

_FIRST_S: Final = 5.0
"""How long a program that does not answer is waited for when the store is opened. One that answers may take
the usual time for what comes then: to begin with, both ends may have to import torch."""
_BACKOFF_S: Final = (0.1, 5.0)
"""After the first failure, and at most; doubled each time."""
_CLOSE_S: Final = 5.0

Listener = Callable[[PageEvent], None]
T = TypeVar("T")
J = TypeVar("J", bound=Job[Any])


class ContactStore(Store):
    """Requests go to the program while it is there; while it is gone they are misses, at once."""

    def __init__(self, context: Store.Context, address: str) -> None:
        """Waits a moment for the program. If it is not there, it is tried again later.

        Raises:
            ConfigError: there is no way to connect from here.
            HandshakeError, AuthenticationError, WireError: it cannot work together with this process.
        """
        if context.connect is None:
            raise ConfigError("options.host.contact: this program has no way to connect to a store")
        self.seal = PageSeal(checksums=context.seal.checksums)
        self._context = context
        self._connect = context.connect
        self.address = address
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._client: HostClient | None = None
        self._link: Store.Link | None = None
        """A link on which the store is being opened."""
        self._listeners: dict[object, Listener] = {}
        self._ends: dict[object, Callable[[], None]] = {}
        """What ends each listener's subscription at the current client."""
        self._usage = Usage(num_pages=0, used_bytes=0, budget_bytes=None)
        self._closed = False
        self._said_gone = False
        close_after_fork(self)
        try:
            self._open(_FIRST_S)
        except (PeerGoneError, TimeoutError) as e:
            self._gone(e)
        self._thread = BackgroundThread(self._keep_open, name="kvplug-host-contact", stop=self._give_up)
        try:
            with NamedExhaustion("a store in another process"):
                self._thread.start()
        except BaseException:
            self._abort()
            raise

    def __repr__(self) -> str:
        state = ", closed" if self._closed else "" if self._client is not None else ", gone"
        return f"<store 'host' at {self.address}{state}>"

    @property
    def is_shared(self) -> bool:
        return True

    @property
    def medium(self) -> str:
        return "host"

    @property
    def location(self) -> str:
        return self.address

    @property
    def _route(self) -> str:
        client = self._client
        return "not at all" if client is None else client.route

    # -- the connection ------------------------------------------------------------------------

    def _open(self, timeout: float) -> None:
        """Connect. Raises what a handshake raises.

        ``timeout``: until the other end has proved itself.
        """
        link = self._connect(self.address, timeout)
        deadline = Deadline.after(max(timeout, self._context.timeout_s))
        with self._lock:
            self._link, closed = link, self._closed
        try:
            if closed:
                raise ClosedError("the store is closed")
            client = HostClient(self._context, link, deadline=deadline, on_lost=self._wake.set)
        except BaseException:
            link.close()
            raise
        finally:
            self._link = None
        with self._lock:
            closed = self._closed
            if not closed:
                self._client = client
                self._said_gone = False
                for key, listener in self._listeners.items():
                    self._ends[key] = client.subscribe(listener)
        if closed:
            client.abort()
        else:
            _log.info("the store 'host' at %s is connected", self.address)

    def _gone(self, error: KvplugError | None) -> None:
        with self._lock:
            client, self._client = self._client, None
            said, self._said_gone = self._said_gone, True
            self._ends.clear()
        if client is not None:
            client.abort()
        if not said and not self._closed and not ExitGuard.is_leaving():
            why = f": {error}" if error is not None else ""
            _log.warning("the store 'host' at %s is gone, and is tried again%s", self.address, why)

    def _keep_open(self) -> None:
        pause = _BACKOFF_S[0]
        while not self._closed:
            client = self._client
            if client is not None and not client.is_lost:
                self._wake.wait()
                self._wake.clear()
                continue
            if client is not None:
                self._gone(None)
            try:
                self._open(max(_FIRST_S, self._context.timeout_s))
                pause = _BACKOFF_S[0]
                continue
            except KvplugError as e:
                self._gone(e)
            except Exception as e:  # a broken plugin, say: the next attempt may do
                _log.exception("connecting to the store 'host' at %s failed", self.address)
                self._gone(PeerGoneError(str(e)))
            self._wake.wait(pause)
            self._wake.clear()
            pause = min(2 * pause, _BACKOFF_S[1])

    def _current(self) -> HostClient | None:
        """The client; ``None``: the program is gone.

        Raises:
            ClosedError: this end is closed.
        """
        if self._closed:
            ExitGuard.hold()
            raise ClosedError("the store 'host' is closed")
        return self._client

    # -- requests ------------------------------------------------------------------------------

    def _deadline(self, timeout: Timeout) -> Deadline:
        return Deadline.after(timeout, self._context.timeout_s)

    def _asked(self, ask: Callable[[HostClient], T], otherwise: Callable[[], T]) -> T:
        """What the client answers; where the program is gone, the other answer.

        Raises:
            ClosedError: this end is closed.
        """
        client = self._current()
        if client is not None:
            try:
                return ask(client)
            except ClosedError:
                self._current()
        return otherwise()

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        deadline = self._deadline(timeout)
        return self._asked(
            lambda client: client.submit_lookup(keys, lease_s=lease_s, timeout=deadline.remaining()),
            lambda: _ended(Job(len(keys), deadline), Presence.ABSENT),
        )

    def _put(self, pages: PageRequest, timeout: Timeout) -> Job[PutReason | None]:
        deadline = self._deadline(timeout)
        return self._asked(
            lambda client: client.submit_put(pages, timeout=deadline.remaining()),
            lambda: _ended(Job(len(pages.keys), deadline), PutReason.STORE_GONE),
        )

    def _get(self, pages: PageRequest, timeout: Timeout) -> GetJob:
        deadline = self._deadline(timeout)
        return self._asked(
            lambda client: client.submit_get(pages, timeout=deadline.remaining()),
            lambda: _ended(
                GetJob(len(pages.keys), pages.series.format.num_layers, deadline), MissReason.STORE_GONE
            ),
        )

    def _remove(self, keys: Sequence[bytes] | None, timeout: Timeout) -> Job[bool]:
        deadline = self._deadline(timeout)
        self._current()
        if keys is None:
            raise UnsupportedError("other programs keep pages in this store, too")
        return self._asked(
            lambda client: client.submit_remove(keys, timeout=deadline.remaining()),
            lambda: _ended(Job(len(keys), deadline), False),
        )

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = self._deadline(timeout)
        self._asked(lambda client: client.declare(series, keys, timeout=deadline.remaining()), _nothing)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._asked(lambda client: client.withdraw(keys), _nothing)

    def release(self, keys: Sequence[bytes]) -> None:
        self._asked(lambda client: client.release(keys), _nothing)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._asked(lambda client: client.touch(keys), _nothing)

    def expect_reader(self, keys: Sequence[bytes]) -> None:
        self._asked(lambda client: client.expect_reader(keys), _nothing)

    def keys(self, series: Series) -> Sequence[bytes]:
        client = self._current()
        if client is None:
            raise PeerGoneError(f"the store 'host' at {self.address} is gone")
        return client.keys(series)

    def usage(self) -> Usage:
        self._usage = self._asked(lambda client: client.usage(), lambda: self._usage)
        return self._usage

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        key = object()
        with self._lock:
            client = self._current()
            self._listeners[key] = listener
            if client is not None and not client.is_lost:
                self._ends[key] = client.subscribe(listener)
            else:
                client = None
        if client is None:
            listener(nothing_there())

        def end() -> None:
            with self._lock:
                self._listeners.pop(key, None)
                unsubscribe = self._ends.pop(key, None)
            if unsubscribe is not None:
                unsubscribe()

        return end

    # -- the end -------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._closed

    def _close(self, timeout: Timeout) -> None:
        deadline = self._deadline(timeout)
        self._give_up()  # the end of the client is no loss
        client = self._client
        if client is not None:
            client.close(deadline.remaining())
        self._abort()

    def _give_up(self) -> None:
        """Have the thread end, without waiting."""
        with self._lock:
            self._closed = True
            link = self._link
        self._wake.set()
        if link is not None:
            link.close()

    def _abort(self) -> None:
        self._give_up()
        client = self._client
        if client is not None:
            client.abort()
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_S)

    def _after_fork_in_child(self) -> None:
        self._closed = True


def _ended(job: J, result: Any) -> J:
    job.set([result] * job.count)
    return job


def _nothing() -> None:
    """What is told to a program that is gone is lost."""
