"""Config + Registry -> a message queue's endpoint."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import attrs

from kvplug.assembly.making import made
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import (
    ResolvedConfig,
    Wrapper,
    choose_transport,
    credentials_of,
    must_authenticate,
)
from kvplug.config import Config
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.capabilities import Requirements
from kvplug.transport.context import QueueContext
from kvplug.transport.queue import MAX_CHUNK_BYTES, MAX_CHUNKS, QueueEndpoint
from kvplug.transport.spec import Kind, TransportSpec


@NamedExhaustion("building a message queue")
def build_queue(
    config: Config,
    *,
    n_reader: int = 1,
    local_reader_ranks: Iterable[int] | None = None,
    max_chunk_bytes: int = MAX_CHUNK_BYTES,
    max_chunks: int = MAX_CHUNKS,
    warning_interval_s: float | None = None,
    registry: Registry | None = None,
) -> QueueEndpoint:
    """The endpoint of the message queue that the config's ``queue`` names. It makes the ends.

    If that queue wraps another, the inner one must work here as if the config named it. The arguments are
    those of :class:`~kvplug.transport.context.QueueContext`; ``warning_interval_s`` defaults to the config's
    ``queue_warning_interval_s``.

    Raises:
        ConfigError: the options are wrong; every fault at once.
        UnknownTransportError, AmbiguousNameError: no plugin offers the name, or two do.
        PluginError: the named one, or its inner one, cannot work here, or none is installed for "auto".
        InsecureAddressError: other hosts can reach the config's host, and there is no secret.
        ResourceExhaustedError: the process has no free descriptor or memory for it.
    """
    resolved = ResolvedConfig.to_build(config, registry)
    resolved.check(keys=("queue",))
    spec, wrapper = choose_queue(resolved)
    context = QueueContext(
        options=resolved.options_of(spec),
        credentials=credentials_of(config),
        host=config.host,
        n_reader=n_reader,
        local_reader_ranks=local_reader_ranks,
        max_chunk_bytes=max_chunk_bytes,
        max_chunks=max_chunks,
        timeout_s=config.timeout_s,
        warning_interval_s=config.queue_warning_interval_s
        if warning_interval_s is None
        else warning_interval_s,
        heartbeat_timeout_s=config.heartbeat_timeout_s,
    )
    if wrapper is None:
        return _made(spec, context)
    make_inner = functools.partial(_made, spec, context)
    return _made(wrapper.spec, attrs.evolve(context, options=wrapper.options, make_inner=make_inner))


def choose_queue(resolved: ResolvedConfig) -> tuple[TransportSpec, Wrapper | None]:
    """The queue that the config names, and the one that it has wrap it. Raises as ``choose_transport``."""
    config = resolved.config
    wrapper = resolved.wrapper(Kind.QUEUE, config.queue)
    name = config.queue if wrapper is None else wrapper.inner
    required = Requirements(authenticated=must_authenticate(config))
    return choose_transport(resolved, Kind.QUEUE, name, required), wrapper


def _made(spec: TransportSpec, context: QueueContext) -> QueueEndpoint:
    return made(spec.called, QueueEndpoint, spec.load_factory(), context)
