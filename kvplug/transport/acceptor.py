"""The server of proven connections: it listens, authenticates each peer, and serves it in a thread.

Before a connection becomes a pipe or a link, the two ends prove themselves and exchange messages. A peer that
stops in the middle must not delay others. So each listener has a thread that accepts connections, and each
connection has its own thread, which begins with the proof.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from kvplug.errors import ClosedError, KvplugError, ResourceExhaustedError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.log import LogEvent
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.listener import Listener, Stranger

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_SERVED = 256
"""The most connections that may be served or await :meth:`Acceptor.accept` at once. Further connections
wait."""
_MAX_WAITING = 128
"""The most further connections that may prove themselves or wait at once, each in a thread."""
_PAUSE_S = 0.1  # after a failed accept, since the connection keeps the listening socket readable
_SHORT_S = 10.0
"""How long a shortage that ended a connection counts as lasting."""
_CLOSE_S = 2.0
"""How many seconds ``close`` waits for threads that it has just ended."""


def hang_up(connection: Connection) -> None:
    """Shut down a connection that another thread uses; that thread then closes it."""
    with contextlib.suppress(OSError):  # the peer hung up, or that thread closed the connection
        connection.sock.shutdown(socket.SHUT_RDWR)


class Acceptor(Generic[T]):
    """Makes an object of each proven connection of its listeners, in one thread per connection.

    Any thread or signal handler may call any method. In a forked child the acceptor is closed.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        make: Callable[[Connection], T | None],
        *,
        what: str,
        name: str,
        contact: str = "",
        discard: Callable[[T], object] = lambda made: None,
        timeout_s: float | None = None,
        max_served: int = 0,
        lost: Callable[[Connection, ResourceExhaustedError], object] = Connection.decline,
        end: Callable[[Connection], object] = hang_up,
    ) -> None:
        """Take over the listeners, even if this raises.

        Args:
            make: Returns an object that owns the connection from then on; or serves the connection to its end
                and returns ``None``. If it raises, the connection is closed; if a resource ran out, the peer
                receives that as the reason.
            what: Names the objects in messages: "a pipe".
            name: The prefix of the threads' names.
            contact: The contact that peers dial. Default: the first listener's.
            discard: Ends an object that was not accepted before :meth:`close`.
            timeout_s: The default timeout of :meth:`accept`.
            max_served: How many connections may be served or wait to be accepted at once. Other peers wait.
                0: :data:`MAX_SERVED`.
            lost: Called before a connection is closed because a resource ran out. It informs the peer, and
                must not block.
            end: Interrupts ``make`` for a connection, from another thread.

        Raises:
            ResourceExhaustedError: this process can start no more threads.
        """
        self._listeners = listeners
        self._make = make
        self._what = what
        self._name = name
        self._contact = contact or listeners[0].contact
        self._discard = discard
        self._timeout_s = timeout_s
        self._max_served = max_served or MAX_SERVED
        self._lost = lost
        self._end = end
        # Code takes the lock, not the condition: Ctrl-C inside the condition's ``__enter__`` would leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._serving: set[Connection] = set()
        self._ready: deque[T] = deque()
        self._shortage: ResourceExhaustedError | None = None
        """The resource that ran out for the latest connection; ``None`` if that connection was served."""
        self._short_at = -_SHORT_S
        self._lost_since = 0.0
        """When the latest connection that met a shortage arrived."""
        self._logged = ""
        """The latest failure logged. Its repetitions are logged at DEBUG level."""
        self._listening = [
            BackgroundThread(self._listen, args=(each,), name=f"{name}-listen", stop=self._stop)
            for each in listeners
        ]
        self._threads: set[threading.Thread] = set()
        """The connections' threads."""
        close_after_fork(self)
        try:
            for thread in self._listening:
                thread.start()
        except BaseException as e:
            self.close()
            NamedExhaustion.check(e, "a listener needs a thread that takes connections")
            raise

    @property
    def contact(self) -> str:
        """The contact that peers dial."""
        return self._contact

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here, or this is a forked child."""
        return self._closed

    @property
    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by reason: see :attr:`Listener.refusals`."""
        return dict(sum((Counter(each.refusals) for each in self._listeners), Counter[str]()))

    def _obstacle(self) -> str:
        """Return why a peer that connects now would not be served, or would wait; empty if it would be."""
        with self._lock:
            if self._closed:
                return "it is closed"
            if self._shortage is not None and time.monotonic() - self._short_at < _SHORT_S:
                return str(self._shortage)
            if len(self._serving) + len(self._ready) >= self._max_served:
                return f"it serves {self._max_served} connections, and others wait"
        return ""

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> T:
        """Return the next object that was made.

        Raises:
            TimeoutError: no object was made in time. The error counts the refused connections and chains the
                last refusal. Peers that are connecting are not disturbed.
            ResourceExhaustedError: a resource ran out for a peer that connected during this call, or for the
                latest peer.
            ClosedError: the acceptor is closed, or was closed during the wait.
        """
        deadline = Deadline.after(timeout, self._timeout_s)
        began = time.monotonic()
        with self._lock:
            while not self._closed and not self._ready:
                if self._lost_since > began:  # an older shortage is reported only at the deadline
                    self._check_shortage()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    self._check_shortage()
                    raise self._nobody_came()
            if self._closed:
                raise ClosedError(f"the listener of {self._what} is closed")
            self._changed.notify_all()  # another connection may be served
            return self._ready.popleft()

    def _check_shortage(self) -> None:
        """Raise the error if a resource ran out for the latest connection. Only one caller gets it."""
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage

    def _nobody_came(self) -> TimeoutError:
        where = ", ".join(listener.contact for listener in self._listeners)
        counts = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.refusals.items()))
        error = TimeoutError(
            f"no peer connected to {where} for {self._what} in time"
            + (f"; turned away: {counts}" if counts else "")
        )
        for listener in self._listeners:
            error.__cause__ = listener.last_refusal or error.__cause__
        return error

    def close(self) -> None:
        """Stop listening, end connections being served and objects not accepted, and wait briefly.
        Idempotent."""
        self._stop()
        with self._lock:
            unclaimed = list(self._ready)
            self._ready.clear()
        for made in unclaimed:
            self._discard(made)
        deadline = Deadline.after(_CLOSE_S)
        _join(self._listening, deadline)  # no thread is started after this
        with self._lock:
            threads = list(self._threads)
        _join(threads, deadline)

    def _stop(self) -> None:
        """Make all threads end, without waiting for them."""
        with self._lock:
            self._closed = True
            serving = list(self._serving)
            self._changed.notify_all()
        for listener in self._listeners:
            listener.close()
        for connection in serving:
            self._end(connection)

    def release(self, connection: Connection) -> None:
        """Hand a connection over to another object: :meth:`close` no longer ends it."""
        with self._lock:
            self._serving.discard(connection)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        # The listeners, their connections and the objects that were made close themselves.
        self._closed = True

    # -- the threads ---------------------------------------------------------------------------

    def _listen(self, listener: Listener) -> None:
        while True:
            with self._lock:
                while not self._closed and len(self._threads) >= self._max_served + _MAX_WAITING:
                    self._changed.wait()
            try:
                stranger = listener.take()
                if stranger is None:
                    return
                self._start(listener, stranger)
            except Exception as e:  # for example no free descriptor or memory: the listener survives it
                self._failed(f"accepting a connection at {listener.contact}", e)
                time.sleep(_PAUSE_S)

    def _start(self, listener: Listener, stranger: Stranger) -> None:
        """Start the thread of a connection."""
        thread = BackgroundThread(  # ended by the ``stop`` of the listening thread
            self._run, args=(listener, stranger), name=f"{self._name}-serve", stop=lambda: None
        )
        with self._lock:
            self._threads.add(thread)
        try:
            thread.start()
        except Exception as e:  # no thread is free; later connections may get one
            with self._lock:
                self._threads.discard(thread)
            listener.refuse(stranger, e)
            raise

    def _run(self, listener: Listener, stranger: Stranger) -> None:
        try:
            connection = listener.prove(stranger)
            if connection is not None:
                self._serve(connection)
        except ResourceExhaustedError as e:
            self._failed(f"a connection to {listener.contact}", e)
        finally:
            with self._lock:
                self._threads.discard(threading.current_thread())
                self._changed.notify_all()

    def _serve(self, connection: Connection) -> None:
        if not self._has_place(connection):
            connection.close()
            return
        made: T | None = None
        try:
            made = self._make(connection)
        except Exception as e:
            self._failed(f"{self._what} for {connection.describe}", e, connection)
            return
        with self._lock:
            self.release(connection)
            self._shortage = None
            if made is not None and not self._closed:
                self._ready.append(made)
                made = None
        if made is not None:
            self._discard(made)

    def _has_place(self, connection: Connection) -> bool:
        """Wait until the connection may be served. Return False if the acceptor is closed."""
        with self._lock:
            while not self._closed and len(self._serving) + len(self._ready) >= self._max_served:
                self._changed.wait()
            if not self._closed:
                self._serving.add(connection)
            return not self._closed

    def _failed(self, what: str, error: Exception, connection: Connection | None = None) -> None:
        """Report that a connection could not be served, and close it."""
        shortage = NamedExhaustion.of(error, what)
        is_foreign = shortage is None and not isinstance(error, KvplugError | OSError)  # a bug here
        text = f"{what} failed: {shortage or error}"
        if is_foreign or not self._closed:
            LogEvent.CONNECTION_FAILED.log(
                logger,
                text,
                level=logging.DEBUG if text == self._logged else None,
                exc_info=error if is_foreign else None,
                address=self._contact,
                peer="" if connection is None else connection.peer,
                error=shortage or error,
            )
            self._logged = text
        if connection is not None:
            if shortage is not None:
                self._lost(connection, shortage)
            connection.close()
        with self._lock:
            if shortage is not None:
                self._shortage, self._short_at = shortage, time.monotonic()
            if connection is not None:
                self.release(connection)
                if shortage is not None:
                    self._lost_since = connection.since


def _join(threads: Sequence[threading.Thread], deadline: Deadline) -> None:
    for thread in threads:
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(deadline.remaining())
