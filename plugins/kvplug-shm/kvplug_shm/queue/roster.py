"""Who reads a queue, as its writer knows it: who has come, how far each is, and who takes part no more."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

import attrs

from kvplug import Reader
from kvplug_shm.queue.far import Message
from kvplug_shm.queue.ring_buffer import ShmRingBuffer
from kvplug_shm.ring.ends import ReadingEnd, WritingEnd

logger = logging.getLogger(__name__)

HAS_LEFT = "has left"
_NOT_YET = "has not come yet"


@attrs.define(eq=False)
class _Member:
    rank: int
    index: int
    process: str = _NOT_YET
    attached: bool = False
    gone: Reader | None = None
    stand_in: ReadingEnd | None = None
    """What the far half moves for a reader elsewhere."""


class Roster:
    """The readers, in the handle's order. From any thread.

    The far half gets it as its :class:`~kvplug_shm.queue.far.Feed`.
    """

    def __init__(self, ring: ShmRingBuffer, end: WritingEnd, reader_ranks: Sequence[int]) -> None:
        self.reader_ranks = tuple(reader_ranks)
        self._ring = ring
        self._end = end
        self._lock = threading.Lock()
        self._members = {rank: _Member(rank, index) for index, rank in enumerate(self.reader_ranks)}
        self._left = len(self._members)
        self._closed = False

    @property
    def nobody_left(self) -> bool:
        """There were readers, and all of them are gone."""
        return not self._left and bool(self._members)

    @property
    def all_came(self) -> bool:
        return all(member.attached or member.gone for member in self._members.values())

    def index_of(self, rank: int) -> int:
        """Which of the ring's readers it is."""
        return self._members[rank].index

    def readers(self) -> tuple[Reader, ...]:
        """Everyone, as they are now, or as they were when they went."""
        return tuple(map(self._reader, self._members.values()))

    def slowest(self) -> str:
        """Whom the writer waits for when there is no room, in words."""
        here = [reader for reader in self.readers() if not reader.gone]
        most = max((reader.lag for reader in here), default=0)
        return listed(reader for reader in here if reader.lag == most)

    def unready(self) -> list[Reader]:
        """Who takes part and does not wait to be ready."""
        words = self._ring.words.words
        return [
            reader
            for reader in self.readers()
            if not reader.gone and not words[self._ring.ready_word(self.index_of(reader.rank))]
        ]

    def close(self) -> None:
        """Nobody comes any more, and that somebody goes is nothing to be told."""
        self._closed = True

    # -- what the far half is given, and uses itself -------------------------------------------------

    def admit(self, rank: int, process: str) -> str:
        """Reader ``rank`` takes part. Empty, or a sentence why it does not."""
        with self._lock:
            member = self._members.get(rank)
            if member is None:
                ranks = ", ".join(map(str, self.reader_ranks[:50])) or "none"
                return f"rank {rank} is no reader of this queue; its readers are {ranks}"
            if member.attached:
                return f"reader rank {rank} has attached to this queue already ({member.process})"
            member.attached = True
            member.process = process
        return ""

    def dismiss(self, rank: int) -> None:
        """Reader ``rank``, which was admitted a moment ago, could not attach after all, and may try again."""
        with self._lock:
            member = self._members[rank]
            member.attached = False
            member.process = _NOT_YET

    def published(self) -> int:
        return self._end.sent

    def message(self, number: int) -> Message:
        return self._ring.get(number)

    def release(self, rank: int, count: int) -> None:
        with self._lock:
            member = self._members[rank]
            if member.gone or self._closed:
                return
            if member.stand_in is None:
                member.stand_in = ReadingEnd(self._ring.words, member.index, self._ring.sizes.max_chunks)
            if member.stand_in.read < count <= self._end.sent:
                member.stand_in.release(count - member.stand_in.read)

    def ready(self, rank: int) -> None:
        self.say_ready(self.index_of(rank))

    def say_ready(self, index: int | None) -> None:
        """Reader ``index`` waits until all are ready; ``None``: the writer does."""
        word = self._ring.ready_word(index)
        self._ring.words.words[word] = 1
        self._ring.words.wake(word)

    def all_ready(self) -> bool:
        return bool(self._ring.words.words[self._ring.ready_word(None)]) and not self.unready()

    def evict(self, rank: int, why: str, *, died: bool) -> None:
        with self._lock:
            member = self._members[rank]
            if member.gone or self._closed:
                return
            member.gone = attrs.evolve(self._reader(member), gone=why, died=died)
            self._left -= 1
            self._end.evict(member.index)
        self._ring.words.wake(self._ring.ready_word(member.index))
        logger.log(logging.WARNING if died else logging.DEBUG, "evicted from a queue: %s", member.gone)

    def hung_up(self, rank: int, reason: str) -> None:
        """A reader's connection or process has ended: it left, if it had said so before."""
        left = self._end.over(self.index_of(rank))
        self.evict(rank, HAS_LEFT if left else reason, died=not left)

    def _reader(self, member: _Member) -> Reader:
        if member.gone is not None:
            return member.gone
        over = self._end.over(member.index)  # it has said so; the hang-up is still to be noticed
        return Reader(
            rank=member.rank,
            process=member.process,
            lag=max(0, self._end.lag(member.index)),
            gone=HAS_LEFT if over else "",
        )


def listed(readers: Iterable[Reader]) -> str:
    """Readers, for messages."""
    return ", ".join(map(str, readers)) or "nobody"
