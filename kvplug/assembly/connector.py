"""Builds one side of the connector that a config names."""

from __future__ import annotations

import contextlib
import functools
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from kvplug.assembly.links import LinkSettings
from kvplug.assembly.making import made
from kvplug.assembly.members import members_of
from kvplug.assembly.peers import ControlPeers
from kvplug.assembly.registry import Registry
from kvplug.assembly.request_spans import RequestSpans
from kvplug.assembly.resolve import (
    ResolvedConfig,
    checksums_of,
    credentials_of,
    labels_of,
)
from kvplug.assembly.state import ProcessState, status_of
from kvplug.assembly.stores import StoreOpener
from kvplug.assembly.watching import observe
from kvplug.config.config import Config
from kvplug.config.messages import did_you_mean
from kvplug.engine.connector.scheduler import SchedulerConnector
from kvplug.engine.connector.values import KVCacheConfig, Parallelism, Side
from kvplug.engine.connector.worker import WorkerConnector
from kvplug.engine.context import ConnectorContext
from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Sink
from kvplug.metrics.spans import SpanLog
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.hello import EngineFacts
from kvplug.negotiation.model import ModelInfo
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.wire.tensors import DTYPES
from kvplug.transport.pipe import Pipe
from kvplug.transport.spec import ConnectorSpec, Kind


