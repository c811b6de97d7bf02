"""Connections to other processes: a control channel, a Hello in both directions, an agreement, then pipes."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from kvplug.assembly.examination.answering import answer
from kvplug.assembly.links import ControlLink, LinkSettings, is_examined_by
from kvplug.engine.context import PeerListener, Peers, PeerServer
from kvplug.errors import (
    ClosedError,
    HandshakeError,
    KvplugError,
    ResourceExhaustedError,
    TimeoutError,
)
from kvplug.metrics.reasons import reason_of
from kvplug.negotiation.handshake.hello import DOCTOR
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import exhaustion_of, raise_if_exhausted
from kvplug.net.fork import close_after_fork
from kvplug.net.threads import BackgroundThread, end_at_exit
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection, dial, dial_until
from kvplug.net.trust.listener import Listener

_log = logging.getLogger(__name__)

CONTROL = "control"
"""The purpose bound into the proof of every control channel."""

_MAX_PEERS = 128
"""Peers that are being served, and those that the program has not accepted yet. Others wait."""
_CLOSE_S = 2.0
"""How long ``close`` waits for handshakes that it has just ended."""


T = TypeVar("T")


class LinkServer(PeerServer, Generic[T]):
    """Accepts channels, shakes hands with each peer, and makes of each link what is wanted, concurrently.

    Each peer has a short-lived thread and a deadline of its own, so one that is stopped or dies half-way
    delays no other; what fails is logged and counted. Peers beyond the first 128 wait. ``complete`` makes the
    result of a link, by a deadline; ``drop`` ends a result that was not accepted. Without a result the link
    ends.
    """

    def __init__(
        self,
        settings: LinkSettings,
        listener: Listener,
        complete: Callable[[ControlLink, Deadline], T | None],
        drop: Callable[[T], None],
    ) -> None:
        self.contact = listener.contact
        self._settings = settings
        self._listener = listener
        self._complete = complete
        self._drop = drop
        self._ready: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._under_way: dict[threading.Thread, Channel | ControlLink] = {}
        self._places = threading.Semaphore(_MAX_PEERS)
        self._shortage: ResourceExhaustedError | None = None
        """Why the latest peer could not be served; ``None``: it could."""
        self._said = ""
        """The latest failed handshake, as it was logged: a peer that tries again is logged once."""
        self._thread = BackgroundThread(self._accept_all, name="kvplug-accept", stop=self._stop_accepting)
        try:
            self._thread.start()
        except BaseException as e:
            listener.close()
            raise_if_exhausted(e, "a listener needs a thread that takes connections")
            raise

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> T:
        """The next result.

        Raises:
            TimeoutError: no peer came in time. Those that are on their way are not disturbed.
            ResourceExhaustedError: nor could the latest one be served, for lack of a resource.
            ClosedError: this end is closed, also when that happens during the wait.
        """
        deadline = Deadline.after(timeout, self._settings.config.timeout_s)
        seconds = deadline.remaining()  # as far as the message goes; without an end there is none
        try:
            result = None if self._closed.is_set() else self._ready.get(timeout=seconds)
        except queue.Empty:
            shortage, self._shortage = self._shortage, None
            if shortage is not None:
                raise shortage from None
            self._listener.check_shortage()
            raise TimeoutError(f"no peer came to {self._listener!r} within {seconds:.3g} s") from None
        if result is None:
            self._ready.put(None)  # wakes the next thread that waits
            raise ClosedError("this listener is closed")
        self._places.release()
        return result

    def close(self) -> None:
        """Stop listening, and end what is under way or was not accepted. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._stop_accepting()
        self._ready.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        with self._lock:
            under_way = list(self._under_way.items())
        for _, link in under_way:
            link.close()
        deadline = Deadline.after(_CLOSE_S)
        for thread, _ in under_way:
            thread.join(deadline.remaining())
        self._drop_ready()
        self._ready.put(None)

    def _stop_accepting(self) -> None:
        self._places.release()  # the thread may be waiting for one
        self._listener.close()

    def _drop_ready(self) -> None:
        while True:
            try:
                result = self._ready.get_nowait()
            except queue.Empty:
                break
            if result is not None:
                self._drop(result)

    def _accept_all(self) -> None:
        while True:
            self._places.acquire()
            try:
                connection = self._listener.accept(timeout=None)
            except ClosedError:
                return
            except KvplugError as e:
                _log.warning("accepting a control channel failed: %s", e)
                self._places.release()
                continue
            try:
                self._begin(connection)
            except Exception as e:  # the listener outlives it
                self._shortage = exhaustion_of(e, f"serving {connection.describe}")
                error = self._shortage or e
                _log.warning("a control channel from %s is turned away: %s", connection.describe, error)
                self._settings.stats.fail("handshake", reason_of(error))
                connection.close()
                self._places.release()

    def _begin(self, connection: Connection) -> None:
        """Serve one peer in a thread of its own.

        Raises:
            ClosedError: this end is closed.
            ResourceExhaustedError, RuntimeError: this process has too many descriptors or threads.
        """
        channel = Channel(connection)
        thread = BackgroundThread(
            self._serve,
            args=(channel,),
            name="kvplug-handshake",
            stop=lambda: self._under_way.get(thread, channel).close(),
        )
        with self._lock:
            closed = self._closed.is_set()
            if not closed:
                self._under_way[thread] = channel
        try:
            if closed:
                raise ClosedError("this listener is closed")
            thread.start()
        except BaseException as e:
            with self._lock:
                self._under_way.pop(thread, None)
            if shortage := exhaustion_of(e, "serving this channel"):
                channel.decline(shortage)
            channel.close()
            raise

    def _serve(self, channel: Channel) -> None:
        thread, result = threading.current_thread(), None
        link: Channel | ControlLink = channel
        deadline = Deadline.after(self._settings.config.timeout_s)
        try:
            agreement = self._settings.agree(channel, "", deadline.remaining())
            settings = self._settings.uncounted() if agreement.purpose == DOCTOR else self._settings
            link = ControlLink(settings, channel, agreement, accepted=True)
            with self._lock:
                self._under_way[thread] = link
                if self._closed.is_set():
                    raise ClosedError("this listener is closed")
            if agreement.purpose == DOCTOR:
                answer(self._settings, channel, link)
            else:
                result = self._complete(link, deadline)
            self._shortage = None
        except KvplugError as e:
            self._shortage = exhaustion_of(e)
            if is_examined_by(e):
                _log.info("a doctor's handshake with %s: %s", channel.peer, e)
                answer(self._settings, channel, None)
            elif not self._closed.is_set():
                said = f"{_step(link)} with {channel.peer}: {e}"
                _log.log(logging.DEBUG if said == self._said else logging.WARNING, "%s", said)
                self._said = said
        except Exception as e:
            self._shortage = exhaustion_of(e, f"serving {channel.peer}")
            if self._shortage is None:
                _log.exception("%s with %s: a fault of kvplug or a plugin", _step(link), channel.peer)
            else:
                _log.warning("%s with %s: %s", _step(link), channel.peer, self._shortage)
        finally:
            with self._lock:
                self._under_way.pop(thread, None)
            if result is None:
                link.close()
                self._places.release()
            else:
                self._ready.put(result)
                if self._closed.is_set():
                    self._drop_ready()
                    self._ready.put(None)


