"""Builds the message queue, lookup buffer, communicator or page cache that a config names."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any, Final

import attrs

from kvplug.assembly.links import LinkSettings
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import StoreOpener
from kvplug.config.config import Config
from kvplug.engine.page_cache import PageCache
from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Reporter
from kvplug.negotiation.model import ModelInfo
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import from_plain, to_plain
from kvplug.transport.communicator import DeviceCommunicator
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.lookup import LookupEndpoint
from kvplug.transport.queue import MAX_CHUNK_BYTES, MAX_CHUNKS, WARNING_INTERVAL_S, QueueEndpoint
from kvplug.transport.spec import Kind, TransportSpec

_OF_CONNECTORS: Final = (
    "connector",
    "role",
    "peers",
    "peers_lease_s",
    "queue",
    "lookup_buffer",
    "communicator",
    "device",
)
"""Keys that only connectors read."""


@NamedExhaustion("building a message queue")
def build_queue(
    config: Config,
    *,
    n_reader: int = 1,
    local_reader_ranks: Iterable[int] | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    max_chunks: int = MAX_CHUNKS,
    warning_interval_s: float = WARNING_INTERVAL_S,
    registry: Registry | None = None,
) -> QueueEndpoint:
    """Build the endpoint of the message queue that the config's ``queue`` names. It makes the queue's ends.

    The arguments are those of :class:`~kvplug.transport.QueueEndpoint.Context`.

    Raises:
        ConfigError: the options are wrong; the error lists every fault.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: the named queue cannot work here, or none is installed for "auto".
        InsecureAddressError: the config has a TCP address, but neither a secret nor TLS.
        ResourceExhaustedError: the process has no free descriptor or memory.
    """
    endpoint: QueueEndpoint = ResolvedConfig.to_build(config, registry, "queue").build(
        Kind.QUEUE,
        n_reader=n_reader,
        local_reader_ranks=local_reader_ranks,
        max_chunk_bytes=max_chunk_bytes,
        max_chunks=max_chunks,
        warning_interval_s=warning_interval_s,
    )
    return endpoint


@NamedExhaustion("building a lookup buffer")
def build_lookup(config: Config, *, registry: Registry | None = None) -> LookupEndpoint:
    """Build the endpoint of the lookup buffer that the config's ``lookup_buffer`` names.

    Its ``hold`` makes a store of the config's ``buffer_size``; its ``reach`` makes an end that uses another
    process's store over two pipes.

    Raises:
        ConfigError: the options are wrong; the error lists every fault.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: none is installed for "auto", or the factory did not return an endpoint.
        ResourceExhaustedError: the process has no free descriptor or memory.
    """
    resolved = ResolvedConfig.to_build(config, registry, "lookup_buffer")
    endpoint: LookupEndpoint = resolved.build(Kind.LOOKUP_BUFFER)
    return endpoint


@NamedExhaustion("building a device communicator")
def build_communicator(
    config: Config,
    group: StatelessGroup,
    *,
    device: str | None = None,
    device_group: Any = None,
    unique_name: str = "",
    ranks: Iterable[int] | None = None,
    global_world_size: int | None = None,
    data_parallel_size: int = 1,
    registry: Registry | None = None,
) -> DeviceCommunicator:
    """Build this rank's end of the device communicator that the config's ``communicator`` names.

    All ranks of the group call this. "auto" is the fastest communicator that all ranks can use, between the
    hosts that they are on. ``device`` defaults to the config's; the other arguments are those of
    :class:`~kvplug.transport.DeviceCommunicator.Context`.

    Raises:
        ConfigError: the options are wrong; the error lists every fault. Or another rank's config names
            another communicator; the error names the rank.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: the named communicator cannot work here, or none is installed for "auto".
        InsecureAddressError: the config has a TCP address, but neither a secret nor TLS.
        TimeoutError, PeerGoneError: a rank did not join, or is gone; the error names the rank.
        ResourceExhaustedError: the process has no free descriptor, thread or memory.
    """
    resolved = ResolvedConfig.to_build(config, registry, "communicator")
    device = config.device if device is None else device
    communicator: DeviceCommunicator = resolved.make(
        _agreed(resolved, group, device),
        device=device,
        group=group,
        device_group=device_group,
        unique_name=unique_name,
        ranks=ranks,
        global_world_size=global_world_size,
        data_parallel_size=data_parallel_size,
    )
    return communicator


@attrs.frozen(kw_only=True)
class _Choice:
    """What a rank can use as the device communicator."""

    communicator: str
    """As its config names it."""
    domain: str
    """Where it is; see :class:`PeerIdentity`."""
    able: tuple[str, ...]


def _agreed(resolved: ResolvedConfig, group: StatelessGroup, device: str) -> TransportSpec:
    """Choose the same device communicator at all ranks."""
    if group.world_size == 1:
        return resolved.chosen(Kind.COMMUNICATOR, device)
    name, domain = resolved.config.communicator, PeerIdentity.of_this_process().domain
    mine = _Choice(communicator=name, domain=domain, able=resolved.able(Kind.COMMUNICATOR, device))
    gathered = group.all_gather(to_plain(mine), resolved.config.timeout_s)
    choices = [from_plain(each, _Choice, f"the choice of rank {rank}") for rank, each in enumerate(gathered)]
    for rank, other in enumerate(choices):
        if other.communicator != name:
            raise ConfigError(
                f"communicator: this rank's config names {name!r}, and that of rank {rank}"
                f" {peer_text(other.communicator)!r}; all ranks of a group need the same"
            )
    return resolved.chosen(
        Kind.COMMUNICATOR,
        device,
        cross_host=domain == "-" or any(other.domain != domain for other in choices),
        among=set.intersection(*(set(other.able) for other in choices)),
    )


def worker_transports(config: Config, registry: Registry | None = None) -> dict[str, str]:
    """Return the names of the ``"queue"`` and ``"communicator"`` that an engine with several workers gets.

    "auto" is resolved for this host. Programs call this to show what they use, and to fail before they spend
    minutes on loading a model.

    Raises:
        ConfigError: the options are wrong; the error lists every fault.
        UnknownTransportError, AmbiguousNameError: no plugin offers a name, or two do.
        PluginError: one cannot work here; the error lists every reason.
    """
    resolved = ResolvedConfig(config, registry)
    resolved.check(keys=("queue", "communicator"))
    return {
        "queue": resolved.chosen(Kind.QUEUE).name,
        "communicator": resolved.chosen(Kind.COMMUNICATOR, config.device).name,
    }


def build_page_cache(
    config: Config, *, engine: str, namespace: bytes = b"", registry: Registry | None = None
) -> PageCache:
    """Open the config's store for an engine that has its own keys and whose pages are flat bytes.

    Args:
        engine: name of the engine; pages of other engines are never found.
        namespace: whatever determines the content of pages besides the engine's keys and the config's
            ``weights``: model, revision, dtype. If ``namespace`` and ``weights`` are both empty, only this
            cache can find its pages, and a warning is logged.

    Raises:
        ConfigError: the config has keys that only connectors read, does not name exactly one store, or has
            wrong options; the error lists every fault.
        UnknownTransportError, AmbiguousNameError: no plugin offers the store, or two do.
        PluginError: the store cannot work here, or its factory failed.
        InsecureAddressError: the config has a TCP address, but neither a secret nor TLS.
        ResourceExhaustedError: a descriptor, thread, memory or space ran out.
    """
    faults = [
        f"{key}: a value was given; {engine} decides what moves, and kvplug provides only the store:"
        " remove the key"
        for key in _OF_CONNECTORS
        if key in config.sources
    ]
    if "stores" not in config.sources or len(config.stores) != 1:
        given = ", ".join(config.stores) if "stores" in config.sources else "nothing"
        faults.append(
            f"stores: {given or 'none'} was given; allowed is one store for each cache of {engine}, such as"
            ' ["fs"]; `kvplug list` shows those that are installed'
        )
    if faults:
        raise ConfigError(*faults, source=config.source)
    resolved = ResolvedConfig.to_build(config, registry, "stores", "transport", "sinks", "integrity")
    if not (namespace or config.weights):
        namespace = ModelInfo.unknown_weights(f"the model under {engine}", uuid.uuid4().hex).encode()
    links = LinkSettings(resolved=resolved)
    store = StoreOpener(links).open(config.stores[0])
    try:
        labels = {"connector": engine, "side": "worker", "role": "both"}
        reporter = Reporter(links.stats, (), labels, owned=resolved.sinks())
        return PageCache(
            store,
            engine=engine,
            namespace=config.weights.encode() + b"\0" + namespace,
            timeout_s=config.timeout_s,
            stats=links.stats,
            on_close=reporter.close,
        )
    except BaseException:
        store.abort()
        raise
