"""The factory of the queue "shm"."""

from __future__ import annotations

import contextlib
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
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.memory.pool import Pool
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue import join
from kvplug_shm.queue.admission import Admission
from kvplug_shm.queue.join import PURPOSE
from kvplug_shm.queue.local_reader import LocalSource
from kvplug_shm.queue.reader import ShmReader, Source
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
        """At least the size of a chunk, so that each chunk is a permitted message."""
        return max(self._options.max_message_bytes, self.context.max_chunk_bytes)

    @NamedExhaustion("making the writer's end of a queue 'shm'")
    def create(self, reader_ranks: Sequence[int] | None = None) -> ShmWriter:
        context, options = self.context, self._options
        ranks = self._reader_ranks(reader_ranks)
        local = self._local_reader_ranks(ranks)
        sizes = Sizes(len(ranks), context.max_chunks, context.max_chunk_bytes, self._max_message_bytes)
        domain = PeerIdentity.of_this_process().domain
        remote_address = self._remote_address(all_readers_local=len(local) == len(ranks))
        with contextlib.ExitStack() as undo:
            ring, fd = ShmRingBuffer.create(sizes)
            undo.callback(ring.close)
            end = WritingEnd(ring.words, sizes.n_reader, sizes.max_chunks)
            reader_table = ReaderTable(ring, end, ranks)
            admission = Admission(
                reader_table, sizes, fd, context.credentials, context.heartbeat_timeout_s, remote_address
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
                    return self._reader(handle, queue, contact, rank, deadline, shares_memory=True)
                if remote_contact:
                    return self._reader(handle, queue, remote_contact, rank, deadline, shares_memory=False)
                raise TransportError(
                    f"the memory of this queue's writer does not reach reader rank {rank}, and it listens"
                    " on no network: name the ranks on its host as its local_reader_ranks, and give it a"
                    " host that can be reached from here"
                )
        raise WireError("this is not a handle of a queue 'shm'; pass on what export_handle() returned")

    def _reader(
        self,
        handle: QueueEndpoint.Handle,
        queue: str,
        contact: str,
        rank: int,
        deadline: Deadline,
        *,
        shares_memory: bool,
    ) -> ShmReader:
        context, options, pool = self.context, self._options, Pool(self._options.pool_bytes)
        connection = Connection.dial(contact, context.credentials, PURPOSE, deadline.remaining())
        with contextlib.ExitStack() as undo:
            undo.callback(connection.close)
            writer = JoiningPeer(connection, context.heartbeat_timeout_s, deadline)
            with contextlib.closing(writer):
                index, sizes = join.ask(writer, queue, rank, shares_memory=shares_memory)
                most = sizes.max_message_bytes
                source: Source
                if shares_memory:
                    ring = ShmRingBuffer.attach(sizes, writer.fds[0])
                    source = LocalSource(connection, ring, index, options.spin_us * 1e-6)
                elif most > self._max_message_bytes:
                    raise ConfigError(
                        f"options.shm.max_message_bytes: {self._max_message_bytes} was given for reader rank"
                        f" {rank}, and the writer of this queue sends up to {most}"
                    )
                else:
                    max_unread, most = sizes.max_chunks, self._max_message_bytes
                    source = RemoteSource(
                        writer, rank=rank, max_message_bytes=most, max_unread=max_unread, pool=pool
                    )
                undo.callback(source.leave, died=True)
                source.join(writer)
            undo.pop_all()
        return ShmReader(context, handle, rank, source, most, pool)
