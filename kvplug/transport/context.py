"""What the factory of a transport is handed: everything from outside that it may use.

Nothing below the composition root (:mod:`kvplug.assembly`) looks anything up by itself; a plugin gets its
options and its identity here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvplug.net.trust.credentials import Credentials
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.pipe import PipeEndpoint
from kvplug.transport.queue import MAX_CHUNK_BYTES, MAX_CHUNKS, WARNING_INTERVAL_S, QueueEndpoint


@attrs.frozen(kw_only=True)
class PipeContext:
    """For the factory of a pipe transport, which returns a ``PipeEndpoint``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    host: str = "127.0.0.1"
    """The interface it may listen on. Loopback means that no other host will connect."""
    device: str = "cpu"
    timeout_s: float = 30.0
    heartbeat_timeout_s: float = 10.0
    make_inner: Callable[[], PipeEndpoint] | None = None
    """For a transport that wraps another one (``TransportSpec.wraps``): makes that one's endpoint, with
    its own options and the rest of this context. ``None`` for all others."""


@attrs.frozen(kw_only=True)
class LookupContext:
    """For the factory of a lookup buffer, which returns a ``LookupEndpoint``."""

    options: Any
    buffer_size: int
    """Bytes of tensors it may hold."""
    device: str = "cpu"
    timeout_s: float = 30.0


def _ranks(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


@attrs.frozen(kw_only=True)
class QueueContext:
    """For the factory of a message queue, which returns a ``QueueEndpoint``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    host: str = "127.0.0.1"
    """The interface it may listen on, for readers that memory does not reach."""
    n_reader: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How many readers a queue has where its maker does not name them."""
    local_reader_ranks: tuple[int, ...] | None = attrs.field(default=None, converter=_ranks)
    """Readers that are to be reached through memory; ``None``: all that can be."""
    max_chunk_bytes: int = attrs.field(default=MAX_CHUNK_BYTES, validator=attrs.validators.ge(1))
    """Size of one place for a message. Larger ones pass too, and cost more."""
    max_chunks: int = attrs.field(default=MAX_CHUNKS, validator=attrs.validators.ge(1))
    """How many messages may lie unread by the slowest reader."""
    timeout_s: float = 30.0
    warning_interval_s: float = attrs.field(default=WARNING_INTERVAL_S, validator=attrs.validators.gt(0))
    """A call that waits for so long says whom it waits for, again and again."""
    heartbeat_timeout_s: float = 10.0
    make_inner: Callable[[], QueueEndpoint] | None = None
    """For a queue that wraps another one (``TransportSpec.wraps``): makes that one's endpoint, with
    its own options and the rest of this context. ``None`` for all others."""


@attrs.frozen(kw_only=True)
class CommunicatorContext:
    """For the factory of a device communicator, which returns a ``DeviceCommunicator``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    host: str = "127.0.0.1"
    """The interface its data plane may use."""
    group: StatelessGroup
    """The ranks that take part, and how they talk before a transport does. It stays its maker's."""
    device_group: Any = None
    """A group of the device's own library, where the engine has one already."""
    device: str = "cpu"
    """Of this rank's tensors."""
    unique_name: str = ""
    """Tells the engine's groups apart. With "ep" as a word in it, it serves expert parallelism."""
    ranks: tuple[int, ...] | None = attrs.field(default=None, converter=_ranks)
    """The members' ranks among all of the engine's, in the order of the group; ``None``: the group is all."""
    global_world_size: int | None = None
    """How many ranks the engine has; ``None``: as many as ``ranks`` need."""
    data_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    all2all_backend: str = ""
    """How experts' tokens are to be exchanged: "naive", "allgather_reducescatter" (that is what counts where
    nothing is said), or another way that the transport knows."""
    timeout_s: float = 30.0
    """How long a collective waits for the other ranks where its caller says nothing."""
