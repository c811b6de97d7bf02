"""One agreed control channel between two processes, and the pipes that are opened over it.

Both ends first agree on a transport for each kind of device. Only then is the transport's code loaded: one
end listens and sends the contact over the channel, and the other end connects. Each pipe is measured by one
:class:`~kvplug.metrics.record.PipeRecorder`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

import attrs

from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.assembly.slow_path import SlowPathAlarm
from kvplug.assembly.state import LinkState, PipeState, ProcessState
from kvplug.config.config import Config
from kvplug.engine.context import PeerLink
from kvplug.errors import (
    ClosedError,
    HandshakeError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
    WireError,
)
from kvplug.metrics.reasons import reason_of
from kvplug.metrics.record import PipeRecorder
from kvplug.metrics.spans import SpanLog
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.agreement import Agreement
from kvplug.negotiation.exchange import exchange
from kvplug.negotiation.hello import DOCTOR, EngineFacts, Hello
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.log import LogEvent
from kvplug.net.peer_text import peer_text
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire import from_plain, to_plain
from kvplug.transport.pipe import Pipe, PipeListener

_log = logging.getLogger(__name__)

CONTROL = "control"
"""The purpose that the authentication of every control channel is bound to."""
_LAST_WORD_S = 0.5
"""How long to wait for a peer that hung up to report that it lacked a resource."""
_ACCEPT_S = 5.0
"""How long accepting a pipe may take after the other end joined. It takes a moment, unless it fails."""


def unreported() -> Callable[[bool], object]:
    """Serve as the ``on_pipe`` of links whose pipes no reporter counts."""
    return lambda may_wait: None


@attrs.frozen(kw_only=True)
class LinkSettings:
    """The settings that all links of one connector, or of one pipe server, share."""

    resolved: ResolvedConfig
    config: Config = attrs.field(default=attrs.Factory(lambda self: self.resolved.config, takes_self=True))
    credentials: Credentials = attrs.field(
        default=attrs.Factory(lambda self: self.resolved.credentials, takes_self=True)
    )
    """Loaded with the settings, so that an address without its required secret is refused at start."""
    stats: TransferStats = attrs.field(factory=TransferStats)
    spans: SpanLog = attrs.field(factory=SpanLog)
    engine: EngineFacts | None = None
    """Facts of the engine whose connector owns the links; ``None`` without an engine."""
    moves_kv: bool = True
    device: str = "cpu"
    """The device type of the tensors that the two ends want to move."""
    wrap_pipe: Callable[[Pipe], Pipe] | None = None
    """Wraps each pipe between the transport and the metrics, for fault injection."""
    engine_facts: Mapping[str, str | int] = attrs.field(factory=dict)
    """Facts of an engine that is not running, given to `kvplug doctor --serve` for a doctor to compare."""
    state: ProcessState = attrs.field(
        default=attrs.Factory(lambda self: ProcessState(self.stats), takes_self=True)
    )
    """Describes the links and pipes to programs that watch this process."""
    on_pipe: Callable[[], Callable[[bool], object]] = unreported
    """Called for each pipe that is opened; see ``on_end`` of :class:`~kvplug.metrics.record.PipeRecorder`."""

    def uncounted(self) -> LinkSettings:
        """Return the settings for a doctor's link, whose pipes are neither counted nor compared."""
        config = attrs.evolve(self.config, slow_path="off")
        stats = TransferStats()
        state = ProcessState(stats)
        return attrs.evolve(self, config=config, stats=stats, state=state, on_pipe=unreported)

    def hello(self, purpose: str) -> Hello:
        """Return the Hello of this end for a purpose."""
        return make_hello(self.resolved, self.engine, self.moves_kv, self.device, purpose)

    def agree(self, channel: Channel, purpose: str, timeout: float | None, announced: str = "") -> Agreement:
        """Perform and count the handshake. ``announced`` is passed to ``exchange``."""
        begun = time.perf_counter()
        try:
            try:
                hello = self.hello(purpose)
            except ResourceExhaustedError as e:
                channel.decline(e)
                raise
            agreement = exchange(channel, hello, timeout=timeout, announced=announced)
        except KvplugError as e:
            if not is_examined_by(e):
                self.stats.fail("handshake", reason_of(e))
            # A plugin that did not load may offer the missing transport.
            missing = self.resolved.registry.failures()
            if isinstance(e, HandshakeError) and missing and any(map(_is_of_transports, e.reasons)):
                more = HandshakeError(*e.reasons, *missing, peer=e.peer)
                more.remote = e.remote
                raise more from e
            raise
        self.stats.record("handshake", seconds=time.perf_counter() - begun)
        transports = {device: found.chosen for device, found in agreement.transports.items()}
        pipes = ", ".join(f"{device} tensors by {chosen}" for device, chosen in transports.items())
        purpose, engine_id = agreement.purpose, agreement.remote.engine_id
        about = f"for {purpose or 'a pipe'}: {pipes or 'no tensors'}"
        LogEvent.AGREED.log(
            _log,
            f"agreed with {channel.peer} (engine {engine_id}) {about}",
            peer=channel.peer,
            engine_id=engine_id,
            purpose=purpose,
            transports=transports,
        )
        return agreement

    def wrapped(self, pipe: Pipe, agreement: Agreement, transport: str, device: str) -> Pipe:
        """Prepare a pipe for its user: count its transfers, and compare its rate with the expected one.

        Raises:
            SlowPathError: the pipe is already too slow, and the config refuses slow paths. The pipe is
                aborted.
        """
        alarm = SlowPathAlarm(
            config=self.config,
            stats=self.stats,
            abilities=self.resolved.abilities,
            agreement=agreement,
            transport=transport,
            device=device,
        )
        try:
            watch = alarm.watch(pipe)
            if pipe.route:
                self.stats.opened(pipe.route)
            if self.wrap_pipe is not None:
                pipe = self.wrap_pipe(pipe)
            on_end = self.on_pipe()
        except BaseException:
            pipe.abort()
            raise
        pipe.recorder = PipeRecorder(self.stats, on_end, watch)
        self.state.add(pipe, partial(PipeState.of, transport=transport, device=device))
        return pipe


