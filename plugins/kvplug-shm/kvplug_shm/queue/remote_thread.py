"""The thread that owns a ZeroMQ socket: no other thread touches it.

ZeroMQ's sockets belong to one thread at a time, and its contexts to one process. Each end of a queue's
network half has a context and a thread of its own; other threads signal it through an eventfd, and an idle
end sleeps. ZeroMQ's events of connections (made, refused, ended) arrive through the socket's monitor.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvplug import KvplugError, TransportError
from kvplug.transport import BackgroundThread, NamedExhaustion, close_after_fork
from kvplug_shm.queue.remote_descriptors import ContextDescriptors

logger = logging.getLogger(__name__)

HANDSHAKE_S: Final = 5.0
"""How long a connection may take to prove itself."""
HIGH_WATER_MARK: Final = 1024
"""High-water mark in frames; the frames in flight stay far below it."""
SETTLE_S: Final = 1.0
"""How long to wait for frames in flight from a dead process, or to one that receives the end."""
_DESCRIPTORS = 14
"""Descriptors of a context and its sockets, and a reserve. ZeroMQ aborts the process if it gets none."""
_THREADS = 2
"""Threads of a context."""
SHORTEST_PATIENCE_S: Final = 0.05
"""The least silence that counts as death, whatever the other end asks for: each heartbeat wakes both ends."""
BEATS_IN_PATIENCE: Final = 5
"""Each end sends this many frames, at least, within the silence that counts as death."""
_EVENTS_A_TURN = 100
"""The most monitor events per pass, so that connections that open and close do not starve the readers."""
CONNECTIONS: Final = (
    zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED
)
"""Events of the monitor: descriptors that were opened and closed."""


@contextlib.contextmanager
def in_words(what: str) -> Iterator[None]:
    """ZeroMQ's errors, mapped to ours."""
    try:
        yield
    except KvplugError:
        raise
    except (zmq.ZMQError, OSError) as e:
        NamedExhaustion.check(e, what)
        raise TransportError(f"{what}: {e.strerror or e}") from e


class SocketThread(abc.ABC):
    """A ZeroMQ socket, its monitor, and the thread that owns both once :meth:`start` was called."""

    def __init__(self, kind: int, name: str, heartbeat_timeout_s: float, events: int = CONNECTIONS) -> None:
        """``events``: the events that the monitor reports, at least :data:`CONNECTIONS`."""
        self._name = name
        self._patience_s = heartbeat_timeout_s
        self._ended = False
        self._linger_s = 0.0
        self._descriptors = ContextDescriptors()
        # So that no thread writes to a number that is another file's by now. A signal's handler may run here.
        self._waking = threading.RLock()
        with in_words(f"{name} cannot be made"):
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            has_context = False
            try:
                NamedExhaustion.ensure_available(name, descriptors=_DESCRIPTORS, threads=_THREADS)
                with self._descriptors.opening() as opened:
                    self._context = zmq.Context()
                    has_context = True
                    with BackgroundThread.affinity():  # ZeroMQ starts its threads with the first socket
                        self._socket: zmq.Socket[bytes] = self._context.socket(kind)
                    self._socket.linger = 0
                    self._socket.sndhwm = self._socket.rcvhwm = HIGH_WATER_MARK
                    self._socket.handshake_ivl = int(HANDSHAKE_S * 1000)
                    self._monitor: zmq.Socket[bytes] = self._context.socket(zmq.PAIR)
                    self._monitor.linger = 0
                    self._watch_connections(events)
                    opened += [each.getsockopt(zmq.FD) for each in (self._socket, self._monitor)]
            except BaseException:
                self._let_go(0) if has_context else os.close(self._wake)
                raise
        self._thread = BackgroundThread(self._run, name=f"kvplug {name}", stop=partial(self.end, 0))
        close_after_fork(self)

    def start(self) -> None:
        """Start the thread, which owns the socket from now on.

        Raises:
            ResourceExhaustedError: the thread cannot be started. Everything was released.
        """
        try:
            self._thread.start()
        except RuntimeError as e:
            self._let_go(0)
            NamedExhaustion.check(e, f"{self._name} cannot be made")
            raise

    def post(self) -> None:
        """Wake the thread. From any thread; never waits."""
        with self._waking:
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def end(self, linger_s: float) -> None:
        """Release everything; sent frames have ``linger_s`` to leave. Idempotent; never waits."""
        if not self._ended:
            self._linger_s = linger_s
            self._ended = True
            self.post()

    def join(self, seconds: float | None) -> None:
        """Wait until everything was released."""
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _after_fork_in_child(self) -> None:
        """In a forked child: ZeroMQ's threads are the parent's, and its objects are not used again. The
        connections to other processes are not ZeroMQ's, and close themselves."""
        self._ended = True
        fd, self._wake = self._wake, -1
        with contextlib.suppress(OSError):
            os.close(fd)
        self._descriptors.close_in_child()

    def _watch_connections(self, events: int) -> None:
        """Without a high-water mark: if an event found no room, ZeroMQ's thread would wait with a lock that
        closing needs while holding the GIL, which would deadlock."""
        self._monitor.rcvhwm = 0  # counts for both ends, and only before they connect
        self._socket.monitor(_MONITOR, events)
        self._monitor.connect(_MONITOR)

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        for each in self._sockets():
            poller.register(each, zmq.POLLIN)
        try:
            while not self._ended:
                pause = self._turn(time.monotonic())
                if not self._ended:
                    poller.poll(None if pause is None else max(0, int(pause * 1000) + 1))
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
        except Exception as e:
            if not self._ended:  # otherwise it may have used objects that others have released
                logger.exception("%s stops: a fault of kvplug", self._name)
                self._failed(e)
        finally:
            self._let_go(int(self._linger_s * 1000))

    def _let_go(self, linger_ms: int) -> None:
        self._ended = True
        if hasattr(self, "_socket"):  # else the context could make none
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disable_monitor()
            for each in self._sockets():
                each.close(linger_ms if each is self._socket else 0)
        self._context.term()
        self._descriptors.clear()
        with self._waking:
            fd, self._wake = self._wake, -1
        os.close(fd)

    def _sockets(self) -> list[Any]:
        """All descriptors to poll, that of the connections first."""
        found = (getattr(self, name, None) for name in ("_socket", "_monitor"))
        return [each for each in found if each is not None]

    @abc.abstractmethod
    def _turn(self, now: float) -> float | None:
        """Do the pending work. Returns how long to sleep at most; ``None``: until an event."""

    @abc.abstractmethod
    def _failed(self, error: Exception) -> None:
        """The thread ends with a fault: fail waiting threads."""

    def _received(self) -> Iterator[list[zmq.Frame]]:
        """The received frames, until there are no more."""
        while True:
            try:
                yield self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return

    def _connection_events(self) -> Iterator[tuple[zmq.Event, int]]:
        """New events of the monitor, at most some, with their descriptor or error."""
        for _ in range(_EVENTS_A_TURN):
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            seen = parse_monitor_message(parts)
            yield zmq.Event(seen["event"]), seen["value"]


_MONITOR = "inproc://connections"  # a context has one
