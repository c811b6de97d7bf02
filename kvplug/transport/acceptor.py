"""Turns proven connections into pipes, or into readers of a queue, concurrently.

The messages that a peer exchanges before its connection is a pipe take time, and a peer that is stopped in
the middle of them must not delay others. So one thread accepts connections, and a short-lived thread serves
each.
"""

from __future__ import annotations

import abc
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
from kvplug.net.exhaustion import exhaustion_of, raise_if_exhausted
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.decline import decline
from kvplug.net.trust.listener import Listener
from kvplug.transport.pipe import Pipe, PipeListener

T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_SERVED = 256
"""Connections that are served at once, each in a thread. A peer that is above it is hung up on."""
MAX_READY = 128
"""Pipes that the program has not accepted yet."""


class Acceptor(Generic[T]):
    """Accepts the proven connections of its listeners, and serves each in a thread of its own.

    Any thread may call any method, and so may a signal handler. In a forked child it is closed.
    """

    def __init__(
        self,
        listeners: Sequence[Listener],
        make: Callable[[Connection], T],
        take: Callable[[T], None],
        *,
        what: str,
        name: str,
        lost: Callable[[Connection, ResourceExhaustedError], None] | None = None,
    ) -> None:
        """Owns the listeners from here on, also if it raises.

        Args:
            make: Makes an object of a connection, which owns the connection from then on. If it raises, the
                connection is closed, and the other end sees a hang-up.
            take: Receives that object, in the same thread.
            what: What is made, for the warning if that fails: "a pipe".
            name: What the threads' names begin with.
            lost: Called, in a thread of this object, before a connection is closed because a resource ran
                out. It must not block.

        Raises:
            ResourceExhaustedError: this process can have no more threads.
        """
        self._listeners = listeners
        self._make = make
        self._take = take
        self._what = what
        self._name = name
        self._lost = lost
        self._lock = threading.RLock()
        self._closed = False
        self._serving: set[Connection] = set()
        self._threads = [
            BackgroundThread(self._accept, args=(each,), name=f"{name}-listen", stop=each.close)
            for each in listeners
        ]
        close_after_fork(self)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as e:
            self.close()
            raise_if_exhausted(e, "a listener needs a thread that takes connections")
            raise

    def close(self) -> None:
        """Stop accepting and close every open connection. Idempotent."""
        with self._lock:
            self._closed = True
            serving = list(self._serving)
        for listener in self._listeners:
            listener.close()
        for connection in serving:
            _hang_up(connection)
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(1.0)

    def _after_fork_in_child(self) -> None:
        # The listeners close themselves.
        self._closed = True
        for connection in list(self._serving):
            connection.close()

    def _accept(self, listener: Listener) -> None:
        while True:
            try:
                connection = listener.accept(None)
            except ClosedError:
                return
            with self._lock:
                closed, crowded = self._closed, len(self._serving) >= MAX_SERVED
                if not (closed or crowded):
                    self._serving.add(connection)
            if closed:
                connection.close()
                return
            if crowded:
                logger.warning("a connection from %s was dropped: %d join", connection.describe, MAX_SERVED)
                connection.close()
                continue
            thread = BackgroundThread(
                self._serve,
                args=(connection,),
                name=f"{self._name}-join",
                stop=partial(_hang_up, connection),
            )
            try:
                thread.start()
            except RuntimeError as e:  # no more threads now; later connections may get one
                self._drop(connection, e)

    def _serve(self, connection: Connection) -> None:
        try:
            made = self._make(connection)
        except Exception as e:
            self._drop(connection, e)
            return
        self._release(connection)  # not after it was taken: its new owner may outlive this acceptor
        self._take(made)

    def _drop(self, connection: Connection, error: Exception) -> None:
        """Nothing could be made of it."""
        shortage = exhaustion_of(error, f"{self._what} from {connection.describe}")
        foreign = shortage is None and not isinstance(error, KvplugError | OSError)  # a fault of ours
        logger.warning(
            "%s from %s was not completed: %s",
            self._what,
            connection.describe,
            shortage or error,
            exc_info=error if foreign else None,
        )
        if shortage is not None and self._lost is not None:
            self._lost(connection, shortage)
        connection.close()
        self._release(connection)

    def _release(self, connection: Connection) -> None:
        with self._lock:
            self._serving.discard(connection)


