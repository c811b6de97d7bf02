"""Config + Registry -> a pipe, for programs that move tensors without an engine around them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import attrs

from kvplug.assembly.links import ControlLink, LinkSettings, unreported
from kvplug.assembly.peers import ControlPeers, LinkServer
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig, ensure_config, labels_of
from kvplug.config.config import Config, Role
from kvplug.config.options import option_fields
from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Reporter
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.select import AUTO
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.pipe import Pipe, PipeEndpoint
from kvplug.transport.spec import Kind

logger = logging.getLogger(__name__)

_LABEL = "pipe"


def _resolve(config: Config, registry: Registry | None, *, counts: bool = True) -> ResolvedConfig:
    """``counts``: what passes through the pipe is counted, so it can have sinks.

    Raises:
        ConfigError: also if the config asks for what a plain pipe does not do.
    """
    ensure_config(config)
    resolved = ResolvedConfig.to_build(attrs.evolve(config, role=Role.BOTH), registry)
    faults = []
    known = option_fields(Config)
    if config.connector != known["connector"].default:
        faults.append(f"connector: a plain pipe has none, and {config.connector!r} was given")
    if config.integrity not in (known["integrity"].default, "off"):
        faults.append(
            f"integrity: a plain pipe sends tensors without a hash, and {config.integrity!r} was given;"
            " leave it out, or hash what you send"
        )
    if config.sinks and not counts:
        faults.append("sinks: pipes between the ranks of a group are not counted; leave them out")
    resolved.check(keys=("transport", "sinks"), more=faults)
    return resolved


class _Reporting:
    """One reporter for the pipes of a server, or for one pipe: it ends with the last that uses it."""

    def __init__(self, resolved: ResolvedConfig, stats: TransferStats) -> None:
        labels = labels_of(resolved.config, connector="", side="pipe", rank=0)
        self._reporter = Reporter(stats, (), labels, owned=resolved.sinks())
        self._lock = threading.RLock()  # a signal's handler may abort a pipe
        self._users = 0

    def use(self) -> Callable[[bool], None]:
        """Returns what ends this use; its argument says whether it may wait for the sinks."""
        with self._lock:
            self._users += 1
        return self._end

    def _end(self, may_wait: bool) -> None:
        with self._lock:
            self._users -= 1
            is_last = not self._users
        if is_last:
            (self._reporter.close if may_wait else self._reporter.end)()


def _link_settings(resolved: ResolvedConfig, wrap_pipe: Callable[[Pipe], Pipe] | None) -> LinkSettings:
    stats = TransferStats()
    return LinkSettings(
        resolved=resolved,
        stats=stats,
        device=resolved.config.device.partition(":")[0],
        wrap_pipe=wrap_pipe,
        on_pipe=_Reporting(resolved, stats).use,
    )


class PipeServer:
    """Accepts pipes from other programs; made by :func:`listen_pipe`."""

    def __init__(self, settings: LinkSettings, peers: ControlPeers, on_end: Callable[[bool], object]) -> None:
        self._settings = settings
        self._peers = peers
        self._on_end = on_end
        self._server: LinkServer[Pipe] = peers.serve(self._open, lambda pipe: pipe.abort())
        self.contact: str = self._server.contact
        """The argument of :func:`connect_pipe` in the other process."""

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """The pipe to the next program, over the transport both ends agreed on.

        Pipes to several programs are opened at the same time, in threads of the server: a program that is
        slow, stopped or gone delays no other, and pipes that one program connects one after the other may
        be accepted in another order. Opening that fails within the config's ``timeout_s`` is logged.

        Raises:
            TimeoutError: no pipe became ready within ``timeout`` seconds (default: the config's
                ``timeout_s``). Call again: programs on their way are not turned away.
            ResourceExhaustedError: nor could the latest one be served, for lack of a resource.
            ClosedError: the server is closed.
        """
        return self._server.accept(timeout)

    def _open(self, link: ControlLink, deadline: Deadline) -> Pipe:
        try:
            return link.open_pipe(_LABEL, device=self._settings.config.device, timeout=deadline.remaining())
        finally:
            link.close()

    def close(self) -> None:
        """Stop listening; accepted pipes live on, the others end. Idempotent."""
        self._peers.close()
        on_end, self._on_end = self._on_end, unreported()
        on_end(True)

    def __enter__(self) -> PipeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@NamedExhaustion("listening for pipes")
def listen_pipe(
    config: Config,
    address: str | None = None,
    *,
    registry: Registry | None = None,
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
) -> PipeServer:
    """Listen for programs that want a pipe, at ``address`` or at the config's host and port.

    If no pipe here can move tensors of the config's device, a warning is logged at once, and every handshake
    is refused with that reason.

    Metrics go to the config's sinks until the server and the last of its pipes are closed.

    Raises:
        ConfigError, InsecureAddressError, AddressInUseError.
        TypeError: that is no Config.
        UnknownTransportError, AmbiguousNameError: no plugin offers the config's transport, or two do.
        ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
    """
    resolved = _resolve(config, registry)
    settings = _link_settings(resolved, wrap_pipe)
    if (lack := resolved.explain_missing_pipe()) is not None:
        logger.warning("every peer that connects will be refused: %s", lack)
    on_end = settings.on_pipe()
    try:
        return PipeServer(settings, ControlPeers(settings, listen=address), on_end)
    except BaseException:
        on_end(False)
        raise


@NamedExhaustion("building the endpoint of a pipe")
def build_pipe_endpoint(
    config: Config, *, device: str | None = None, registry: Registry | None = None
) -> PipeEndpoint:
    """The endpoint of the pipe that the config's ``transport`` names: for :func:`kvplug.connect_ranks`.

    Its pipes are bare: the ranks do not negotiate, so every rank's config must name the same transport, and
    no metrics are counted. ``device`` defaults to the config's.

    Raises:
        ConfigError: the transport is "auto", or its options are wrong; every fault at once.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: the transport cannot work here, or its factory returned something else.
        InsecureAddressError: other hosts can reach the config's host, and there is no secret.
        ResourceExhaustedError: the process has no free descriptor or memory for it.
    """
    ensure_config(config)
    if config.transport == AUTO:
        raise ConfigError("transport: ranks of a group do not negotiate, so name one; 'auto' was given")
    resolved = _resolve(config, registry, counts=False)
    if resolved.requested_transport == AUTO:
        raise ConfigError(f"options.{config.transport}.inner: ranks of a group do not negotiate, so name one")
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
    """A pipe to the program that listens at ``contact``, or at the config's host and port.

    Raises:
        TimeoutError: no program listened there in time.
        HandshakeError, AuthenticationError: the two ends cannot work together, and why.
        ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
    """
    settings = _link_settings(_resolve(config, registry), wrap_pipe)
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
