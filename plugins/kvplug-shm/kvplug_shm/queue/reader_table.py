"""The writer's table of readers: which have attached, how far each has read, and which are gone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

import attrs

from kvplug import ClosedError
from kvplug.transport import MessageQueue
from kvplug_shm.queue.ring_buffer import QueueMessage, ShmRingBuffer
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd

logger = logging.getLogger(__name__)

_HAS_LEFT = "has left"
_NOT_YET = "has not come yet"


@attrs.define(eq=False)
class _RegisteredReader:
    rank: int
    index: int
    process: str = _NOT_YET
    attached: bool = False
    joining: bool = False
    """Admitted, but the join is not complete yet."""
    gone: MessageQueue.ReaderState | None = None
    stand_in: ReadingEnd | None = None
    """The ring's words of a remote reader, which the writer's process moves."""


class ReaderTable:
    """The readers, in the handle's order. From any thread, also when the writer has ended."""

    def __init__(self, ring: ShmRingBuffer, end: WritingEnd, reader_ranks: Sequence[int]) -> None:
        self.reader_ranks = tuple(reader_ranks)
        self._shared: tuple[ShmRingBuffer, WritingEnd] | None = ring, end
        self._end = end
        self._closed = False
        self._lock = threading.RLock()  # a signal handler may end the queue
        self._join_ended = threading.Condition(self._lock)
        self._members = {rank: _RegisteredReader(rank, index) for index, rank in enumerate(self.reader_ranks)}
        self._left = len(self._members)

    @property
    def all_left(self) -> bool:
        """Whether there were readers and all of them are gone."""
        return not self._left and bool(self._members)

    @property
    def all_came(self) -> bool:
        """Whether the ring's descriptor is no longer needed: each reader has joined, or is gone."""
        return all(
            member.gone or (member.attached and not member.joining) for member in self._members.values()
        )

    def index_of(self, rank: int) -> int:
        """The index of that reader in the ring."""
        return self._members[rank].index

    def readers(self) -> tuple[MessageQueue.ReaderState, ...]:
        """All readers, as they are now, or as they were when they left. Raises ClosedError."""
        with self._lock:
            return tuple(map(self._reader, self._members.values()))

    def slowest(self) -> str:
        """Name, for messages, the readers that the writer waits for when there is no room."""
        here = [reader for reader in self.readers() if not reader.gone]
        most = max((reader.lag for reader in here), default=0)
        return listed(reader for reader in here if reader.lag == most)

    def unready(self) -> list[MessageQueue.ReaderState]:
        """The readers that take part and are not ready yet. Raises ClosedError."""
        with self._lock:
            ring, _ = self._memory()
            return [
                self._reader(member)
                for member in self._members.values()
                if not ring.words.load(ring.ready_word(member.index)) and not self._reader(member).gone
            ]

    def close(self) -> None:
        """The writer has ended: no reader can join, and readers that leave are not reported."""
        with self._lock:
            self._closed = True
            self._join_ended.notify_all()

    def drop(self) -> None:
        """After :meth:`close`: release the memory, which this object no longer uses."""
        with self._lock:
            self._shared = None

    # -- joining and leaving -------------------------------------------------------------------------------

    def admit(self, rank: int, process: str) -> str:
        """Admit reader ``rank``. Returns an empty text, or the reason for a refusal.

        :meth:`joined` or :meth:`dismiss` must follow.
        """
        with self._lock:
            member = self._members.get(rank)
            if member is None:
                ranks = ", ".join(map(str, self.reader_ranks[:50])) or "none"
                return f"rank {rank} is not a reader of this queue; its readers are {ranks}"
            if member.gone:
                return (
                    f"reader rank {rank} ({member.process}) is gone from this queue: {member.gone.gone}."
                    " A rank attaches once: make a new queue"
                )
            if member.attached:
                return f"reader rank {rank} has attached to this queue already ({member.process})"
            if self._closed:
                return "the writer of this queue has ended"
            member.attached = member.joining = True
            member.process = process
        return ""

    def wait_join_ended(self, rank: int, timeout: float) -> None:
        """Wait while reader ``rank`` is joining, at most ``timeout`` seconds: an attempt that its reader gave
        up is dismissed a moment later than that reader may try again."""
        with self._lock:
            member = self._members.get(rank)
            if member is not None:
                self._join_ended.wait_for(lambda: self._closed or not member.joining, timeout)

    def joined(self, rank: int) -> None:
        with self._lock:
            self._members[rank].joining = False
            self._join_ended.notify_all()

    def dismiss(self, rank: int) -> None:
        """Reader ``rank`` was admitted but could not attach; it may try again."""
        with self._lock:
            member = self._members[rank]
            member.attached = member.joining = False
            member.process = _NOT_YET
            self._join_ended.notify_all()

    # -- for remote readers, in the writer's process -------------------------------------------------------

    def published(self) -> int:
        """The number of messages so far."""
        return self._end.sent

    def message(self, number: int) -> QueueMessage:
        """A published message that the reader it is for has not released. Raises ClosedError."""
        with self._lock:
            return self._memory()[0].get(number)

    def release(self, rank: int, count: int) -> None:
        """The reader has read ``count`` messages since the first; frees their room for the writer."""
        with self._lock:
            member = self._members[rank]
            if member.gone or self._shared is None:
                return
            ring, end = self._shared
            if member.stand_in is None:
                member.stand_in = ReadingEnd(ring.words, member.index, ring.sizes.max_chunks)
            if member.stand_in.read < count <= end.sent:
                member.stand_in.release(count - member.stand_in.read)

    def set_ready(self, index: int | None) -> None:
        """Reader ``index`` waits until all are ready; ``None``: the writer waits."""
        with self._lock:
            if self._shared is not None:
                ring, _ = self._shared
                ring.words.store(ring.ready_word(index), 1)

    def all_ready(self) -> bool:
        """Whether the writer and all its live readers are ready. Readers on this host report it in shared
        memory, without a call."""
        with self._lock:
            if self._shared is None:
                return False
            ring, _ = self._shared
            writer_is = bool(ring.words.load(ring.ready_word(None)))
        return writer_is and not self.unready()

    # -- the end of a reader -------------------------------------------------------------------------------

    def evict(self, rank: int, reason: str, *, has_left: bool = False) -> None:
        """Evict a reader that is gone. It died for this reason, unless it has left, or has announced that in
        the ring. Later calls are ignored.
        """
        with self._lock:
            member = self._members[rank]
            if member.gone or self._closed or self._shared is None:
                return
            ring, end = self._shared
            has_left = has_left or end.over(member.index)
            gone = member.gone = attrs.evolve(
                self._reader(member), gone=_HAS_LEFT if has_left else reason, died=not has_left
            )
            self._left -= 1
            end.evict(member.index)
            ring.words.wake(ring.ready_word(member.index))
        # Without the lock, so that a signal handler cannot deadlock here.
        logger.log(logging.WARNING if gone.died else logging.DEBUG, "evicted from a queue: %s", gone)

    def _reader(self, member: _RegisteredReader) -> MessageQueue.ReaderState:
        if member.gone is not None:
            return member.gone
        _, end = self._memory()
        over = end.over(member.index)  # it has announced that; its hang-up is not noticed yet
        return MessageQueue.ReaderState(
            rank=member.rank,
            process=member.process,
            lag=max(0, end.lag(member.index)),
            gone=_HAS_LEFT if over else "",
        )

    def _memory(self) -> tuple[ShmRingBuffer, WritingEnd]:
        if self._shared is None:
            raise ClosedError("this end of the queue is closed")
        return self._shared


def listed(readers: Iterable[MessageQueue.ReaderState]) -> str:
    """Readers, for messages."""
    return ", ".join(map(str, readers)) or "no reader"
