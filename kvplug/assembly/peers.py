"""Connections to other processes: a control channel, a Hello in both directions, an agreement, then pipes.

The order is always the same: dial or accept an authenticated channel, exchange Hellos, agree (which selects a
transport for each kind of device), and only then load the transport's code, listen, send the contact over the
channel, connect. Each pipe is wrapped once, by :class:`~kvplug.metrics.record.RecordedPipe`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from kvplug.config import Config
from kvplug.engine.context import PeerLink, PeerListener, Peers
from kvplug.errors import BusyError, ClosedError, HandshakeError, KvplugError, TimeoutError, WireError
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.record import RecordedPipe
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.handshake.agreement import Agreement
from kvplug.negotiation.handshake.exchange import exchange
from kvplug.negotiation.handshake.hello import Hello
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
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
_CLOSE_S = 2.0
"""How long ``close`` waits for handshakes that it has just ended."""


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
        try:
            self.channel.send({"pipe": label, "contact": listener.contact}, timeout=deadline.remaining())
            return listener.accept(timeout=deadline.remaining())
        finally:
            self._opening = None
            listener.close()

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


class LinkListener(PeerListener):
    """Accepts channels and shakes hands with each in its own short-lived thread.

    So a peer that is stopped in the middle of its handshake delays no other.
    """

    def __init__(self, settings: LinkSettings, listener: Listener) -> None:
        self.contact = listener.contact
        self._settings = settings
        self._listener = listener
        self._ready: queue.SimpleQueue[ControlLink | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._shaking: dict[Channel, threading.Thread] = {}
        """Handshakes under way."""
        self._thread = threading.Thread(target=self._accept_all, name="kvplug-accept", daemon=True)
        self._thread.start()

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> ControlLink:
        deadline = Deadline.after(timeout, self._settings.config.timeout_s)
        seconds = deadline.remaining()  # as far as the message goes; without an end there is none
        try:
            link = None if self._closed.is_set() else self._ready.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no peer came to {self._listener!r} within {seconds:.3g} s") from None
        if link is None:
            self._ready.put(None)  # wakes the next thread that waits
            raise ClosedError("this listener is closed")
        return link

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        self._listener.close()
        self._ready.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=5)
        with self._lock:
            shaking = list(self._shaking.items())
        for channel, _ in shaking:
            channel.close()
        deadline = Deadline.after(_CLOSE_S)
        for _, thread in shaking:
            thread.join(deadline.remaining())
        while True:  # links that were not accepted
            try:
                link = self._ready.get_nowait()
            except queue.Empty:
                break
            if link is not None:
                link.close()
        self._ready.put(None)

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
        """Shake hands in a thread of its own.

        Raises:
            BusyError: too many handshakes are under way.
            OSError, RuntimeError: this process has too many descriptors or threads.
        """
        channel = Channel(connection)
        thread = threading.Thread(
            target=self._shake_hands, args=(channel,), name="kvplug-handshake", daemon=True
        )
        with self._lock:
            refused = self._closed.is_set() or len(self._shaking) >= _MAX_PENDING_HANDSHAKES
            if not refused:
                self._shaking[channel] = thread
        try:
            if refused:
                raise BusyError("too many handshakes are under way")
            thread.start()
        except BaseException:
            with self._lock:
                self._shaking.pop(channel, None)
            channel.close()
            raise

    def _shake_hands(self, channel: Channel) -> None:
        link = None
        try:
            agreement = self._settings.agree(channel, "", self._settings.config.timeout_s)
            link = ControlLink(self._settings, channel, agreement, accepted=True)
        except KvplugError as e:
            if not self._closed.is_set():
                _log.warning("no agreement with %s: %s", channel.peer, e)
        except Exception:
            _log.exception("the handshake with %s failed: a fault of kvplug or a plugin", channel.peer)
        finally:
            with self._lock:
                self._shaking.pop(channel, None)
            if link is None:
                channel.close()
            else:
                self._ready.put(link)
                if self._closed.is_set():
                    link.close()


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
        self._listeners: list[LinkListener] = []
        self._shaking: set[Channel] = set()
        self._closed = threading.Event()

    def listen(self) -> LinkListener:
        config = self._settings.config
        address = self._listen or config.control_address(self._rank)
        listener = LinkListener(self._settings, Listener.open(address, self._settings.credentials, CONTROL))
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
