"""Config + Registry -> a store as the page cache of another engine."""

from __future__ import annotations

import uuid
from typing import Final

from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import StoreOpener, store_links
from kvplug.config import Config
from kvplug.engine.page_cache import PageCache
from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Reporter
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.model import unknown_weights

_OF_CONNECTORS: Final = (
    "connector",
    "role",
    "peers",
    "peers_lease_s",
    "queue",
    "queue_warning_interval_s",
    "lookup_buffer",
    "communicator",
    "device",
)
"""Keys that nothing but a connector reads."""


def build_page_cache(
    config: Config, *, engine: str, namespace: bytes = b"", registry: Registry | None = None
) -> PageCache:
    """The store of the config, for an engine that has keys of its own and whose pages are flat bytes.

    Args:
        engine: name of the engine; pages of others are never found.
        namespace: what determines the content of pages besides the engine's keys and the config's
            ``weights``: model, revision, dtype. If both are empty, no other cache finds these pages, nor one
            that is built later; a warning says so.

    Raises:
        ConfigError: keys that only connectors have, no store or several, wrong options; every fault at once.
        UnknownTransportError, AmbiguousNameError: no plugin offers the store, or two do.
        PluginError: it cannot work here, or its factory failed.
        InsecureAddressError: other hosts can reach the config's host, and there is no secret.
        ResourceExhaustedError: a descriptor, thread, memory or space ran out.
    """
    faults = [
        f"{key}: a value was given; {engine} decides what moves, and only the store"
        " is kvplug's: remove the key"
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
    resolved = ResolvedConfig.to_build(config, registry)
    resolved.check(keys=("stores", "transport", "sinks", "integrity"))
    if not (namespace or config.weights):
        namespace = unknown_weights(f"the model under {engine}", uuid.uuid4().hex).encode()
    stats = TransferStats()
    store = StoreOpener(resolved, store_links(resolved, stats)).open(config.stores[0])
    try:
        reporter = Reporter(stats, resolved.sinks(), {"connector": engine, "side": "worker", "role": "both"})
        return PageCache(
            store,
            engine=engine,
            namespace=config.weights.encode() + b"\0" + namespace,
            timeout_s=config.timeout_s,
            stats=stats,
            on_close=reporter.close,
        )
    except BaseException:
        store.abort()
        raise