def _step(link: Channel | ControlLink) -> str:
    return "no agreement" if isinstance(link, Channel) else "no pipe"


class LinkListener(LinkServer[ControlLink], PeerListener):
    """Accepts links; what is opened over each is the caller's."""

    def __init__(self, settings: LinkSettings, listener: Listener) -> None:
        super().__init__(settings, listener, lambda link, _: link, ControlLink.close)


AnyServer = TypeVar("AnyServer", bound=LinkServer[Any])


class ControlPeers(Peers):
    """Peers reached over control channels at the config's addresses, or at those passed in."""

    def __init__(
        self,
        settings: LinkSettings,
        *,
        rank: int = 0,
        listen: str | None = None,
        connect: str | Mapping[int, str] | None = None,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._listen = listen
        self._connect = {0: connect} if isinstance(connect, str) else connect
        self._lock = threading.Lock()
        self._listeners: list[LinkServer[Any]] = []
        self._shaking: set[Channel] = set()
        self._closed = threading.Event()
        end_at_exit(self)
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self._closed.set()

    def listen(self) -> LinkListener:
        return self._listening(LinkListener(self._settings, self._bound()))

    def serve(
        self,
        serve_link: Callable[[ControlLink, Deadline], T | None],
        drop: Callable[[T], None] = lambda result: None,
    ) -> LinkServer[T]:
        """As :meth:`Peers.serve`. What ``serve_link`` returns is accepted from the server, or dropped."""
        return self._listening(LinkServer(self._settings, self._bound(), serve_link, drop))

    def _bound(self) -> Listener:
        address = self._listen or self._settings.config.control_address(self._rank)
        listener = Listener.open(address, self._settings.credentials, CONTROL)
        _log.info("listening for peers at %s", listener.contact)
        return listener

    def _listening(self, listener: AnyServer) -> AnyServer:
        with self._lock:
            self._listeners.append(listener)
            closed = self._closed.is_set()
        if closed:
            listener.close()
            raise ClosedError("this connector was shut down")
        return listener

    def address_of(self, rank: int, peer: str | Mapping[int, str] | None = None) -> str:
        if isinstance(peer, str):
            return self._settings.config.address_beside(peer, rank)
        contacts = self._connect if peer is None else peer
        if contacts is None:
            return self._settings.config.control_address(rank)
        if rank not in contacts:
            known = ", ".join(str(known) for known in sorted(contacts))
            raise HandshakeError(f"no contact is known for rank {rank} of the peer engine, only for {known}")
        return contacts[rank]

    def connect(
        self,
        rank: int,
        purpose: str,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        retry: bool = True,
        peer: str | Mapping[int, str] | None = None,
    ) -> ControlLink:
        if self._closed.is_set():
            raise ClosedError("this connector was shut down")
        deadline = Deadline.after(timeout, self._settings.config.connect_timeout_s)
        address, _, announced = self.address_of(rank, peer).partition("#")
        credentials = self._settings.credentials
        if retry:
            connection = dial_until(address, credentials, CONTROL, deadline, stop=self._closed)
        else:
            connection = dial(address, credentials, CONTROL, deadline.remaining())
        channel = Channel(connection)
        with self._lock:
            self._shaking.add(channel)
        try:
            if self._closed.is_set():
                raise ClosedError("this connector was shut down")
            agreement = self._settings.agree(channel, purpose, deadline.remaining(), announced)
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._shaking.discard(channel)
        return ControlLink(self._settings, channel, agreement, accepted=False)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            listeners, self._listeners = self._listeners, []
            shaking = list(self._shaking)
        for channel in shaking:
            channel.close()
        for listener in listeners:
            listener.close()

    def _end_at_exit(self) -> None:
        self.close()

    def _is_in_use(self) -> bool:
        return False  # what it waits in are sockets
