"""The factory of the queue "shm"."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Final

from kvplug import ConfigError, TransportError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Address,
    Connection,
    Deadline,
    NamedExhaustion,
    PeerIdentity,
    QueueEndpoint,
    Timeout,
    WireError,
)
from kvplug_shm.memory.pool import Pool
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue import join
from kvplug_shm.queue.admission import Admission
from kvplug_shm.queue.ends import limits_of
from kvplug_shm.queue.join import PURPOSE
from kvplug_shm.queue.local_reader import LocalSource
from kvplug_shm.queue.reader import ShmReader
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.remote_source import RemoteSource
from kvplug_shm.queue.ring_buffer import ShmRingBuffer, Sizes
from kvplug_shm.queue.writer import ShmWriter
from kvplug_shm.ring.ends import WritingEnd

NAME: Final = "shm"
_NOWHERE: Final = "-"


class ShmQueueEndpoint(QueueEndpoint):
    """Readers on the writer's host share its memory; the others get the messages over a connection each.

    The context's ``local_reader_ranks`` decide which readers use memory. If it is ``None``, every reader that
    can reach the writer's Unix socket does, and the writer also listens on the context's host unless that is
    a Unix socket or a loopback address.
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
                end = WritingEnd(ring.words, sizes.n_reader, sizes.max_chunks)
                reader_table = ReaderTable(ring, end, ranks)
                undo_memory.pop_all()
            admission = Admission(
                reader_table,
                sizes,
                fd,
                context.credentials,
                context.heartbeat_timeout_s,
                self._remote_address(all_readers_local=len(local) == len(ranks)),
            )
            undo.callback(admission.close)
            handle = QueueEndpoint.Handle(
                transport=NAME,
                reader_ranks=ranks,
                local_reader_ranks=local,
                data={
                    "queue": admission.queue,
                    "domain": domain,
                    "contact": admission.contact,
                    "remote_contact": admission.remote_contact,
                },
            )
            undo.pop_all()
        return ShmWriter(
            context, options, handle, ring=ring, end=end, reader_table=reader_table, admission=admission
        )

    def _remote_address(self, *, all_readers_local: bool) -> str:
        """Where the writer listens for readers that do not share its memory; empty: there are none."""
        context = self.context
        host = context.host
        is_unix = host.startswith("unix:")
        one_host = is_unix or Address(host).is_loopback
        if all_readers_local and (context.local_reader_ranks is not None or one_host):
            return ""
        return Address.beside(host) if is_unix else str(Address(host))

    @NamedExhaustion("making a reader's end of a queue 'shm'")
    def create_from_handle(
        self, handle: QueueEndpoint.Handle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> ShmReader:
        deadline = Deadline.after(timeout, self.context.timeout_s)
        handle.check(NAME, rank)
        match handle.data:
            case {
                "queue": str(queue),
                "domain": str(domain),
                "contact": str(contact),
                "remote_contact": str(remote_contact),
            }:
                here = PeerIdentity.of_this_process().domain
                same = here == domain or _NOWHERE in (here, domain)  # where it is not known, try it
                if rank in handle.local_reader_ranks and same:
                    return self._local_reader(handle, queue, contact, rank, deadline)
                if not remote_contact:
                    raise TransportError(
                        f"the memory of this queue's writer does not reach reader rank {rank}, and it listens"
                        " on no network: name the ranks on its host as its local_reader_ranks, and give it a"
                        " host that can be reached from here"
                    )
                return self._remote_reader(handle, queue, remote_contact, rank, deadline)
        raise WireError("this is no handle of a queue 'shm'; pass on what export_handle() gave")

    def _local_reader(
        self, handle: QueueEndpoint.Handle, queue: str, contact: str, rank: int, deadline: Deadline
    ) -> ShmReader:
        context, options = self.context, self._options
        connection = Connection.dial(contact, context.credentials, PURPOSE, deadline.remaining())
        joined = join.join(connection, queue, rank, context.heartbeat_timeout_s, deadline)
        source = LocalSource(joined, options.spin_us * 1e-6)
        limits = limits_of(joined.ring.sizes.max_message_bytes)
        return ShmReader(context, handle, rank, source, limits, Pool(options.pool_bytes))

    def _remote_reader(
        self, handle: QueueEndpoint.Handle, queue: str, contact: str, rank: int, deadline: Deadline
    ) -> ShmReader:
        context, pool = self.context, Pool(self._options.pool_bytes)
        connection = Connection.dial(contact, context.credentials, PURPOSE, deadline.remaining())
        try:
            heartbeat_timeout_s = context.heartbeat_timeout_s
            writer = join.ask(connection, queue, rank, heartbeat_timeout_s, deadline, shares_memory=False)
            with contextlib.closing(writer):
                if (most := writer.sizes.max_message_bytes) > self._max_message_bytes:
                    raise ConfigError(
                        f"options.shm.max_message_bytes: {self._max_message_bytes} was given for reader rank"
                        f" {rank}, and the writer of this queue sends up to {most}"
                    )
                source = RemoteSource(
                    connection,
                    writer.take_pidfd(),
                    writer.silence_s,
                    rank=rank,
                    max_message_bytes=self._max_message_bytes,
                    max_unread=writer.sizes.max_chunks,
                    pool=pool,
                )
        except BaseException:
            connection.close()
            raise
        try:
            join.confirm(connection, deadline)
            source.begin(deadline)
        except BaseException:
            source.leave(died=True)
            raise
        limits = limits_of(self._max_message_bytes)
        return ShmReader(context, handle, rank, source, limits, pool)