def _engine_facts(
    config: Config,
    model: ModelInfo,
    cache: KVCacheConfig,
    place: Parallelism,
    side: Side,
    spec: ConnectorSpec,
) -> EngineFacts:
    """Return one side's facts about its engine. A scheduler side does not belong to a shard.

    Raises:
        ConfigError: the facts are impossible, or those of the model do not match the cache.
    """
    layout, heads = cache.groups[0].layout, max(1, model.num_kv_heads // place.tensor_size)
    faults = []
    if model.dtype not in DTYPES:
        hint = did_you_mean(model.dtype, DTYPES) or f"; allowed is one of {', '.join(DTYPES)}"
        faults.append(f"dtype: {model.dtype!r} is not a dtype of a KV cache{hint}")
    if layout.has_values and layout.num_kv_heads != heads:
        split = f", split over {place.tensor_size} workers" if place.tensor_size > 1 else ""
        faults.append(
            f"num_kv_heads: the model has {model.num_kv_heads}{split}, and the cache's layout has"
            f" {layout.num_kv_heads}; {heads} were expected"
        )
    if layout.head_size != model.head_size:
        faults.append(
            f"head_size: the model has {model.head_size}, and the cache's layout has {layout.head_size}"
        )
    if faults:
        raise ConfigError(*faults, source="the engine's facts")
    is_worker = side is Side.WORKER
    return EngineFacts(
        role=str(config.require_role()),
        model=model,
        layers=(place.first_layer, place.end_layer or model.num_layers) if is_worker else None,
        cache_layers=sum(len(group.layer_names) for group in cache.groups) if is_worker else None,
        tensor_parallel_size=place.tensor_size,
        tensor_parallel_rank=place.tensor_rank if is_worker else None,
        layout=layout.axes,
        block_size=layout.block_size,
        block_format=layout.block_format if is_worker else "",
        rank=place.worker_rank,
        world_size=place.num_workers,
        splits_heads=spec.splits_heads,
    )


class _Starts:
    """The starts of engines in this process. Both sides of an engine and all its workers share one start."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: dict[str, tuple[str, set[tuple[Side, int]]]] = {}
        """By engine id: the start, and the sides built for it."""

    def of(self, engine_id: str, side: Side, rank: int) -> str:
        """Return the text that identifies this start. Building the same side again begins a new start."""
        with self._lock:
            start, built = self._latest.get(engine_id, ("", set()))
            if not start or (side, rank) in built:
                start, built = f"{engine_id} {uuid.uuid4().hex}", set()
            self._latest[engine_id] = start, {*built, (side, rank)}
            return start


_starts = _Starts()


@NamedExhaustion("building a connector")
def build_connector(
    config: Config,
    side: str,
    *,
    model: ModelInfo,
    cache: KVCacheConfig,
    parallelism: Parallelism | None = None,
    loads_in_background: bool = False,
    start: str = "",
    registry: Registry | None = None,
    sinks: Iterable[Sink] = (),
    spans: SpanLog | None = None,
    wrap_pipe: Callable[[Pipe], Pipe] | None = None,
    listen: str | None = None,
    connect: str | Mapping[int, str] | None = None,
) -> SchedulerConnector | WorkerConnector:
    """Build one side of the connector that the config names.

    Args:
        side: ``"scheduler"`` or ``"worker"``.
        model, cache, parallelism: the engine's facts, which the handshake compares between both ends.
        loads_in_background: the engine lets every request wait for its load; see
            :class:`~kvplug.engine.ConnectorContext`.
        start: a text that is new at each start of the engine and the same for all its sides. An engine with
            several processes must pass it unless the weights are stated; otherwise its sides refuse each
            other.
        registry: resolves names; ``None`` loads the installed plugins.
        sinks: receive this side's metrics every ten seconds and at the end, in addition to the config's
            sinks; the caller closes them.
        spans: receives the spans of requests; ``None``: this side gets a log of its own.
        wrap_pipe: wraps every pipe, below the metrics, for fault injection.
        listen: address to listen on instead of the config's host and port.
        connect: contact of the peer engine's worker, or of each worker by rank, instead of the config's.

    Raises:
        ConfigError: the role is missing or options are wrong (the error lists every fault), or the model's
            facts do not match the cache.
        UnknownConnectorError, UnknownTransportError, AmbiguousNameError: no plugin offers a name, or two do.
        PluginLoadError: the plugin's code cannot be imported.
        InsecureAddressError, AddressInUseError: the connector cannot listen at its address.
        ResourceExhaustedError: the process has no free descriptor, thread or memory.
    """
    which = Side(side)
    resolved = ResolvedConfig.to_build(config, registry)
    config.require_role()
    resolved.check()
    spec = resolved.registry.get(Kind.CONNECTOR, config.connector)
    parallelism = parallelism or Parallelism()
    weights = config.weights or model.weights
    if not weights:
        begun = start or _starts.of(config.engine_id, which, parallelism.worker_rank)
        weights = ModelInfo.unknown_weights(model.name, begun, warns=which is Side.SCHEDULER)
    model = attrs.evolve(model, weights=weights)
    stats = TransferStats()
    labels = labels_of(config, connector=spec.name, side=which.value, rank=parallelism.worker_rank)
    state, spans = ProcessState(stats, labels), spans or SpanLog()
    settings = LinkSettings(
        resolved=resolved,
        stats=stats,
        spans=spans,
        engine=_engine_facts(config, model, cache, parallelism, which, spec),
        moves_kv=which is Side.WORKER,
        device=resolved.device_of_links,
        wrap_pipe=wrap_pipe,
        state=state,
    )
    stores = StoreOpener(LinkSettings(resolved=resolved, stats=stats, state=state, spans=spans))
    opened = contextlib.ExitStack()
    try:
        observe(settings, opened, sinks)
        peers = ControlPeers(settings, rank=parallelism.worker_rank, listen=listen, connect=connect)
        opened.callback(peers.close)
        members = members_of(resolved, parallelism=parallelism, model=model, stats=stats)
        if members is not None:
            opened.callback(members.close)
        context = ConnectorContext(
            config=config,
            options=resolved.options_of(spec),
            side=which,
            model=model,
            cache=cache,
            parallelism=parallelism,
            loads_in_background=loads_in_background,
            peers=peers,
            members=members,
            stats=stats,
            spans=spans,
            checksums=checksums_of(config),
            open_store=stores.open,
            store_client=stores.client,
            open_lookup=functools.partial(resolved.build, Kind.LOOKUP_BUFFER),
            close=opened.close,
        )
        if which is Side.SCHEDULER:
            connector: SchedulerConnector | WorkerConnector = made(spec, context)
            assert isinstance(connector, SchedulerConnector)
            RequestSpans(connector, spans, stats)
        else:
            connector = made(spec, context, factory=spec.load_worker_factory(), wanted=WorkerConnector)
    except BaseException:
        opened.close()
        raise
    state.add(connector, status_of)
    return connector


def check_config(config: Config, registry: Registry | None = None) -> None:
    """Check everything that one end alone can check: names, options, and the secret that the address needs.

    Programs call this to fail before they spend minutes on loading a model.

    >>> check_config(Config.from_dict({"connector": "lookup"}))
    Traceback (most recent call last):
        ...
    kvplug.errors.ConfigError: bad configuration: role: nothing was given; allowed is one of producer, ...

    Raises:
        ConfigError, UnknownConnectorError, UnknownTransportError, AmbiguousNameError,
        InsecureAddressError: as ``build_connector``.
    """
    config.require_role()
    ResolvedConfig(config, registry).check()
    credentials_of(config)


class ConnectorInfo:
    """Answers an engine's questions about its configured connector before the connector is built.

    The answers come from the class of the scheduler's side.
    """

    def __init__(self, config: Config, registry: Registry | None = None) -> None:
        self._resolved = ResolvedConfig(config, registry)

    @property
    def connector_class(self) -> type[SchedulerConnector]:
        """The class of the scheduler's side; the base class if the connector's factory is a function.

        Raises:
            UnknownConnectorError, AmbiguousNameError, PluginLoadError: as ``build_connector``.
        """
        factory = self._spec.load_factory()
        is_class = isinstance(factory, type) and issubclass(factory, SchedulerConnector)
        return factory if is_class else SchedulerConnector

    @property
    def needs_layer_hooks(self) -> bool:
        """Whether the connector must be called in each layer of each step.

        Raises:
            ConfigError, UnknownConnectorError, AmbiguousNameError, PluginLoadError: as ``build_connector``.
        """
        return self.connector_class.needs_layer_hooks(self._resolved.config, self._options)

    @property
    def required_layout(self) -> str | None:
        """The axis string that the connector requires; ``None`` if it accepts any.

        Raises:
            ConfigError, UnknownConnectorError, AmbiguousNameError, PluginLoadError: as ``build_connector``.
        """
        return self.connector_class.get_required_kvcache_layout(self._resolved.config, self._options)

    @property
    def missing_pipe(self) -> str | None:
        """Why no pipe that the config allows can move the connector's tensors; ``None`` if one can.

        The tensors are on the config's device, or on the CPU if the connector moves pages of stores. Programs
        use this to report a missing pipe at start instead of in every handshake. It loads no pipe's code.

        Raises:
            UnknownTransportError, AmbiguousNameError, ConfigError: the config names a wrong transport.
        """
        return self._resolved.explain_missing_pipe(self._resolved.device_of_links, load=False)

    @property
    def _spec(self) -> Any:
        return self._resolved.registry.get(Kind.CONNECTOR, self._resolved.config.connector)

    @property
    def _options(self) -> Any:
        return self._resolved.options_of(self._spec)
