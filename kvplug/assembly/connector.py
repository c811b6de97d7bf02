"""Config + Registry -> one side of a connector."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import attrs

import kvplug
from kvplug.assembly.peers import ControlPeers, Wiring
from kvplug.assembly.registry import CHOSEN, Registry, name_faults, own_part
from kvplug.config import Config, Role, check_options
from kvplug.engine.connector.scheduler import SchedulerConnector
from kvplug.engine.connector.values import KVCacheConfig, Parallelism, Side
from kvplug.engine.connector.worker import WorkerConnector
from kvplug.engine.context import ConnectorContext
from kvplug.errors import ConfigError, PluginError
from kvplug.metrics.sinks import Reporter, Sink
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.handshake.hello import Hello
from kvplug.negotiation.model import ModelInfo
from kvplug.negotiation.select import AUTO, Offer
from kvplug.net.checksum import available
from kvplug.net.trust.addresses import is_loopback
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import this_process
from kvplug.transport.capabilities import Requirements
from kvplug.transport.context import LookupContext, PipeContext
from kvplug.transport.lookup import LookupEndpoint
from kvplug.transport.pipe import Pipe, PipeEndpoint
from kvplug.transport.spec import Kind, TransportSpec

EPOCH = uuid.uuid4().hex
"""Of this process: changes at restart, so that a stale reference can be told from a live one."""


@attrs.frozen(kw_only=True)
class Around:
    """A transport that a config puts around another of its kind."""

    spec: TransportSpec
    options: Any

    @property
    def over(self) -> str:
        """The name of the one beneath, or ``"auto"``."""
        return str(getattr(self.options, "over", AUTO))


class Parts:
    """The named parts of one config, looked up in one registry. Everything here is by name."""

    def __init__(self, config: Config, registry: Registry) -> None:
        self.config = config
        self.registry = registry

    @functools.cached_property
    def pipes(self) -> dict[str, TransportSpec]:
        """Every pipe transport that moves bytes by its bare name; where two own a name, the one the config
        singles out."""
        specs = {spec.name: spec for spec in self.registry.transports(Kind.PIPE) if not spec.wraps}
        if self._named != AUTO:
            named = self.registry.get(Kind.PIPE, self._named)
            specs[named.name] = named
        return specs

    @functools.cached_property
    def _around(self) -> Around | None:
        return self.around(Kind.PIPE, self.config.transport)

    @property
    def _named(self) -> str:
        """What the config says of the transport that moves the bytes."""
        return self.config.transport if self._around is None else self._around.over

    @property
    def requested_transport(self) -> str:
        """The bare name of the transport the config asks for, or ``"auto"``."""
        return self._named.rpartition(":")[2]

    @functools.cached_property
    def offers(self) -> tuple[Offer, ...]:
        """What this host can offer a peer: every pipe transport, probed once."""
        return tuple(
            Offer(
                name=spec.name,
                protocol=spec.protocol,
                capabilities=spec.capabilities,
                probe=spec.run_probe(),
                auto=spec.auto,
            )
            for spec in self.pipes.values()
        )

    def lacks_pipe(self) -> str | None:
        """As :func:`lacks_pipe`."""
        device, named = self.config.device.partition(":")[0], self.requested_transport
        reasons = []
        for offer in self.offers:
            if not (offer.auto if named == AUTO else offer.name == named):
                continue
            lacks = offer.capabilities.missing(Requirements(device=device))
            if not lacks and offer.probe.viable:
                return None
            reasons.append(f"{offer.name}: {'; '.join(lacks) or offer.probe.reason or 'it cannot work here'}")
        return f"no pipe here can move {device} tensors ({'; '.join(reasons) or 'none is installed'})"

    def options_of(self, spec: Any) -> Any:
        """An instance of the spec's options class, filled from the config.

        Raises:
            ConfigError: with every fault of these options.
        """
        given = own_part(self.registry, spec, self.config.options.get(spec.name, {}))
        cls = spec.load_options()
        if cls is None:
            if given:
                raise ConfigError(f"options.{spec.name}: {spec.name!r} takes no options")
            return None
        return check_options(cls, given, where=f"options.{spec.name}")

    def around(self, kind: Literal[Kind.PIPE, Kind.QUEUE], name: str) -> Around | None:
        """The transport that ``name`` stands for, with its options, where it is one around another.

        Raises:
            UnknownTransportError, AmbiguousNameError: the name is not there, or there twice.
            ConfigError: with every fault of its options.
        """
        if name == AUTO:
            return None
        spec = self.registry.get(kind, name)
        return Around(spec=spec, options=self.options_of(spec)) if spec.wraps else None

    def pipe_options(self, name: str) -> Any:
        return self.options_of(self.pipes[name])

    def pipe_endpoint(self, name: str, context: PipeContext) -> PipeEndpoint:
        """The endpoint of the transport that was agreed on, inside of the one that the config puts around."""
        if self._around is None:
            return _made(self.pipes[name], context)
        beneath = functools.partial(_made, self.pipes[name], context)
        return _made(self._around.spec, attrs.evolve(context, options=self._around.options, beneath=beneath))

    def lookup_endpoint(self) -> LookupEndpoint:
        config = self.config
        if config.lookup_buffer == AUTO:
            specs = [spec for spec in self.registry.transports(Kind.LOOKUP_BUFFER) if spec.auto]
            if not specs:
                raise PluginError("no lookup buffer is installed; kvplug-lookup brings one")
            spec = min(specs, key=lambda spec: (spec.capabilities.cost.latency_us, spec.name))
        else:
            spec = self.registry.get(Kind.LOOKUP_BUFFER, config.lookup_buffer)
        context = LookupContext(
            options=self.options_of(spec),
            buffer_size=config.buffer_size,
            device=config.device,
            timeout_s=config.timeout_s,
        )
        endpoint = spec.load_factory()(context)
        if not isinstance(endpoint, LookupEndpoint):
            raise PluginError(f"lookup buffer {spec.name!r} made {endpoint!r}, which is no LookupEndpoint")
        return endpoint

    def sinks(self) -> tuple[Sink, ...]:
        """What the config's ``sinks`` names, made."""
        made = []
        for name in self.config.sinks:
            spec = self.registry.get(Kind.SINK, name)
            sink = spec.load_factory()(self.options_of(spec))
            if not isinstance(sink, Sink):
                raise PluginError(f"sink {name!r} made {sink!r}, which is no Sink")
            made.append(sink)
        return tuple(made)

    def check(self, keys: Iterable[str] = (*CHOSEN, "sinks", "integrity")) -> None:
        """Resolve the names in the config and check every table of options.

        ``keys``: those that matter to what is built.

        Raises:
            UnknownConnectorError, UnknownTransportError, AmbiguousNameError: a name that is not there,
                with those that are, where it is the only fault.
            ConfigError: with every fault, otherwise.
        """
        config = self.config
        names = {key: getattr(config, key) for key in keys}
        faults = name_faults(self.registry, names, config.options)
        if len(faults) == 1:
            for key in names.keys() & CHOSEN.keys():
                if names[key] != AUTO:
                    self.registry.get(CHOSEN[key], names[key])
        if faults:
            raise ConfigError(*faults, source=config.source)


