"""Builds pipes for programs that move tensors without an engine."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvplug.assembly.links import ControlLink, LinkSettings, unreported
from kvplug.assembly.peers import ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, labels_of
from kvplug.config.config import Config, Role
from kvplug.config.options import option_fields
from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Reporter
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.select import AUTO
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.log import LogEvent
from kvplug.transport.pipe import Pipe, PipeEndpoint
from kvplug.transport.spec import Kind

logger = logging.getLogger(__name__)

_LABEL = "pipe"


def _resolve(config: Config, registry: Registry | None, *, counts: bool = True) -> ResolvedConfig:
    """Resolve a config for plain pipes. ``counts``: whether transfers are counted, as sinks require.

    Raises:
        ConfigError: the config has faults, or asks for something that a plain pipe does not do.
    """
    resolved = ResolvedConfig.to_build(config, registry)
    faults = []
    known = option_fields(Config)
    if config.connector != known["connector"].default:
        faults.append(f"connector: a plain pipe has no connector, but {config.connector!r} was given")
    if config.integrity not in (known["integrity"].default, "off"):
        faults.append(
            f"integrity: a plain pipe sends tensors without a hash, but {config.integrity!r} was given;"
            " leave integrity out, or hash the tensors yourself"
        )
    if config.sinks and not counts:
        faults.append("sinks: pipes between the ranks of a group are not counted; leave sinks out")
    resolved.check(keys=("transport", "sinks"), more=faults)
    return resolved


class _Reporting:
    """The reporter shared by the pipes of a server, or used by one pipe. It ends with its last user."""

    def __init__(self, resolved: ResolvedConfig, stats: TransferStats) -> None:
        labels = labels_of(resolved.config, connector="", side="pipe", rank=0) | {"role": Role.BOTH}
        self._reporter = Reporter(stats, (), labels, owned=resolved.sinks())
        self._lock = threading.RLock()  # a signal's handler may abort a pipe
        self._users = 0

    def use(self) -> Callable[[bool], None]:
        """Register a user. Return the function that ends its use; its argument permits waiting for sinks."""
        with self._lock:
            self._users += 1
        return self._end

    def _end(self, may_wait: bool) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            (self._reporter.close if may_wait else self._reporter.end)()


def _settings(
    config: Config, registry: Registry | None, wrap_pipe: Callable[[Pipe], Pipe] | None
) -> LinkSettings:
    resolved, stats = _resolve(config, registry), TransferStats()
    return LinkSettings(
        resolved=resolved,
        stats=stats,
        device=config.device.partition(":")[0],
        wrap_pipe=wrap_pipe,
        on_pipe=_Reporting(resolved, stats).use,
    )


class PipeServer(LinkServer[Pipe]):
    """Accepts pipes from other programs; made by :func:`listen_pipe`.

    The other process passes ``contact`` to :func:`connect_pipe`. ``accept`` returns the next program's pipe,
    over the transport that both ends agreed on. Pipes to several programs are opened concurrently, in
    threads. A program that is slow, stopped or gone does not delay the others. Pipes that one program
    connects in sequence may be accepted in another order. A pipe that fails to open, or is not open within
    the config's ``timeout_s``, is logged. Pipes that are still being opened when ``accept`` times out are
    kept for the next call. ``close`` ends the pipes that were not accepted; the others stay open.
    """

    def __init__(self, settings: LinkSettings, address: str | None) -> None:
        self._on_end = settings.on_pipe()
        try:
            address = address or settings.config.control_address()
            super().__init__(settings, address, self._open, lambda pipe: pipe.abort())
        except BaseException:
            self._on_end(False)
            raise

    def _open(self, link: ControlLink, deadline: Deadline) -> Pipe:
        try:
            return link.open_pipe(_LABEL, device=self._settings.config.device, timeout=deadline.remaining())
        finally:
            link.close()

    def close(self) -> None:
        super().close()
        on_end, self._on_end = self._on_end, unreported()
        on_end(True)


@NamedExhaustion("listening for pipes")
def listen_pipe(
    config: Config,
    address: str | None = None,
    *,
    registry: Registry | None = None,
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
) -> PipeServer:
    """Listen for programs that connect a pipe, at ``address`` or at the config's host and port.

    If no pipe here can move tensors of the config's device, a warning is logged at once, and every handshake
    is refused with that reason.

    Metrics go to the config's sinks until the server and all its pipes are closed.

    Raises:
        ConfigError, InsecureAddressError, AddressInUseError.
        TypeError: ``config`` is not a Config.
        UnknownTransportError, AmbiguousNameError: no plugin offers the config's transport, or two do.
        ResourceExhaustedError: the process has no free descriptor, thread or memory.
    """
    settings = _settings(config, registry, wrap_pipe)
    if (lack := settings.resolved.explain_missing_pipe()) is not None:
        LogEvent.NO_TRANSPORT.log(logger, f"every peer that connects will be refused: {lack}", error=lack)
    return PipeServer(settings, address)


@NamedExhaustion("building the endpoint of a pipe")
def build_pipe_endpoint(
    config: Config, *, device: str | None = None, registry: Registry | None = None
) -> PipeEndpoint:
    """Build the endpoint of the config's ``transport``, for :func:`kvplug.connect_ranks`.

    Ranks do not negotiate, so every rank's config must name the same transport. Their pipes are not
    counted. ``device`` defaults to the config's.

    Raises:
        ConfigError: the transport is "auto", or its options are wrong; the error lists every fault.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: the transport cannot work here, or its factory did not return an endpoint.
        InsecureAddressError: the config has a TCP address, but neither a secret nor TLS.
        ResourceExhaustedError: the process has no free descriptor or memory.
    """
    resolved = _resolve(config, registry, counts=False)
    if config.transport == AUTO:
        raise ConfigError("transport: ranks of a group do not negotiate, so name one; 'auto' was given")
    endpoint: PipeEndpoint = resolved.build(Kind.PIPE, device)
    return endpoint


@NamedExhaustion("connecting a pipe")
def connect_pipe(
    config: Config,
    contact: str | None = None,
    *,
    registry: Registry | None = None,
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Pipe:
    """Connect a pipe to the program that listens at ``contact``, or at the config's host and port.

    Raises:
        TimeoutError: no program listened there in time.
        HandshakeError, AuthenticationError: the two ends cannot work together; the error lists the reasons.
        ResourceExhaustedError: the process has no free descriptor, thread or memory.
    """
    settings = _settings(config, registry, wrap_pipe)
    on_end = settings.on_pipe()
    deadline = Deadline.after(timeout, config.connect_timeout_s)
    try:
        link = ControlPeers(settings, connect=contact).connect(0, "pipe", timeout=deadline.remaining())
        try:
            return link.open_pipe(_LABEL, device=config.device, timeout=deadline.remaining())
        finally:
            link.close()
    finally:
        on_end(False)