def is_examined_by(error: KvplugError) -> bool:
    """Whether the failed handshake was a doctor's. A doctor gets the reasons; the failure is not counted."""
    remote = error.remote if isinstance(error, HandshakeError) else None
    return isinstance(remote, Hello) and remote.purpose == DOCTOR


def _is_of_transports(reason: str) -> bool:
    return reason.startswith("transport")  # the peer's reasons are plain texts


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
        self._outcome: _Outcome | None = None
        self._closed = False
        settings.state.add(self, LinkState.of)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

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
                return self._serve(label, chosen, device, deadline)
            return self._join(label, chosen, device, deadline)
        except Exception as e:
            if self._accepted and (shortage := NamedExhaustion.of(e, f"opening the pipe {label!r}")):
                self.channel.decline(shortage)
            if self._outcome is not None:  # its thread must stop receiving before the caller uses the channel
                error = self._outcome.wait() or e
                is_why = isinstance(e, ClosedError | PeerGoneError) or isinstance(error, TimeoutError)
                if is_why and error is not e:
                    raise error from e
            elif isinstance(e, PeerGoneError):
                self.channel.check_not_declined(_LAST_WORD_S)
            raise

    def _wrapped(self, pipe: Pipe, transport: str, device: str) -> Pipe:
        return self._settings.wrapped(pipe, self.agreement, transport, device.partition(":")[0])

    def _serve(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        self._outcome = None
        try:
            listener = self._settings.resolved.pipe_endpoint(transport, device).listen()
        except KvplugError as e:
            if NamedExhaustion.of(e) is None:
                self._send(_PipeMessage(pipe=label, error=str(e)), deadline)
            raise
        with self._lock:
            self._opening, closed = listener, self._closed
        if closed:
            listener.close()
        try:
            self._send(_PipeMessage(pipe=label, contact=listener.contact), deadline)
            self._outcome = _Outcome(self.channel, label, listener, deadline)
            pipe = listener.accept(timeout=deadline.remaining())
            if (error := self._outcome.wait()) is not None:
                pipe.abort()
                raise error
            return self._wrapped(pipe, transport, device)
        finally:
            self._opening = None
            listener.close()

    def _join(self, label: str, transport: str, device: str, deadline: Deadline) -> Pipe:
        offer = _PipeMessage.of(self.channel, label, deadline)
        if offer.contact is None:
            why = peer_text(offer.error)
            raise HandshakeError(f"it cannot listen on {transport!r}: {why}", peer=str(self.channel.peer))
        try:
            endpoint = self._settings.resolved.pipe_endpoint(transport, device)
            bare = endpoint.connect(offer.contact, timeout=deadline.remaining())
            pipe = self._wrapped(bare, transport, device)
        except Exception as e:
            shortage = NamedExhaustion.of(e)
            lacks = shortage.resource if shortage is not None else ""
            with contextlib.suppress(KvplugError):  # or the other end would wait for the pipe
                self._send(_PipeMessage(pipe=label, error=str(e), lacks=lacks), deadline)
            raise
        try:
            self._send(_PipeMessage(pipe=label, joined=True), deadline)
        except BaseException:
            pipe.abort()
            raise
        return pipe

    def _send(self, message: _PipeMessage, deadline: Deadline) -> None:
        self.channel.send(to_plain(message), timeout=deadline.remaining())

    def close(self) -> None:
        with self._lock:
            self._closed, listener = True, self._opening
        self.channel.close()
        if listener is not None:
            listener.close()


@attrs.frozen(kw_only=True)
class _PipeMessage:
    """A message about a pipe that is being opened: its contact, then whether the other end has joined."""

    pipe: str
    """The pipe's label."""
    contact: str | None = None
    joined: bool = False
    error: str = ""
    """Why this end could not listen or join."""
    lacks: str = ""
    """The resource that ran out, if that is the reason."""

    @classmethod
    def of(cls, channel: Channel, label: str, deadline: Deadline) -> _PipeMessage:
        """Receive the next message. Raises WireError if it is not about the pipe ``label``."""
        message = from_plain(
            channel.recv(timeout=deadline.remaining()), cls, f"the message about pipe {label!r}"
        )
        if message.pipe != label:
            raise WireError(f"{channel.peer} sent a message that is not about the pipe {label!r}")
        return message


class _Outcome:
    """The outcome of opening a pipe, which the connecting end reports over the channel.

    A thread waits for the report. If the pipe failed, the thread closes the listener, which ends ``accept``.
    """

    def __init__(self, channel: Channel, label: str, listener: PipeListener, deadline: Deadline) -> None:
        self._channel = channel
        self._label = label
        self._listener = listener
        self._deadline = deadline
        self._error: KvplugError | None = None
        self._has_accepted = threading.Event()
        self._thread = BackgroundThread(self._run, name="kvplug-pipe-outcome", stop=channel.close)
        self._thread.start()

    def wait(self) -> KvplugError | None:
        """Return why the pipe failed, or ``None`` if it opened. Call this only after ``accept`` has ended."""
        self._has_accepted.set()
        left = self._deadline.remaining()
        self._thread.join(None if left is None else left + 1.0)
        if self._thread.is_alive():
            return TimeoutError(f"{self._channel.peer} did not confirm in time that it joined the pipe")
        return self._error

    def _run(self) -> None:
        peer = self._channel.peer
        try:
            outcome = _PipeMessage.of(self._channel, self._label, self._deadline)
            if not outcome.joined:
                why = peer_text(outcome.error)
                if outcome.lacks:
                    text = f"{peer} cannot join the pipe: {why}"
                    raise ResourceExhaustedError(text, resource=peer_text(outcome.lacks))
                raise HandshakeError(f"it cannot join the pipe: {why}", peer=str(peer))
            if not self._has_accepted.wait(_ACCEPT_S):
                raise TransportError(
                    f"{peer} joined the pipe {self._label!r}, but this end did not complete it; see the log"
                )
        except PeerGoneError as e:
            self._error = PeerGoneError(f"{peer} hung up before it opened the pipe")
            self._error.__cause__ = e
        except KvplugError as e:
            self._error = e
        if self._error is not None:
            self._listener.close()