def _made(spec: TransportSpec, context: PipeContext) -> PipeEndpoint:
    endpoint = spec.load_factory()(context)
    if not isinstance(endpoint, PipeEndpoint):
        raise PluginError(f"transport {spec.name!r} made {endpoint!r}, which is no PipeEndpoint; subclass it")
    return endpoint


def credentials_of(config: Config) -> Credentials:
    """The secret from the config's file or the environment.

    Raises:
        InsecureAddressError: other hosts can reach the config's host, and there is none.
    """
    return Credentials.for_host(config.host, secret_file=config.secret_file)


def must_authenticate(config: Config) -> bool:
    """Whether data planes must prove their peers: strangers could reach them, and no config permits it."""
    exposed = not config.host.startswith("unix:") and not is_loopback(config.host)
    return exposed and not config.allow_unauthenticated_data_plane


def checksums_of(config: Config) -> tuple[str, ...]:
    """Hashes this end offers, preferred ones first; empty when integrity is off.

    An end that saves offers the one hash that it puts into its entries; one that only loads offers all
    that it can verify.
    """
    if config.integrity == "off":
        return ()
    if config.integrity != "auto":
        return (config.integrity,)
    return available() if config.role is Role.CONSUMER else available()[:1]


def hello_of(
    parts: Parts,
    model: ModelInfo,
    cache: KVCacheConfig,
    parallelism: Parallelism,
    side: Side,
    purpose: str,
) -> Hello:
    """What this end states about itself. A scheduler side is of no one shard, and moves no KV."""
    config = parts.config
    layout = cache.groups[0].layout
    is_worker = side is Side.WORKER
    stage = (parallelism.first_layer, parallelism.end_layer or model.num_layers)
    num_layers = sum(len(group.layer_names) for group in cache.groups)  # 0 for a pipe alone
    return Hello(
        purpose=purpose,
        moves_kv=is_worker,
        role=str(config.require_role()),
        engine_id=config.engine_id,
        epoch=EPOCH,
        rank=parallelism.worker_rank,
        world_size=parallelism.num_workers,
        model=model,
        layers=stage if is_worker else None,
        cache_layers=num_layers if is_worker and num_layers else None,
        tensor_parallel_size=parallelism.tensor_size,
        tensor_parallel_rank=parallelism.tensor_rank if is_worker else None,
        require_authenticated=must_authenticate(config),
        layout=layout.axes,
        block_size=layout.block_size,
        block_format=layout.block_format if is_worker else "",
        checksums=checksums_of(config),
        integrity=config.integrity,
        transports=parts.offers,
        requested_transport=parts.requested_transport,
        device=config.device.partition(":")[0],
        identity=this_process(),
        versions={"kvplug": kvplug.__version__},
    )


