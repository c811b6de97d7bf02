"""Contexts: the argument of a transport's factory, with everything from outside that it may use.

Only the composition root (:mod:`kvplug.assembly`) looks names up; a plugin gets its options and its identity
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import attrs

from kvplug.config.addresses import DEFAULT_HOST
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.pipe import PipeEndpoint
from kvplug.transport.queue import MAX_CHUNK_BYTES, MAX_CHUNKS, WARNING_INTERVAL_S, QueueEndpoint
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.store import StoreLink


@attrs.frozen(kw_only=True)
class PipeContext:
    """For the factory of a pipe transport, which returns a ``PipeEndpoint``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    """What its listeners and connections prove themselves with."""
    host: str = DEFAULT_HOST
    """Where it may listen: on a host's interface, or, for a Unix socket, on this host only."""
    device: str = "cpu"
    """The device of the tensors, such as ``cuda:0``."""
    timeout_s: float = 30.0
    """Seconds that a call waits where it says nothing else."""
    heartbeat_timeout_s: float = 10.0
    """Seconds of silence after which a peer on another host counts as dead."""
    max_message_bytes: int | None = None
    """The largest message for which a pipe takes memory of its own; ``None``: what the process or device can
    have. It is compared with what a peer announces, before memory is asked for."""
    make_inner: Callable[[], PipeEndpoint] | None = None
    """For a transport that wraps another one (``TransportSpec.wraps``): makes that one's endpoint, with
    its own options and the rest of this context. ``None`` for all others."""


@attrs.frozen(kw_only=True)
class LookupContext:
    """For the factory of a lookup buffer, which returns a ``LookupEndpoint``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    buffer_size: int
    """Bytes of tensors it may hold."""
    device: str = "cpu"
    """Where the tensors of entries are put that are received."""
    timeout_s: float = 30.0
    """Seconds that a call waits where it says nothing else."""
    max_message_bytes: int | None = None
    """The largest entry for which an end that reaches a store takes memory; ``None``: what the process or
    device can have."""


def _ranks(value: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if value is None else tuple(value)


@attrs.frozen(kw_only=True)
class QueueContext:
    """For the factory of a message queue, which returns a ``QueueEndpoint``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    """What its listeners and connections prove themselves with."""
    host: str = DEFAULT_HOST
    """The interface it may listen on, for readers that memory does not reach; none, for a Unix socket."""
    n_reader: int = attrs.field(default=1, validator=attrs.validators.ge(0))
    """How many readers a queue has if ``create`` does not name them."""
    local_reader_ranks: tuple[int, ...] | None = attrs.field(default=None, converter=_ranks)
    """Readers to reach through shared memory; ``None``: all that can be."""
    max_chunk_bytes: int = attrs.field(default=MAX_CHUNK_BYTES, validator=attrs.validators.ge(1))
    """Size of one slot for a message. Larger messages are possible, and cost more."""
    max_chunks: int = attrs.field(default=MAX_CHUNKS, validator=attrs.validators.ge(1))
    """How many messages may lie unread by the slowest reader."""
    timeout_s: float = 30.0
    """Seconds that a call waits where it says nothing else."""
    warning_interval_s: float = attrs.field(default=WARNING_INTERVAL_S, validator=attrs.validators.gt(0))
    """Each time a call has waited for this long, it logs which peers it waits for."""
    heartbeat_timeout_s: float = 10.0
    """Seconds of silence after which an end on another host counts as dead."""
    make_inner: Callable[[], QueueEndpoint] | None = None
    """For a queue that wraps another one (``TransportSpec.wraps``): makes that one's endpoint, with
    its own options and the rest of this context. ``None`` for all others."""


@attrs.frozen(kw_only=True)
class StoreContext:
    """For the factory of a store, which returns a ``Store`` or a ``BlockingStore``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    """What its listeners and connections prove themselves with."""
    seal: PageSeal = attrs.field(factory=PageSeal)
    """How its pages are protected, where other programs can write to it: with a proof if the config has a
    secret."""
    host: str = DEFAULT_HOST
    """Where it may listen: on a host's interface, or, for a Unix socket, on this host only."""
    allow_unauthenticated_data_plane: bool = False
    """Whether it may use connections between hosts whose ends prove nothing."""
    buffer_size: int = 2**30
    """Bytes of memory that it may use for pages, where its options say nothing else."""
    timeout_s: float = 30.0
    """The default deadline of a job."""
    heartbeat_timeout_s: float = 10.0
    """Seconds of silence after which a peer on another host counts as dead."""
    connect: Callable[[str, float | None], StoreLink] | None = None
    """``connect(address, timeout)``: a link to a program that serves a store there (``kvplug store serve``).

    Raises what a handshake raises. ``None`` where the caller has no way to connect."""


@attrs.frozen(kw_only=True)
class DirectoryContext:
    """For the factory of a directory, which returns a ``Directory``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    url: str = attrs.field(repr=False)
    """As the config's ``peers`` names it, for example ``redis://10.0.0.7:6379/0``. May hold a password."""
    timeout_s: float = 3.0
    """Every call ends within it."""


@attrs.frozen(kw_only=True)
class CommunicatorContext:
    """For the factory of a device communicator, which returns a ``DeviceCommunicator``."""

    options: Any
    """An instance of the spec's options class, or ``None``."""
    credentials: Credentials
    """What its connections prove themselves with."""
    host: str = DEFAULT_HOST
    """The interface its data plane may use; loopback, for a Unix socket."""
    group: StatelessGroup
    """The ranks that take part; it carries their messages before the transport does. The caller owns it."""
    device_group: Any = None
    """A group of the device's own library, where the engine has one already."""
    device: str = "cpu"
    """The device of this rank's tensors."""
    unique_name: str = ""
    """Distinguishes the engine's groups. With the word "ep" in it, the group serves expert parallelism."""
    ranks: tuple[int, ...] | None = attrs.field(default=None, converter=_ranks)
    """The engine-wide ranks of the members, in the order of the group; ``None``: the group is all ranks."""
    global_world_size: int | None = None
    """How many ranks the engine has; ``None``: as many as ``ranks`` need."""
    data_parallel_size: int = attrs.field(default=1, validator=attrs.validators.ge(1))
    """How many replicas of the model the engine has whose ranks share their experts."""
    all2all_backend: str = ""
    """How experts' tokens are exchanged: "naive", "allgather_reducescatter" (the default), or another backend
    of the transport."""
    timeout_s: float = 30.0
    """The default timeout of a collective."""
