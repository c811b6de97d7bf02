"""The factory of the queue "shm"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvplug import (
    DEFAULT_TIMEOUT,
    Deadline,
    QueueContext,
    QueueEndpoint,
    QueueHandle,
    Timeout,
    TransportError,
    WireError,
    dial,
)
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.probe import describe
from kvplug_shm.queue.admission import Admission
from kvplug_shm.queue.ends import limits_of
from kvplug_shm.queue.far import Far
from kvplug_shm.queue.joining import PURPOSE, join
from kvplug_shm.queue.near import NearSource
from kvplug_shm.queue.reader import ShmReader
from kvplug_shm.queue.ring_buffer import ShmRingBuffer, Sizes
from kvplug_shm.queue.roster import Roster
from kvplug_shm.queue.writer import ShmWriter
from kvplug_shm.ring.ends import WritingEnd

NAME: Final = "shm"


class ShmQueueEndpoint(QueueEndpoint):
    """Readers of the writer's host share its memory; the others are served over the network."""

    def __init__(self, context: QueueContext) -> None:
        super().__init__(context)
        self._options: ShmQueueOptions = context.options if context.options is not None else ShmQueueOptions()

    def create(self, reader_ranks: Sequence[int] | None = None) -> ShmWriter:
        context, options = self.context, self._options
        ranks = self._reader_ranks(reader_ranks)
        sizes = Sizes(
            n_reader=len(ranks),
            max_chunks=context.max_chunks,
            max_chunk_bytes=context.max_chunk_bytes,
            max_message_bytes=max(options.max_message_bytes, context.max_chunk_bytes),
        )
        ring, fd = ShmRingBuffer.create(sizes)
        end = WritingEnd(ring.words, sizes.n_reader, sizes.max_chunks)
        roster = Roster(ring, end, ranks)
        admission = Admission(roster, sizes, fd, context.credentials, context.heartbeat_timeout_s)
        far: Far | None = None
        try:
            handle = QueueHandle(
                transport=NAME,
                reader_ranks=ranks,
                local_reader_ranks=self._local_reader_ranks(ranks),
                data={"domain": describe().domain, "contact": admission.contact},
            )
            return ShmWriter(
                context,
                options,
                handle,
                ring=ring,
                end=end,
                roster=roster,
                admission=admission,
                far=far,
            )
        except BaseException:
            admission.close()
            raise

    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> ShmReader:
        context, options = self.context, self._options
        deadline = Deadline.after(timeout, context.timeout_s)
        handle.check(NAME, rank)
        contact = _contact_in(handle.data)
        connection = dial(contact, context.credentials, PURPOSE, deadline.remaining())
        joined = join(connection, rank, context.heartbeat_timeout_s, deadline)
        source = NearSource(joined, options.spin_us * 1e-6)
        limits = limits_of(joined.ring.sizes.max_message_bytes)
        return ShmReader(context, options, handle, rank, source, limits, source.drop)


def _contact_in(data: Mapping[str, Any]) -> str:
    """Where the writer listens on this host.

    Raises:
        WireError: the handle does not say so.
        TransportError: it is another host, or another network namespace.
    """
    match data:
        case {"domain": str(domain), "contact": str(contact)}:
            if domain == "-" or domain != describe().domain:
                raise TransportError(
                    "the writer of this queue is on another host or in another network namespace, where its"
                    " memory does not reach; leave this rank out of the writer's local_reader_ranks"
                )
            return contact
    raise WireError("this is no handle of a queue 'shm'; pass on what export_handle() gave")
