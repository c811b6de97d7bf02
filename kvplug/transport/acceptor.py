"""The server of proven connections: it listens, limits how many it admits, and serves each in a thread.

Before a connection becomes a pipe or a link, the two ends exchange messages. A peer that stops in the middle
of this exchange must not delay others. So each listener has a thread that accepts connections, and each
connection is served in its own thread.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Self, TypeVar

from kvplug.errors import ClosedError, KvplugError, ResourceExhaustedError, TimeoutError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.listener import Listener

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_SERVED = 256
"""The most connections that are being served or whose results the program has not accepted yet. Further
connections wait."""
_CLOSE_S = 2.0
"""How many seconds ``close`` waits for threads that it has just ended."""


def hang_up(connection: Connection) -> None:
    """End a connection that another thread uses; that thread then closes the connection."""
    with contextlib.suppress(OSError):  # the peer hung up, or that thread closed the connection
        connection.sock.shutdown(socket.SHUT_RDWR)


class Acceptor(Generic[T]):
    """Takes the proven connections of its listeners, and makes an object of each, in a thread of its own.

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
            end: Ends ``make`` for a connection, from another thread.

        Raises:
            ResourceExhaustedError: this process can have no more threads.
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
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._serving: dict[Connection, threading.Thread] = {}
        self._ready: deque[T] = deque()
        self._shortage: ResourceExhaustedError | None = None
        """The resource that ran out for the latest connection; ``None`` if that connection was served."""
        self._lost_since = 0.0
        """When that connection arrived."""
        self._logged = ""
        """The latest failure, so that a peer that retries is logged once."""
        self._threads = [
            BackgroundThread(self._run, args=(each,), name=f"{name}-listen", stop=each.close)
            for each in listeners
        ]
        close_after_fork(self)
        try:
            for thread in self._threads:
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

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> T:
        """Return the next object that was made.

        Raises:
            TimeoutError: no object was made in time. Peers that are connecting are not disturbed.
            ResourceExhaustedError: a resource ran out for a peer that connected during this call, or for the
                latest peer.
            ClosedError: the acceptor is closed, or was closed during the wait.
        """
        deadline = Deadline.after(timeout, self._timeout_s)
        began = time.monotonic()
        with self._lock:
            while not self._closed and not self._ready:
                if self._lost_since > began:  # else an earlier call may have reported it already
                    self._check_shortage()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    self._check_shortage()
                    for listener in self._listeners:
                        listener.check_shortage()
                    where = ", ".join(listener.contact for listener in self._listeners)
                    raise TimeoutError(f"no peer connected to {where} for {self._what} in time")
            if self._closed:
                raise ClosedError(f"the listener of {self._what} is closed")
            self._changed.notify_all()  # another connection may be served
            return self._ready.popleft()

    def _check_shortage(self) -> None:
        """Raise the error if a resource ran out for the latest connection. Only one caller gets it."""
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage

    def close(self) -> None:
        """Stop listening, end connections being served and objects not accepted, and wait briefly.
        Idempotent."""
        with self._lock:
            self._closed = True
            serving = list(self._serving.items())
            unclaimed = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        for listener in self._listeners:
            listener.close()
        for connection, _ in serving:
            self._end(connection)
        for made in unclaimed:
            self._discard(made)
        deadline = Deadline.after(_CLOSE_S)
        for thread in (*self._threads, *(thread for _, thread in serving)):
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(deadline.remaining())

    def release(self, connection: Connection) -> None:
        """Hand a connection over to another object: :meth:`close` no longer ends it."""
        with self._lock:
            self._serving.pop(connection, None)
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        # The listeners, their connections and the objects that were made close themselves.
        self._closed = True

    # -- the threads ---------------------------------------------------------------------------

    def _run(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept(None)
            except ClosedError:
                return
            thread = BackgroundThread(
                self._serve,
                args=(connection,),
                name=f"{self._name}-serve",
                stop=partial(self._end, connection),
            )
            with self._lock:
                while not self._closed and len(self._serving) + len(self._ready) >= self._max_served:
                    self._changed.wait()
                if self._closed:
                    connection.close()
                    return
                self._serving[connection] = thread
            try:
                thread.start()
            except RuntimeError as e:  # no thread is free; later connections may get one
                self._fail(connection, e)

    def _serve(self, connection: Connection) -> None:
        try:
            made = self._make(connection)
        except Exception as e:
            self._fail(connection, e)
            return
        with self._lock:
            self.release(connection)
            self._shortage = None
            if made is not None and not self._closed:
                self._ready.append(made)
                made = None
        if made is not None:
            self._discard(made)

    def _fail(self, connection: Connection, error: Exception) -> None:
        """Report that ``connection`` could not be served, and close it."""
        shortage = NamedExhaustion.of(error, f"{self._what} for {connection.describe}")
        is_foreign = shortage is None and not isinstance(error, KvplugError | OSError)  # a bug, not the peer
        text = f"{self._what} for {connection.describe} failed: {shortage or error}"
        if is_foreign or not self._closed:
            level = logging.DEBUG if text == self._logged else logging.WARNING
            logger.log(level, "%s", text, exc_info=error if is_foreign else None)
            self._logged = text
        if shortage is not None:
            self._lost(connection, shortage)
        connection.close()
        with self._lock:
            self.release(connection)
            if shortage is not None:
                self._shortage, self._lost_since = shortage, connection.since
