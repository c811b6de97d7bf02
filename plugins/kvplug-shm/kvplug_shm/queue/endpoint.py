"""The factory of the queue "shm"."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Final

import attrs

from kvplug import TransportError
from kvplug.net.wire.copying import copy_bytes
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Address,
    Connection,
    Deadline,
    NamedExhaustion,
    PeerIdentity,
    QueueEndpoint,
    QueueHandle,
    Timeout,
    WireError,
)
from kvplug_shm.native.ends import copy_for_one_of, writing_end
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue.admission import Admission
from kvplug_shm.queue.ends import limits_of
from kvplug_shm.queue.join import PURPOSE, join
from kvplug_shm.queue.local_reader import LocalSource
from kvplug_shm.queue.network import NetworkHalf
from kvplug_shm.queue.reader import ShmReader
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.ring_buffer import ShmRingBuffer, Sizes
from kvplug_shm.queue.writer import ShmWriter

NAME: Final = "shm"
_NOWHERE: Final = "-"


class ShmQueueEndpoint(QueueEndpoint):
    """Readers on the writer's host share its memory; the others are served over the network.

    The context's ``local_reader_ranks`` decide which readers use memory. If it is ``None``, every reader that
    can reach the writer's socket does, and the writer also listens on the network if the context's host is
    not a loopback address.
    """

    def __init__(self, context: QueueEndpoint.Context) -> None:
        super().__init__(context)
        self._options: ShmQueueOptions = context.options if context.options is not None else ShmQueueOptions()

    @property
    def _max_message_bytes(self) -> int:
        """A chunk is no larger message than is permitted."""
        return max(self._options.max_message_bytes, self.context.max_chunk_bytes)

    @NamedExhaustion("making the writer's end of a queue 'shm'")
    def create(self, reader_ranks: Sequence[int] | None = None) -> ShmWriter:
        context, options = self.context, self._options
        ranks = self._reader_ranks(reader_ranks)
        local = self._local_reader_ranks(ranks)
        sizes = Sizes(
            n_reader=len(ranks),
            max_chunks=context.max_chunks,
            max_chunk_bytes=context.max_chunk_bytes,
            max_message_bytes=self._max_message_bytes,
        )
        with contextlib.ExitStack() as undo:
            domain = PeerIdentity.of_this_process().domain
            ring, fd = ShmRingBuffer.create(sizes)
            undo.callback(ring.close)
            with contextlib.ExitStack() as undo_memory:
                undo_memory.callback(os.close, fd)
                end = writing_end(ring.words, sizes.n_reader, sizes.max_chunks, native=options.native)
                reader_table = ReaderTable(ring, end, ranks)
                undo_memory.pop_all()
            admission = Admission(reader_table, sizes, fd, context.credentials, context.heartbeat_timeout_s)
            undo.callback(admission.close)
            network = self._network(reader_table, all_readers_local=len(local) == len(ranks))
            handle = QueueHandle(
                transport=NAME,
                reader_ranks=ranks,
                local_reader_ranks=local,
                data={
                    "domain": domain,
                    "contact": admission.contact,
                    "network": None if network is None else dict(network.data),
                },
            )
            undo.pop_all()
        return ShmWriter(
            context,
            options,
            handle,
            ring=ring,
            end=end,
            reader_table=reader_table,
            admission=admission,
            network=network,
        )

    def _network(self, reader_table: ReaderTable, *, all_readers_local: bool) -> NetworkHalf | None:
        """The network half, if there can be readers on other hosts."""
        context = self.context
        one_host = context.host.startswith("unix:") or Address(context.host).is_loopback
        if all_readers_local and (context.local_reader_ranks is not None or one_host):
            return None
        from kvplug_shm.queue.remote import serve

        return serve(context, reader_table)

    @NamedExhaustion("making a reader's end of a queue 'shm'")
    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> ShmReader:
        deadline = Deadline.after(timeout, self.context.timeout_s)
        handle.check(NAME, rank)
        match handle.data:
            case {"domain": str(domain), "contact": str(contact), "network": None | dict() as network}:
                here = PeerIdentity.of_this_process().domain
                same = here == domain or _NOWHERE in (here, domain)  # where it is not known, try it
                if rank in handle.local_reader_ranks and same:
                    return self._local_reader(handle, contact, rank, deadline)
                if network is None:
                    raise TransportError(
                        f"the memory of this queue's writer does not reach reader rank {rank}, and it listens"
                        " on no network: name the ranks on its host as its local_reader_ranks, and give it a"
                        " host that can be reached from here"
                    )
                return self._remote_reader(handle, network, rank, deadline)
        raise WireError("this is no handle of a queue 'shm'; pass on what export_handle() gave")

    def _local_reader(self, handle: QueueHandle, contact: str, rank: int, deadline: Deadline) -> ShmReader:
        context, options = self.context, self._options
        connection = Connection.dial(contact, context.credentials, PURPOSE, deadline.remaining())
        joined = join(connection, rank, context.heartbeat_timeout_s, deadline)
        source = LocalSource(joined, options.spin_us * 1e-6, native=options.native)
        sizes = joined.ring.sizes
        limits = limits_of(sizes.max_message_bytes)
        copy = copy_for_one_of(sizes.n_reader, native=options.native)
        return ShmReader(
            context, options, handle, rank, source, limits, source.drop, source.check_evicted, copy
        )

    def _remote_reader(
        self, handle: QueueHandle, network: dict[str, object], rank: int, deadline: Deadline
    ) -> ShmReader:
        from kvplug_shm.queue.remote import attach

        options = self._options
        context = attrs.evolve(self.context, options=options)
        source = attach(context, network, rank, deadline)
        limits = limits_of(self._max_message_bytes)
        return ShmReader(context, options, handle, rank, source, limits, _nothing, _nothing, copy_bytes)


def _nothing() -> None:
    """A message from the network is in this process's own memory."""
