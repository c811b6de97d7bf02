"""The endpoint: it makes the ends of queues."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug.errors import CapacityError, ConfigError, KvplugError, TransportError, UnsupportedError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.peer_text import peer_text
from kvplug.transport.queue.handle import QueueHandle, listed
from kvplug.transport.queue.queue import MessageQueue
from kvplug.transport.queue.rendezvous import Rendezvous, rendezvous_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from kvplug.transport.context import QueueContext
    from kvplug.transport.group.group import StatelessGroup


_MOST_WORDS = 4000
"""Characters of an error that is sent to the other ranks."""


class QueueEndpoint(abc.ABC):
    """What a message queue's factory returns. It makes ends; a transport implements the first two verbs."""

    def __init__(self, context: QueueContext) -> None:
        self.context = context
        """What its factory was given."""

    @abc.abstractmethod
    def create(self, reader_ranks: Sequence[int] | None = None) -> MessageQueue:
        """The writer's end of a new queue.

        ``reader_ranks`` names its readers; by default 0 up to the context's ``n_reader``. Does not wait for
        them.

        Raises:
            ConfigError: a rank comes twice.
            TransportError, AddressInUseError, InsecureAddressError: it cannot be made.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
        """

    @abc.abstractmethod
    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> MessageQueue:
        """The end of reader ``rank``. A rank attaches once: a later reader would miss messages.

        Raises:
            WireError: the handle is another transport's.
            ConfigError: ``rank`` is no reader of that queue, or has attached already.
            PeerGoneError: the writer is gone.
            TimeoutError: the writer did not answer.
            AuthenticationError: one end did not prove itself to the other.
            ResourceExhaustedError: the process has no free descriptor, thread or memory for it.
        """

    @NamedExhaustion("making a message queue with the ranks of a group")
    def create_from_process_group(
        self,
        group: StatelessGroup | ProcessGroup,
        writer_rank: int = 0,
        timeout: Timeout = DEFAULT_TIMEOUT,
    ) -> MessageQueue:
        """This rank's end of a queue from ``writer_rank`` to all other ranks of a group.

        All ranks call it; it returns when the queue is ready at all of them, and it is made at all of them or
        at none. ``group`` is kvplug's or torch's, and ``writer_rank`` a rank in it. A torch process group
        needs CPU tensors (gloo), and how long its collectives wait is its own timeout, not this one.

        Raises:
            TransportError: a rank could not make its end: raised at all ranks, names it and why. Or a
                collective of a torch process group failed.
            TimeoutError, PeerGoneError: a rank did not come, or is gone; names it.
            ClosedError, BusyError: as the law of a kvplug group says.
            ConfigError: ``writer_rank`` is no rank of the group.
            UnsupportedError: it is neither kind of group, or a torch process group without CPU tensors.
            ResourceExhaustedError: this process has no free descriptor, thread or memory for its end.
        """
        rendezvous = rendezvous_of(group)
        if not 0 <= writer_rank < rendezvous.world_size:
            raise ConfigError(
                f"the writer must be a rank in 0..{rendezvous.world_size - 1}, got {writer_rank}"
                f" (this is {rendezvous.rank})"
            )
        is_writer = rendezvous.rank == writer_rank
        deadline = Deadline.after(timeout, self.context.timeout_s)
        queue: MessageQueue | None = None
        error: Exception | None = None
        plain: Any = None
        try:
            if is_writer:
                try:
                    queue = self.create(
                        [rank for rank in range(rendezvous.world_size) if rank != writer_rank]
                    )
                    plain = queue.export_handle().as_plain()
                except Exception as e:
                    error = e
            try:
                plain = rendezvous.broadcast(plain, writer_rank, deadline.remaining())
            except (CapacityError, UnsupportedError) as e:
                if not is_writer:
                    raise
                error = e  # the handle is not carried, and nothing was sent
                plain = rendezvous.broadcast(None, writer_rank, deadline.remaining())
            if plain is not None and not is_writer:
                try:
                    handle = QueueHandle.from_plain(plain)
                    queue = self.create_from_handle(handle, rendezvous.rank, deadline.remaining())
                except Exception as e:
                    error = e
            made = _agreed(rendezvous, queue, error, deadline)
            made.wait_until_ready(deadline.remaining())
        except BaseException:
            if queue is not None:
                queue.abort()
            raise
        return made

    def _reader_ranks(self, given: Sequence[int] | None) -> tuple[int, ...]:
        """For transports: the reader ranks of :meth:`create`."""
        ranks = tuple(range(self.context.n_reader)) if given is None else tuple(given)
        if len(set(ranks)) != len(ranks) or any(type(rank) is not int or rank < 0 for rank in ranks):
            raise ConfigError(f"reader_ranks must be whole numbers, each once; got {listed(ranks)}")
        return ranks

    def _local_reader_ranks(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """For transports: those of ``ranks`` that the context does not place on other hosts."""
        local = self.context.local_reader_ranks
        return tuple(rank for rank in ranks if local is None or rank in local)


def _agreed(
    rendezvous: Rendezvous, queue: MessageQueue | None, error: Exception | None, deadline: Deadline
) -> MessageQueue:
    """``queue``, if every rank has made its end. Raises as ``create_from_process_group``."""
    why = "" if error is None else f"{type(error).__name__}: {error}"[:_MOST_WORDS]
    try:
        told = rendezvous.all_gather(why, deadline.remaining())
    except KvplugError:
        if error is None:
            raise
        told = [why if rank == rendezvous.rank else "" for rank in range(rendezvous.world_size)]
    failed = [
        f"rank {rank} cannot make its end of the queue: {peer_text(each, 2 * _MOST_WORDS)}"
        for rank, each in enumerate(told)
        if each != ""
    ]
    if failed or queue is None:
        raise TransportError("; ".join(failed)) from error
    return queue
