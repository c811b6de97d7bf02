"""One agreed control channel between two processes, and the pipes that are opened over it.

Both ends agree first, which selects a transport for each kind of device. Only then the transport's code is
loaded: it listens, its contact is sent over the channel, and the other end connects. Each pipe is wrapped
once, by :class:`~kvplug.metrics.record.PipeRecorder`.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping

import attrs

from kvplug.assembly.resolve import ResolvedConfig, make_hello
from kvplug.assembly.slow_path import SlowPathAlarm
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
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.agreement import Agreement
from kvplug.negotiation.exchange import exchange
from kvplug.negotiation.hello import DOCTOR, EngineFacts, Hello
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.net.threads import BackgroundThread
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire import from_plain, to_plain
from kvplug.transport.pipe import Pipe, PipeListener

_log = logging.getLogger(__name__)

_LAST_WORD_S = 0.5
"""How long a peer that has hung up in the middle may take to say that it lacked a resource."""
_ACCEPT_S = 5.0
"""How long accepting a pipe may take once the other end has it: a moment, unless it fails here."""


def unreported() -> Callable[[bool], object]:
    """The ``on_pipe`` of links whose pipes no reporter counts."""
    return lambda may_wait: None


@attrs.frozen(kw_only=True)
class LinkSettings:
    """The settings that all links of one connector, or of one pipe server, share."""

    resolved: ResolvedConfig
    config: Config = attrs.field(default=attrs.Factory(lambda self: self.resolved.config, takes_self=True))
    credentials: Credentials = attrs.field(
        default=attrs.Factory(lambda self: self.resolved.credentials, takes_self=True)
    )
    """Read when the settings are made, so that an address that needs a secret is refused at start."""
    stats: TransferStats = attrs.field(factory=TransferStats)
    engine: EngineFacts | None = None
    """Of the connector whose links they are; ``None``: of none."""
    moves_kv: bool = True
    device: str = "cpu"
    """The type of the device of the tensors that the two ends want to move."""
    wrap_pipe: Callable[[Pipe], Pipe] | None = None
    """Wraps each pipe between the transport and the metrics: fault injection."""
    engine_facts: Mapping[str, str | int] = attrs.field(factory=dict)
    """Of an engine that does not run, as `kvplug doctor --serve` got them: for a doctor to compare."""
    on_pipe: Callable[[], Callable[[bool], object]] = unreported
    """Called for each pipe that is opened; see ``on_end`` of :class:`~kvplug.metrics.record.PipeRecorder`."""

    def uncounted(self) -> LinkSettings:
        """The same for a link whose pipes are no engine's: they are neither counted nor judged."""
        config = attrs.evolve(self.config, slow_path="off")
        return attrs.evolve(self, config=config, stats=TransferStats(), on_pipe=unreported)

    def hello(self, purpose: str) -> Hello:
        """The Hello of this end for a purpose."""
        return make_hello(self.resolved, self.engine, self.moves_kv, self.device, purpose)

    def agree(self, channel: Channel, purpose: str, timeout: float | None, announced: str = "") -> Agreement:
        """Shake hands over the channel, and count it. ``announced``: as ``exchange`` takes it."""
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
            # A transport that is missing may be one of a plugin that did not load.
            missing = self.resolved.registry.failures()
            if isinstance(e, HandshakeError) and missing and any(map(_is_of_transports, e.reasons)):
                more = HandshakeError(*e.reasons, *missing, peer=e.peer)
                more.remote = e.remote
                raise more from e
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

    def wrapped(self, pipe: Pipe, agreement: Agreement, transport: str, device: str) -> Pipe:
        """The pipe as its user gets it: counted, and compared with what it should carry.

        Raises:
            SlowPathError: it is too slow already, and the config refuses that. It is aborted.
        """
        alarm = SlowPathAlarm(
            config=self.config,
            stats=self.stats,
            abilities=self.resolved.abilities,
            agreement=agreement,
            transport=transport,
            device=device,
            wrapped_by=self.resolved.wrapped_by,
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
        return pipe


def is_examined_by(error: KvplugError) -> bool:
    """Whether the handshake that failed was a doctor's: it is told why, and nothing has gone wrong."""
    remote = error.remote if isinstance(error, HandshakeError) else None
    return isinstance(remote, Hello) and remote.purpose == DOCTOR


def _is_of_transports(reason: str) -> bool:
    return reason.startswith("transport")  # also one that the peer gives, as a text


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
            if self._outcome is not None:  # it receives from the channel, which is the caller's after this
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
            with contextlib.suppress(KvplugError):  # the other end waits for a pipe that does not come
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
    """About a pipe that is being opened: its contact, then whether the other end has joined."""

    pipe: str
    """Its label."""
    contact: str | None = None
    joined: bool = False
    error: str = ""
    """Why there is no contact, or no pipe."""
    lacks: str = ""
    """The resource that ran out, if that is why."""

    @classmethod
    def of(cls, channel: Channel, label: str, deadline: Deadline) -> _PipeMessage:
        """The next message. Raises WireError: it is about something else than the pipe ``label``."""
        message = from_plain(
            channel.recv(timeout=deadline.remaining()), cls, f"the message about pipe {label!r}"
        )
        if message.pipe != label:
            raise WireError(f"{channel.peer} was to open or join the pipe {label!r} and sent something else")
        return message


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
        self._has_accepted = threading.Event()
        self._thread = BackgroundThread(self._run, name="kvplug-pipe-outcome", stop=channel.close)
        self._thread.start()

    def wait(self) -> KvplugError | None:
        """Why there is no pipe; ``None`` if there is one. Called when this end accepts no longer."""
        self._has_accepted.set()
        left = self._deadline.remaining()
        self._thread.join(None if left is None else left + 1.0)
        if self._thread.is_alive():
            return TimeoutError(f"{self._channel.peer} did not say in time that it joined the pipe")
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
                    f"{peer} has joined the pipe {self._label!r}, which was not completed here; see the log"
                )
        except PeerGoneError as e:
            self._error = PeerGoneError(f"{peer} hung up before it opened the pipe")
            self._error.__cause__ = e
        except KvplugError as e:
            self._error = e
        if self._error is not None:
            self._listener.close()
