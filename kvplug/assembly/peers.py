"""Connections to other processes: a control channel, a Hello in both directions, an agreement, then pipes.

The order is always the same: dial or accept an authenticated channel, exchange Hellos, agree (which selects a
transport for each kind of device), and only then load the transport's code, listen, send the contact over the
channel, connect. Each pipe is wrapped once, by :class:`~kvplug.metrics.record.RecordedPipe`.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import attrs

from kvplug.config import Config
from kvplug.engine.context import PeerLink, PeerListener, Peers
from kvplug.errors import (
    BusyError,
    ClosedError,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    WireError,
)
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.record import RecordedPipe
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.handshake.agreement import Agreement
from kvplug.negotiation.handshake.exchange import exchange
from kvplug.negotiation.handshake.hello import Hello
from kvplug.net import liveness
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.threads import BackgroundThread, end_at_exit
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener, dial, dial_until
from kvplug.transport.context import PipeContext
from kvplug.transport.pipe import Pipe, PipeEndpoint, PipeListener

_log = logging.getLogger(__name__)

CONTROL = "control"
"""The purpose bound into the proof of every control channel."""

_MAX_PENDING_HANDSHAKES = 32
_MAX_READY = 128
"""Links or pipes that the program has not accepted yet."""
_LEAVE_S = 2.0
"""How long a pipe may take to become ready after its peer has hung up the control channel."""
_CLOSE_S = 2.0
"""How long ``close`` waits for handshakes that it has just ended."""


T = TypeVar("T")


@attrs.frozen(kw_only=True)
class LinkSettings:
    """The settings that all links of one connector, or of one pipe server, share."""

    config: Config
    credentials: Credentials
    hello: Callable[[str], Hello]
    """Makes the Hello of this end for a purpose."""
    endpoint: Callable[[str, PipeContext], PipeEndpoint]
    """Loads the transport of that name: the only importer of its code."""
    pipe_options: Callable[[str], object]
    stats: TransferStats
    missing: tuple[str, ...] = ()
    """Plugins here that are broken or blocked, with the reason: a missing transport may be one of theirs."""
    wrap_pipe: Callable[[Pipe], Pipe] | None = None
    """Wraps each pipe between the transport and the metrics: fault injection."""

    def pipe_endpoint(self, name: str, device: str) -> PipeEndpoint:
        context = PipeContext(
            options=self.pipe_options(name),
            credentials=self.credentials,
            host=self.config.host,
            device=device,
            timeout_s=self.config.timeout_s,
            heartbeat_timeout_s=self.config.heartbeat_timeout_s,
        )
        return self.endpoint(name, context)

    def agree(self, channel: Channel, purpose: str, timeout: float | None) -> Agreement:
        """Shake hands over the channel, and count it."""
        begun = time.perf_counter()
        try:
            agreement = exchange(channel, self.hello(purpose), timeout=timeout)
        except KvplugError as e:
            self.stats.fail("handshake", reason_of(e))
            if isinstance(e, HandshakeError) and self.missing and _is_of_transports(e):
                raise HandshakeError(*e.reasons, *self.missing, peer=e.peer) from e
            raise
        self.stats.record("handshake", seconds=time.perf_counter() - begun)
        return agreement

    def wrapped(self, pipe: Pipe) -> Pipe:
        if self.wrap_pipe is not None:
            pipe = self.wrap_pipe(pipe)
        return RecordedPipe(pipe, self.stats)


def _is_of_transports(refusal: HandshakeError) -> bool:
    return any(reason.startswith("transport") for reason in refusal.reasons)


class ControlLink(PeerLink):
    """One agreed control channel, and the pipes that are opened over it."""

    def __init__(
        self, settings: LinkSettings, channel: Channel, agreement: Agreement, *, accepted: bool
    ) -> None:
        self.channel = channel
        self.agreement = agreement
        self._settings = settings
        self._accepted = accepted
        self._lock = threading.Lock()
        self._opening: PipeListener | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"<ControlLink with {self.channel.peer}>"

    def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._settings.config.timeout_s)
        # Ends on different kinds of device agreed on a pipe for CPU tensors only, which refuses all others.
        agreed = self.agreement.transports
        device = device if device.partition(":")[0] in agreed else "cpu"
        chosen = agreed[device.partition(":")[0]].chosen
        if self._accepted:
            pipe = self._serve(label, chosen, device, deadline)
        else:
            pipe = self._join(label, chosen, device, deadline)
        return self._settings.wrapped(pipe)

    def _serve(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        try:
            listener = self._settings.pipe_endpoint(transport, device).listen()
        except KvplugError as e:
            self.channel.send({"pipe": label, "error": str(e)}, timeout=deadline.remaining())
            raise
        with self._lock:
            self._opening, closed = listener, self._closed
        if closed:
            listener.close()
        left = threading.Event()
        try:
            self.channel.send({"pipe": label, "contact": listener.contact}, timeout=deadline.remaining())
            with self._when_it_leaves(left, listener):
                return listener.accept(timeout=deadline.remaining())
        except ClosedError as e:
            if left.is_set():
                raise PeerGoneError(f"{self.channel.peer} hung up before it opened the pipe") from e
            raise
        finally:
            self._opening = None
            listener.close()

    @contextlib.contextmanager
    def _when_it_leaves(self, left: threading.Event, listener: PipeListener) -> Iterator[None]:
        """End the wait for a peer that has died. One that has opened its pipe leaves too, so it gets a moment
        first, in which the listener finishes with it.
        """
        over = threading.Event()  # the wait has ended, or the program leaves

        def give_up() -> None:
            if not over.wait(_LEAVE_S):
                left.set()
                listener.close()

        def hung_up(_: str) -> None:
            BackgroundThread(give_up, name="kvplug-give-up", stop=over.set).start()

        with self.channel.socket().dup() as ours:  # another part of the connector may watch the channel's own
            watching = liveness.watch(sock=ours, on_gone=hung_up)
            try:
                yield
            finally:
                watching.close()
                over.set()

    def _join(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        offer = self.channel.recv(timeout=deadline.remaining())
        if not isinstance(offer, dict) or offer.get("pipe") != label:
            raise WireError(f"{self.channel.peer} was to open the pipe {label!r} and sent something else")
        if "contact" not in offer:
            raise HandshakeError(
                f"it cannot listen on {transport!r}: {offer.get('error')}", peer=str(self.channel.peer)
            )
        endpoint = self._settings.pipe_endpoint(transport, device)
        return endpoint.connect(str(offer["contact"]), timeout=deadline.remaining())

    def close(self) -> None:
        with self._lock:
            self._closed, listener = True, self._opening
        self.channel.close()
        if listener is not None:
            listener.close()


class LinkServer(Generic[T]):
    """Accepts channels, shakes hands with each peer, and makes of each link what is wanted, concurrently.

    Each peer has a short-lived thread and a deadline of its own, so one that is stopped or dies half-way
    delays no other; what fails is logged and counted. ``complete`` makes the result of a link, by a deadline;
    ``drop`` ends a result that was not accepted.
    """

    def __init__(
        self,
        settings: LinkSettings,
        listener: Listener,
        complete: Callable[[ControlLink, Deadline], T],
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
        self._thread = BackgroundThread(self._accept_all, name="kvplug-accept", stop=listener.close)
        self._thread.start()

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> T:
        """The next result.

        Raises:
            TimeoutError: no peer came in time. Those that are on their way are not disturbed.
            ClosedError: this end is closed, also when that happens during the wait.
        """
        deadline = Deadline.after(timeout, self._settings.config.timeout_s)
        seconds = deadline.remaining()  # as far as the message goes; without an end there is none
        try:
            result = None if self._closed.is_set() else self._ready.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no peer came to {self._listener!r} within {seconds:.3g} s") from None
        if result is None:
            self._ready.put(None)  # wakes the next thread that waits
            raise ClosedError("this listener is closed")
        return result

    def close(self) -> None:
        """Stop listening, and end what is under way or was not accepted. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.close()
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

    def _drop_ready(self) -> None:
        while True:
            try:
                result = self._ready.get_nowait()
            except queue.Empty:
                break
            if result is not None:
                self._drop(result)

    def _accept_all(self) -> None:
        while not self._closed.is_set():
            try:
                connection = self._listener.accept(timeout=None)
            except ClosedError:
                return
            except KvplugError as e:
                _log.warning("accepting a control channel failed: %s", e)
                continue
            try:
                self._begin(connection)
            except Exception as e:  # out of descriptors or threads, say: the listener outlives it
                _log.warning("a control channel from %s is turned away: %s", connection.describe, e)
                self._settings.stats.fail("handshake", reason_of(e))
                connection.close()

    def _begin(self, connection: Connection) -> None:
        """Serve one peer in a thread of its own.

        Raises:
            BusyError: too many peers are served, or were not accepted yet.
            OSError, RuntimeError: this process has too many descriptors or threads.
        """
        channel = Channel(connection)
        thread = BackgroundThread(
            self._serve,
            args=(channel,),
            name="kvplug-handshake",
            stop=lambda: self._under_way.get(thread, channel).close(),
        )
        with self._lock:
            refused = self._closed.is_set() or len(self._under_way) >= _MAX_PENDING_HANDSHAKES
            if not refused:
                self._under_way[thread] = channel
        try:
            if refused:
                raise BusyError("too many handshakes are under way")
            if self._ready.qsize() >= _MAX_READY:
                raise BusyError(f"this program has not accepted the {_MAX_READY} peers before it")
            thread.start()
        except BaseException:
            with self._lock:
                self._under_way.pop(thread, None)
            channel.close()
            raise

    def _serve(self, channel: Channel) -> None:
        thread, result = threading.current_thread(), None
        link: Channel | ControlLink = channel
        deadline = Deadline.after(self._settings.config.timeout_s)
        try:
            agreement = self._settings.agree(channel, "", deadline.remaining())
            link = ControlLink(self._settings, channel, agreement, accepted=True)
            with self._lock:
                self._under_way[thread] = link
                if self._closed.is_set():
                    raise ClosedError("this listener is closed")
            result = self._complete(link, deadline)
        except KvplugError as e:
            if not self._closed.is_set():
                _log.warning("%s with %s: %s", _step(link), channel.peer, e)
        except Exception:
            _log.exception("%s with %s: a fault of kvplug or a plugin", _step(link), channel.peer)
        finally:
            with self._lock:
                self._under_way.pop(thread, None)
            if result is None:
                link.close()
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

    def listen(self) -> LinkListener:
        return self._listening(LinkListener(self._settings, self._bound()))

    def serve(
        self, complete: Callable[[ControlLink, Deadline], T], drop: Callable[[T], None]
    ) -> LinkServer[T]:
        """As :meth:`listen`, for what ``complete`` makes of each link."""
        return self._listening(LinkServer(self._settings, self._bound(), complete, drop))

    def _bound(self) -> Listener:
        address = self._listen or self._settings.config.control_address(self._rank)
        return Listener.open(address, self._settings.credentials, CONTROL)

    def _listening(self, listener: AnyServer) -> AnyServer:
        with self._lock:
            self._listeners.append(listener)
            closed = self._closed.is_set()
        if closed:
            listener.close()
            raise ClosedError("this connector was shut down")
        return listener

    def address_of(self, rank: int) -> str:
        """The address or contact of the peer engine's worker ``rank``."""
        if self._connect is None:
            return self._settings.config.control_address(rank)
        if rank not in self._connect:
            known = ", ".join(str(known) for known in sorted(self._connect))
            raise HandshakeError(f"no contact is known for rank {rank} of the peer engine, only for {known}")
        return self._connect[rank]

    def connect(
        self, rank: int, purpose: str, timeout: Timeout = DEFAULT_TIMEOUT, *, retry: bool = True
    ) -> ControlLink:
        if self._closed.is_set():
            raise ClosedError("this connector was shut down")
        deadline = Deadline.after(timeout, self._settings.config.connect_timeout_s)
        address, credentials = self.address_of(rank), self._settings.credentials
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
            agreement = self._settings.agree(channel, purpose, deadline.remaining())
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
