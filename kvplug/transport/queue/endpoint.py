"""The endpoint, which makes the ends of queues, and the endpoint's context."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.config.addresses import DEFAULT_HOST, Address
from kvplug.errors import ConfigError, KvplugError, TransportError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.credentials import Credentials
from kvplug.net.wire import encode
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.queue.handle import QueueHandle, listed
from kvplug.transport.queue.queue import MAX_CHUNK_BYTES, MAX_CHUNKS, WARNING_INTERVAL_S, MessageQueue

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_MOST_WORDS = 4000
"""The most characters of an error that are sent to the other ranks."""


class QueueEndpoint(abc.ABC):
    """What a message queue's factory returns. It makes the ends of queues. A transport implements
    :meth:`create` and :meth:`create_from_handle`."""

    @attrs.frozen(kw_only=True)
    class Context:
        """For the factory of a message queue, which returns a ``QueueEndpoint``."""

        options: Any
        """An instance of the spec's options class, or ``None``."""
        credentials: Credentials
        """Its listeners and connections prove themselves with these."""
        host: str = DEFAULT_HOST
        """The interface on which it may listen for readers that shared memory does not reach. A Unix socket
        needs no interface."""
        n_reader: int = attrs.field(default=1, validator=attrs.validators.ge(0))
        """How many readers a queue has if ``create`` does not name them."""
        local_reader_ranks: tuple[int, ...] | None = attrs.field(
            default=None, converter=attrs.converters.optional(tuple)
        )
        """Readers to reach through shared memory; ``None``: all readers that shared memory can reach."""
        max_chunk_bytes: int = attrs.field(default=MAX_CHUNK_BYTES, validator=attrs.validators.ge(1))
        """Size of one slot for a message. Larger messages are possible, but cost more."""
        max_chunks: int = attrs.field(default=MAX_CHUNKS, validator=attrs.validators.ge(1))
        """How many unread messages the slowest reader may have."""
        timeout_s: float = 30.0
        """The default timeout of a call, in seconds."""
        warning_interval_s: float = attrs.field(default=WARNING_INTERVAL_S, validator=attrs.validators.gt(0))
        """A call that waits logs the peers it waits for at this interval, in seconds."""
        heartbeat_timeout_s: float = 10.0
        """Seconds of silence after which an end on another host counts as dead."""

    def __init__(self, context: QueueEndpoint.Context) -> None:
        self.context = context
        """The context that the factory received."""

    @abc.abstractmethod
    def create(self, reader_ranks: Sequence[int] | None = None) -> MessageQueue:
        """Make a new queue and return the writer's end.

        ``reader_ranks`` names the readers. By default they are 0 to ``n_reader - 1``, with the context's
        ``n_reader``. Does not wait for readers.

        Raises:
            ConfigError: a rank comes twice.
            TransportError, AddressInUseError, InsecureAddressError: the queue cannot be made.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for the queue.
        """

    @abc.abstractmethod
    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MessageQueue:
        """Attach reader ``rank`` and return its end. Each rank attaches once: a second reader would miss
        messages.

        Raises:
            WireError: the handle belongs to another transport.
            ConfigError: ``rank`` is not a reader of that queue, or has attached already.
            PeerGoneError: the writer is gone.
            TimeoutError: the writer did not answer.
            AuthenticationError: one end did not prove itself to the other.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for the end.
        """

    @NamedExhaustion("making a message queue with the ranks of a group")
    def create_from_process_group(
        self,
        group: StatelessGroup | ProcessGroup,
        writer_rank: int = 0,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> MessageQueue:
        """Make a queue from ``writer_rank`` to all other ranks of a group, and return this rank's end.

        All ranks call this. It returns when the queue is ready at all of them, and makes the queue either at
        all of them or at none. ``group`` is a group of kvplug or of torch, and ``writer_rank`` a rank in that
        group. A torch process group needs CPU tensors (gloo), which carry the address of a kvplug group of
        the same ranks: a Unix socket, or the context's host if there is a secret or TLS. The collectives of
        the process group wait as long as its own timeout allows.

        Raises:
            TransportError: a rank could not make its end. All ranks raise this error, which names the rank
                and the reason. Or a collective of a torch process group failed.
            TimeoutError, PeerGoneError: a rank, which the error names, did not call this or is gone.
            ClosedError, BusyError: as the law of a kvplug group says.
            ConfigError: the group has no rank ``writer_rank``.
            UnsupportedError: ``group`` is neither kind of group, or a process group without CPU tensors.
            ResourceExhaustedError: this process has no free descriptor, thread or memory for its end.
        """
        deadline = Deadline.after(timeout, self.context.timeout_s)
        if isinstance(group, StatelessGroup):
            return self._create_in(group, writer_rank, deadline)
        host, credentials = self.context.host, self.context.credentials
        proves = credentials.secret is not None or credentials.tls is not None
        address = str(Address(host)) if proves and not host.startswith("unix:") else "unix:"
        with StatelessGroup.from_process_group(
            group,
            address,
            credentials=credentials,
            timeout=deadline.remaining(),
            timeout_s=self.context.timeout_s,
        ) as ranks:
            return self._create_in(ranks, writer_rank, deadline)

    def _create_in(self, group: StatelessGroup, writer_rank: int, deadline: Deadline) -> MessageQueue:
        if not 0 <= writer_rank < group.world_size:
            raise ConfigError(
                f"the writer must be a rank in 0..{group.world_size - 1}, got {writer_rank}"
                f" (this is {group.rank})"
            )
        is_writer = group.rank == writer_rank
        queue: MessageQueue | None = None
        error: Exception | None = None
        plain: Any = None
        try:
            try:
                if is_writer:
                    queue = self.create([rank for rank in range(group.world_size) if rank != writer_rank])
                    plain = queue.export_handle().as_plain()
                    encode(plain)  # a handle that cannot be encoded is a fault of this rank
            except Exception as e:
                error, plain = e, None
            plain = group.broadcast(plain, writer_rank, deadline.remaining())
            try:
                if plain is not None and not is_writer:
                    handle = QueueHandle.from_plain(plain)
                    queue = self.create_from_handle(handle, group.rank, deadline.remaining())
            except Exception as e:
                error = e
            made = _agreed(group, queue, error, deadline)
            made.wait_until_ready(deadline.remaining())
        except BaseException:
            if queue is not None:
                queue.abort()
            raise
        return made

    def _reader_ranks(self, given: Sequence[int] | None) -> tuple[int, ...]:
        """Check and return the reader ranks that :meth:`create` was given. For transports."""
        ranks = tuple(range(self.context.n_reader)) if given is None else tuple(given)
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ConfigError(f"reader_ranks must be whole numbers, each once; got {listed(ranks)}")
        return ranks

    def _local_reader_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of ``ranks`` that the context allows to be reached through shared memory. For
        transports."""
        local = self.context.local_reader_ranks
        return tuple(rank for rank in ranks if local is None or rank in local)


def _agreed(
    group: StatelessGroup, queue: MessageQueue | None, error: Exception | None, deadline: Deadline
) -> MessageQueue:
    """Return ``queue`` if every rank has made its end. Raises as ``create_from_process_group``."""
    why = "" if error is None else f"{type(error).__name__}: {error}"[:_MOST_WORDS]
    try:
        faults = group.all_gather(why, deadline.remaining())
    except KvplugError:
        if error is None:
            raise
        faults = [why if rank == group.rank else "" for rank in range(group.world_size)]
    failed = [
        f"rank {rank} cannot make its end of the queue: {peer_text(fault, 2 * _MOST_WORDS)}"
        for rank, fault in enumerate(faults)
        if fault != ""
    ]
    if failed or queue is None:
        raise TransportError("; ".join(failed)) from error
    return queue
