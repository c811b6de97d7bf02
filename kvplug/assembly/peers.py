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
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import attrs

from kvplug.config import Config
from kvplug.engine.context import PeerLink, PeerListener, Peers
from kvplug.errors import (
    ClosedError,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    WireError,
)
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.record import RecordedPipe
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.handshake.agreement import Agreement
from kvplug.negotiation.handshake.exchange import exchange
from kvplug.negotiation.handshake.hello import Hello
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion, exhaustion_of, raise_if_exhausted
from kvplug.net.peer_text import peer_text
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

_MAX_PEERS = 128
"""Peers that are being served, and those that the program has not accepted yet. Others wait."""
_LAST_WORD_S = 0.5
"""How long a peer that has hung up in the middle may take to say that it lacked a resource."""
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
            max_message_bytes=self.config.max_message_bytes,
        )
        return self.endpoint(name, context)

    def agree(self, channel: Channel, purpose: str, timeout: float | None) -> Agreement:
        """Shake hands over the channel, and count it."""
        begun = time.perf_counter()
        try:
            try:
                hello = self.hello(purpose)
            except ResourceExhaustedError as e:
                channel.decline(e)
                raise
            agreement = exchange(channel, hello, timeout=timeout)
        except KvplugError as e:
            self.stats.fail("handshake", reason_of(e))
            if isinstance(e, HandshakeError) and self.missing and _is_of_transports(e):
                raise HandshakeError(*e.reasons, *self.missing, peer=e.peer) from e
            raise
        self.stats.record("handshake", seconds=time.perf_counter() - begun)
        pipes = ", ".join(
            f"{device} tensors by {found.chosen}" for device, found in agreement.transports.items()
        )
        _log.info(
            "agreed with %s (engine %s) for %s: %s",
            channel.peer,
            agreement.remote.engine_id,
            agreement.purpose or "a pipe",
            pipes or "no tensors",
        )
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

    @NamedExhaustion("opening a pipe")
    def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._settings.config.timeout_s)
        # Ends on different kinds of device agreed on a pipe for CPU tensors only, which refuses all others.
        agreed = self.agreement.transports
        device = device if device.partition(":")[0] in agreed else "cpu"
        chosen = agreed[device.partition(":")[0]].chosen
        try:
            if self._accepted:
                pipe = self._serve(label, chosen, device, deadline)
            else:
                pipe = self._join(label, chosen, device, deadline)
        except PeerGoneError:
            self.channel.check_not_declined(_LAST_WORD_S)
            raise
        except Exception as e:
            if self._accepted and (shortage := exhaustion_of(e, f"opening the pipe {label!r}")):
                self.channel.decline(shortage)
            raise
        return self._settings.wrapped(pipe)

    def _serve(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        try:
            listener = self._settings.pipe_endpoint(transport, device).listen()
        except KvplugError as e:
            if exhaustion_of(e) is None:
                self.channel.send({"pipe": label, "error": str(e)}, timeout=deadline.remaining())
            raise
        with self._lock:
            self._opening, closed = listener, self._closed
        if closed:
            listener.close()
        try:
            self.channel.send({"pipe": label, "contact": listener.contact}, timeout=deadline.remaining())
            outcome = _Outcome(self.channel, label, listener, deadline)
            try:
                pipe = listener.accept(timeout=deadline.remaining())
            except ClosedError as e:
                raise outcome.wait() or e from e
            if (error := outcome.wait()) is not None:
                pipe.abort()
                raise error
            return pipe
        finally:
            self._opening = None
            listener.close()

    def _join(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        offer = self.channel.recv(timeout=deadline.remaining())
        if not isinstance(offer, dict) or offer.get("pipe") != label:
            raise WireError(f"{self.channel.peer} was to open the pipe {label!r} and sent something else")
        if "contact" not in offer:
            why = peer_text(offer.get("error"))
            raise HandshakeError(f"it cannot listen on {transport!r}: {why}", peer=str(self.channel.peer))
        try:
            endpoint = self._settings.pipe_endpoint(transport, device)
            pipe = endpoint.connect(str(offer["contact"]), timeout=deadline.remaining())
        except Exception as e:
            shortage = exhaustion_of(e)
            lacks = shortage.resource if shortage is not None else ""
            with contextlib.suppress(KvplugError):  # the other end waits for a pipe that does not come
                answer = {"pipe": label, "error": str(e), "lacks": lacks}
                self.channel.send(answer, timeout=deadline.remaining())
            raise
        try:
            self.channel.send({"pipe": label, "joined": True}, timeout=deadline.remaining())
        except BaseException:
            pipe.abort()
            raise
        return pipe

    def close(self) -> None:
        with self._lock:
            self._closed, listener = True, self._opening
        self.channel.close()
        if listener is not None:
            listener.close()


class _Outcome:
    """What became of a pipe at the end that connects: it tells over the channel, also why there is none.

    A thread waits for that. Where there is no pipe it closes the listener, so that nothing waits for it.
    """

    def __init__(self, channel: Channel, label: str, listener: PipeListener, deadline: Deadline) -> None:
        self._channel = channel
        self._label = label
        self._listener = listener
        self._deadline = deadline
        self._error: KvplugError | None = None
        self._thread = BackgroundThread(self._run, name="kvplug-pipe-outcome", stop=channel.close)
        self._thread.start()

    def wait(self) -> KvplugError | None:
        """Why there is no pipe; ``None`` if there is one."""
        left = self._deadline.remaining()
        self._thread.join(None if left is None else left + 1.0)
        if self._thread.is_alive():
            return TimeoutError(f"{self._channel.peer} did not say in time that it joined the pipe")
        return self._error

    def _run(self) -> None:
        peer = self._channel.peer
        try:
            outcome = self._channel.recv(timeout=self._deadline.remaining())
            if not isinstance(outcome, dict) or outcome.get("pipe") != self._label:
                raise WireError(f"{peer} was to join the pipe {self._label!r} and sent something else")
            if "joined" not in outcome:
                why = peer_text(outcome.get("error"))
                if lacks := outcome.get("lacks"):
                    text = f"{peer} cannot join the pipe: {why}"
                    raise ResourceExhaustedError(text, resource=peer_text(lacks))
                raise HandshakeError(f"it cannot join the pipe: {why}", peer=str(peer))
        except PeerGoneError as e:
            self._error = PeerGoneError(f"{peer} hung up before it opened the pipe")
            self._error.__cause__ = e
        except KvplugError as e:
            self._error = e
        if self._error is not None:
            self._listener.close()


class LinkServer(Generic[T]):
    """Accepts channels, shakes hands with each peer, and makes of each link what is wanted, concurrently.

    Each peer has a short-lived thread and a deadline of its own, so one that is stopped or dies half-way
    delays no other; what fails is logged and counted. Peers beyond the first 128 wait. ``complete`` makes the
    result of a link, by a deadline; ``drop`` ends a result that was not accepted.
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
        self._places = threading.Semaphore(_MAX_PEERS)
        self._shortage: ResourceExhaustedError | None = None
        """Why the latest peer could not be served; ``None``: it could."""
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
            link = ControlLink(self._settings, channel, agreement, accepted=True)
            with self._lock:
                self._under_way[thread] = link
                if self._closed.is_set():
                    raise ClosedError("this listener is closed")
            result = self._complete(link, deadline)
            self._shortage = None
        except KvplugError as e:
            self._shortage = exhaustion_of(e)
            if not self._closed.is_set():
                _log.warning("%s with %s: %s", _step(link), channel.peer, e)
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

    def listen(self) -> LinkListener:
        return self._listening(LinkListener(self._settings, self._bound()))

    def serve(
        self, complete: Callable[[ControlLink, Deadline], T], drop: Callable[[T], None]
    ) -> LinkServer[T]:
        """As :meth:`listen`, for what ``complete`` makes of each link."""
        return self._listening(LinkServer(self._settings, self._bound(), complete, drop))

    def _bound(self) -> Listener:
        address = self._listen or self._settings.config.control_address(self._rank)
        listener = Listener.open(address, self._settings.credentials, CONTROL)
        _log.info("listening for peers at %s", listener.address)
        return listener

    def _listening(self, listener: AnyServer) -> AnyServer:
        with self._lock:
            self._listeners.append(listener)
            closed = self._closed.is_set()
        if closed:
            listener.close()
            raise ClosedError("this connector was shut down")
        return listener

    def address_of(self, rank: int, peer: str | None = None) -> str:
        """The address or contact of a peer engine's worker ``rank``."""
        if peer is not None:
            return self._settings.config.address_beside(peer, rank)
        if self._connect is None:
            return self._settings.config.control_address(rank)
        if rank not in self._connect:
            known = ", ".join(str(known) for known in sorted(self._connect))
            raise HandshakeError(f"no contact is known for rank {rank} of the peer engine, only for {known}")
        return self._connect[rank]

    def connect(
        self,
        rank: int,
        purpose: str,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        retry: bool = True,
        peer: str | None = None,
    ) -> ControlLink:
        if self._closed.is_set():
            raise ClosedError("this connector was shut down")
        deadline = Deadline.after(timeout, self._settings.config.connect_timeout_s)
        address, credentials = self.address_of(rank, peer), self._settings.credentials
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