def _hang_up(connection: Connection) -> None:
    with contextlib.suppress(OSError):  # the peer hung up, or the thread that serves it closed it
        connection.sock.shutdown(socket.SHUT_RDWR)


class PipeAcceptor(PipeListener, abc.ABC):
    """The listening end of a pipe transport over connections: a transport turns each one into a pipe.

    In a forked child it is closed.
    """

    def __init__(
        self, listeners: Sequence[Listener], *, transport: str, contact: str, timeout_s: float
    ) -> None:
        """Owns the listeners from here on, also if it raises. :meth:`_join` may be called at once.

        ``timeout_s`` is the default timeout of :meth:`accept`.

        Raises:
            ResourceExhaustedError: this process can have no more threads.
        """
        self._listeners = listeners
        self._transport = transport
        self._contact = contact
        self._timeout_s = timeout_s
        self._ready_lock = threading.RLock()
        self._changed = threading.Condition(self._ready_lock)
        self._closed = False
        self._ready: deque[Pipe] = deque()
        self._shortage: ResourceExhaustedError | None = None
        """Why the latest connection did not become a pipe; ``None``: it did."""
        self._lost_since = 0.0
        """When that connection came."""
        close_after_fork(self)
        self._acceptor = Acceptor(
            listeners,
            self._join,
            self._take,
            what="a pipe",
            name=f"kvplug-{transport}",
            lost=self._note_shortage,
        )

    @abc.abstractmethod
    def _join(self, connection: Connection) -> Pipe | None:
        """The pipe over this connection, or ``None`` if the connection is part of another one's pipe.

        In a thread of its own. If it raises, the connection is closed.
        """

    @property
    def contact(self) -> str:
        return self._contact

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called here, or this is a forked child."""
        return self._closed

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._timeout_s)
        began = time.monotonic()
        with self._ready_lock:
            while not self._ready:
                if self._closed:
                    raise self._is_closed()
                if self._lost_since > began:  # else an earlier call may have ended by it, and its peer know
                    self._check_shortage()
                if not self._changed.wait(deadline.remaining()) and deadline.expired:
                    self._check_shortage()
                    for listener in self._listeners:
                        listener.check_shortage()
                    where = ", ".join(listener.contact for listener in self._listeners)
                    raise TimeoutError(f"no peer connected a pipe to {where} in time")
            return self._ready.popleft()

    def _check_shortage(self) -> None:
        """Return, unless the latest connection was lost for lack of a resource. One caller hears of it."""
        shortage, self._shortage = self._shortage, None
        if shortage is not None:
            raise shortage

    def close(self) -> None:
        with self._ready_lock:
            self._closed = True
            unclaimed = list(self._ready)
            self._ready.clear()
            self._changed.notify_all()
        self._acceptor.close()
        for pipe in unclaimed:
            pipe.abort()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        # The acceptor and the pipes close themselves.
        self._closed = True

    def _is_closed(self) -> ClosedError:
        return ClosedError(f"the listener of the pipe {self._transport!r} is closed")

    def _take(self, pipe: Pipe | None) -> None:
        if pipe is None:
            return
        with self._ready_lock:
            closed, crowded = self._closed, len(self._ready) >= MAX_READY
            if not (closed or crowded):
                self._ready.append(pipe)
                self._shortage = None
                self._changed.notify_all()
        if crowded and not closed:
            logger.warning("a pipe to %s was dropped: %d were not accepted yet", pipe.peer, MAX_READY)
        if closed or crowded:
            pipe.abort()

    def _note_shortage(self, connection: Connection, shortage: ResourceExhaustedError) -> None:
        """A resource ran out, and this connection becomes no pipe. May be extended."""
        decline(connection.sock, shortage)
        with self._ready_lock:
            self._shortage, self._lost_since = shortage, connection.since
            self._changed.notify_all()