def build_connector(
    config: Config,
    side: str,
    *,
    model: ModelInfo,
    cache: KVCacheConfig,
    parallelism: Parallelism | None = None,
    registry: Registry | None = None,
    sinks: Iterable[Sink] = (),
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
    listen: str | None = None,
    connect: str | Mapping[int, str] | None = None,
) -> SchedulerConnector | WorkerConnector:
    """One side of the connector that the config names.

    Args:
        side: ``"scheduler"`` or ``"worker"``.
        model, cache, parallelism: what the engine knows; both ends' are compared in the handshake.
        registry: where names are looked up; ``None`` discovers what is installed.
        sinks: get this side's figures every ten seconds and at the end, besides those the config names.
        wrap_pipe: put around every pipe beneath the metrics (fault injection).
        listen: address to listen on instead of the config's host and port.
        connect: contact of the peer engine's worker (of each, by rank) instead of the config's.

    Raises:
        ConfigError: the role is missing, options are wrong; every fault at once.
        UnknownConnectorError, UnknownTransportError, AmbiguousNameError: a name that is not there.
        PluginLoadError: the plugin's code does not import.
        InsecureAddressError, AddressInUseError: it cannot listen there.
    """
    which = Side(side)
    config.require_role()
    registry = Registry.from_env() if registry is None else registry
    parts = Parts(config, registry)
    parts.check()
    spec = registry.get(Kind.CONNECTOR, config.connector)
    parallelism = parallelism or Parallelism()
    stats = TransferStats()
    wiring = Wiring(
        config=config,
        credentials=credentials_of(config),
        hello=functools.partial(hello_of, parts, model, cache, parallelism, which),
        endpoint=parts.pipe_endpoint,
        pipe_options=parts.pipe_options,
        stats=stats,
        missing=registry.failures(),
        wrap_pipe=wrap_pipe,
    )
    peers = ControlPeers(wiring, rank=parallelism.worker_rank, listen=listen, connect=connect)
    labels = {"connector": spec.name, "side": which.value, "role": str(config.role)}
    reporter = Reporter(stats, (*parts.sinks(), *sinks), labels)

    def close() -> None:
        peers.close()
        reporter.close()

    context = ConnectorContext(
        config=config,
        options=parts.options_of(spec),
        side=which,
        model=model,
        cache=cache,
        parallelism=parallelism,
        peers=peers,
        stats=stats,
        checksums=checksums_of(config),
        lookup_buffer=parts.lookup_endpoint,
        close=close,
    )
    factory = spec.load_factory() if which is Side.SCHEDULER else spec.load_worker_factory()
    try:
        built = factory(context)
    except BaseException:
        close()
        raise
    wanted = SchedulerConnector if which is Side.SCHEDULER else WorkerConnector
    if not isinstance(built, wanted):
        close()
        raise PluginError(f"connector {spec.name!r} made {built!r}, which is no {wanted.__name__}")
    return built


def check_config(config: Config, registry: Registry | None = None) -> None:
    """Judge a config as far as one end alone can: names, options, the secret that its address needs.

    For programs that would rather refuse at once than after minutes of loading a model.

    >>> check_config(Config.from_dict({"connector": "lookup"}))
    Traceback (most recent call last):
        ...
    kvplug.errors.ConfigError: bad configuration: role: nothing was given; allowed is one of producer, ...

    Raises:
        ConfigError, UnknownConnectorError, UnknownTransportError, AmbiguousNameError,
        InsecureAddressError: as ``build_connector``.
    """
    config.require_role()
    Parts(config, Registry.from_env() if registry is None else registry).check()
    credentials_of(config)


def lacks_pipe(config: Config, registry: Registry | None = None) -> str | None:
    """Why no pipe that the config allows can move tensors of its device here, whoever the peer is.

    ``None`` where one can. For programs that would rather say so at once than in every handshake.

    Raises:
        UnknownTransportError, AmbiguousNameError, ConfigError: of the transport that the config names.
    """
    return Parts(config, Registry.from_env() if registry is None else registry).lacks_pipe()


def connector_class(config: Config, registry: Registry | None = None) -> type[SchedulerConnector]:
    """The class of the scheduler side, for what an engine asks before anything is built, or elsewhere.

    Where the factory is a function, the base class answers.

    Raises:
        UnknownConnectorError, AmbiguousNameError, PluginLoadError: as ``build_connector``.
    """
    registry = Registry.from_env() if registry is None else registry
    factory = registry.get(Kind.CONNECTOR, config.connector).load_factory()
    if isinstance(factory, type) and issubclass(factory, SchedulerConnector):
        return factory
    return SchedulerConnector


def required_layout(config: Config, registry: Registry | None = None) -> str | None:
    """The axis string the configured connector insists on; ``None`` where any will do.

    Asks the scheduler side's class, without building anything.
    """
    registry = Registry.from_env() if registry is None else registry
    options = Parts(config, registry).options_of(registry.get(Kind.CONNECTOR, config.connector))
    return connector_class(config, registry).get_required_kvcache_layout(config, options)
