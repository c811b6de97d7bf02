"""Config + Registry -> a pipe, for programs that move tensors without an engine around them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import attrs

from kvplug.assembly.chosen import chosen
from kvplug.assembly.connector import Parts, credentials_of, hello_of, must_authenticate
from kvplug.assembly.peers import ControlPeers, LinkListener, Wiring
from kvplug.assembly.registry import Registry
from kvplug.config import Config, Role
from kvplug.engine.connector.values import CacheGroup, KVCacheConfig, Parallelism, Side
from kvplug.engine.layout import KVLayout
from kvplug.errors import ConfigError
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import AUTO
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.transport.capabilities import Requirements
from kvplug.transport.pipe import Pipe, PipeEndpoint
from kvplug.transport.spec import Kind

logger = logging.getLogger(__name__)

_LABEL = "pipe"
_NO_MODEL = ModelInfo(name="none", attention="none", num_layers=0, num_kv_heads=0, head_size=0, dtype="none")


def _parts(config: Config, registry: Registry | None) -> Parts:
    registry = Registry.from_env() if registry is None else registry
    parts = Parts(attrs.evolve(config, role=Role.BOTH), registry)
    parts.check(keys=("transport",))
    return parts


def _wiring(parts: Parts, wrap_pipe: Callable[[Pipe], Pipe] | None) -> Wiring:
    config = parts.config
    layout = KVLayout("BTD", {"B": 1, "T": 1, "D": 1})
    cache = KVCacheConfig(groups=(CacheGroup(layer_names=(), layout=layout),), num_blocks=1)
    return Wiring(
        config=config,
        credentials=credentials_of(config),
        hello=functools.partial(hello_of, parts, _NO_MODEL, cache, Parallelism(), Side.WORKER),
        endpoint=parts.pipe_endpoint,
        pipe_options=parts.pipe_options,
        stats=TransferStats(),
        missing=parts.registry.failures(),
        wrap_pipe=wrap_pipe,
    )


class PipeServer:
    """Waits for programs that want a pipe to this one; :func:`listen_pipe` makes it."""

    def __init__(self, wiring: Wiring, peers: ControlPeers) -> None:
        self._wiring = wiring
        self._peers = peers
        self._listener: LinkListener = peers.listen()
        self.contact: str = self._listener.contact
        """Hand it to :func:`connect_pipe` in the other process. May carry a token; do not log it."""

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """The pipe to the next program, over the transport both ends agreed on.

        Raises:
            TimeoutError, ClosedError.
        """
        deadline = Deadline.after(timeout, self._wiring.config.timeout_s)
        link = self._listener.accept(timeout=deadline.remaining())
        try:
            return link.open_pipe(_LABEL, device=self._wiring.config.device, timeout=deadline.remaining())
        finally:
            link.close()

    def close(self) -> None:
        """Stop listening; pipes live on. Idempotent."""
        self._peers.close()

    def __enter__(self) -> PipeServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen_pipe(
    config: Config,
    address: str | None = None,
    *,
    registry: Registry | None = None,
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
) -> PipeServer:
    """Listen for programs that want a pipe, at ``address`` or at the config's host and port.

    Where no pipe here can move tensors of the config's device, whoever connects is told so; a warning says it
    at once.

    Raises:
        ConfigError, InsecureAddressError, AddressInUseError.
        UnknownTransportError, AmbiguousNameError: the transport that the config names is not there.
    """
    parts = _parts(config, registry)
    wiring = _wiring(parts, wrap_pipe)
    if (lack := parts.lacks_pipe()) is not None:
        logger.warning("whoever connects will be refused: %s", lack)
    return PipeServer(wiring, ControlPeers(wiring, listen=address))


def build_pipe_endpoint(
    config: Config, *, device: str | None = None, registry: Registry | None = None
) -> PipeEndpoint:
    """The endpoint of the pipe that the config's ``transport`` names: for :func:`kvplug.connect_ranks`.

    Its pipes are bare: nothing is negotiated between the ranks, so every rank's config names the same
    transport, and nothing is counted. ``device`` is the config's where nothing is said.

    Raises:
        ConfigError: the transport is "auto", or its options are wrong; every fault at once.
        UnknownTransportError, AmbiguousNameError: the name is not there, or there twice.
        PluginError: the transport cannot work here, or its factory returned something else.
        InsecureAddressError: other hosts can reach the config's host, and there is no secret.
    """
    if config.transport == AUTO:
        raise ConfigError("transport: ranks of a group do not negotiate, so name one; 'auto' was given")
    parts = _parts(config, registry)
    wiring = _wiring(parts, None)
    around = parts.around(Kind.PIPE, config.transport)
    name = config.transport if around is None else around.over
    if name == AUTO:
        raise ConfigError(f"options.{config.transport}.over: ranks of a group do not negotiate, so name one")
    device = config.device if device is None else device
    required = Requirements(device=device.partition(":")[0], authenticated=must_authenticate(config))
    return wiring.pipe_endpoint(chosen(parts, Kind.PIPE, name, required).name, device)


def connect_pipe(
    config: Config,
    contact: str | None = None,
    *,
    registry: Registry | None = None,
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Pipe:
    """A pipe to whoever listens at ``contact``, or at the config's host and port.

    Raises:
        TimeoutError: nobody listened there in time.
        HandshakeError, AuthenticationError: the two ends cannot work together, and why.
    """
    wiring = _wiring(_parts(config, registry), wrap_pipe)
    deadline = Deadline.after(timeout, config.connect_timeout_s)
    link = ControlPeers(wiring, connect=contact).connect(0, "pipe", timeout=deadline.remaining())
    try:
        return link.open_pipe(_LABEL, device=config.device, timeout=deadline.remaining())
    finally:
        link.close()
