"""The two ends of a ring: which end may access which places, and when.

Counts are in units: bytes, or messages. An end belongs to one thread at a time; only the methods that evict
the other end (:meth:`WritingEnd.evict`, :meth:`ReadingEnd.evict_writer`) may be called by any thread at any
time.
"""

from __future__ import annotations

import abc
import os
import time

from kvplug.transport import WireError
from kvplug_shm.ring import protocol
from kvplug_shm.ring.protocol import HEAD, OVER, WRITER_ASLEEP, Memory


class RingEnd(abc.ABC):
    """The common part of both ends: waiting for a word of the other one."""

    @abc.abstractmethod
    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        """The word that must change before this end has ``count`` units, and its last seen value."""

    @abc.abstractmethod
    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        """Sleep until that word changes, for ``seconds`` at most. May return without a reason."""

    def spin(self, count: int, seconds: float) -> bool:
        """Spin for ``count`` units for ``seconds``. Returns whether they are there."""
        awaited = self.blocked_on
        if awaited(count) is None:
            return True
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            os.sched_yield()
            if awaited(count) is None:
                return True
        return False


class WritingEnd(RingEnd):
    """The writer's end: writes units from ``sent`` on, as many as there is room for, then publishes them."""

    def __init__(self, memory: Memory, num_readers: int, places: int, *, sent: int = 0) -> None:
        """Raises ValueError for an invalid number of places."""
        self._memory = memory
        self._places = _checked(places)
        self._readers = [(protocol.tail(reader), protocol.evicted(reader)) for reader in range(num_readers)]
        self._sleepers = [protocol.asleep(reader) for reader in range(num_readers)]
        self.sent = sent

    def room(self) -> int:
        """How many units can be written now without overwriting units that a reader has not released.

        Raises WireError if a reader's word is impossible.
        """
        words, places, sent = self._memory.words, self._places, self.sent
        room = places
        for tail, evicted in self._readers:
            seen = words[tail]
            if seen & OVER:
                continue
            left = places - sent + (seen >> 1)
            if left < room or left > places:
                if words[evicted]:
                    continue
                if not 0 <= left <= places:
                    raise WireError(
                        f"a reader says that it has read {seen >> 1} units of {sent}, with {places} places"
                    )
                room = left
        return room

    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        """The word of a reader that must change before ``count`` units fit, as (word, seen)."""
        words, sent, places = self._memory.words, self.sent, self._places
        for tail, evicted in self._readers:
            seen = words[tail]
            if not protocol.has_room(seen, sent, places, count) and not words[evicted]:
                return tail, seen
        return None

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        protocol.park(self._memory, *awaited, WRITER_ASLEEP, seconds)

    def publish(self, count: int = 1) -> None:
        """Publish ``count`` written units to the readers."""
        self.sent += count
        protocol.announce(self._memory, HEAD, self.sent << 1, self._sleepers)

    def end(self) -> None:
        """End: nothing more is published."""
        protocol.announce(self._memory, HEAD, protocol.word_of(self.sent, over=True), self._sleepers)

    def evict(self, reader: int) -> None:
        """Never wait for this reader again. It may be alive: it notices the eviction."""
        words, (tail, evicted) = self._memory.words, self._readers[reader]
        words[evicted] = 1
        protocol.announce(self._memory, tail, words[tail] | OVER, [WRITER_ASLEEP])

    def over(self, reader: int) -> bool:
        """Whether this reader has ended or was evicted."""
        tail, evicted = self._readers[reader]
        return protocol.is_over(self._memory.words[tail]) or bool(self._memory.words[evicted])

    def lag(self, reader: int) -> int:
        """How many published units this reader has not released. For messages only: not validated."""
        return self.sent - protocol.count_in(self._memory.words[protocol.tail(reader)])


class ReadingEnd(RingEnd):
    """A reader's end: reads units from ``read`` on, as many as have arrived, and releases their places."""

    writer_evicted = False
    """Whether this end has marked the writer as ended."""
    _writer_ended = False

    def __init__(self, memory: Memory, reader: int, places: int, *, read: int = 0) -> None:
        """Raises ValueError for an invalid number of places."""
        self._memory = memory
        self._places = _checked(places)
        self._tail = protocol.tail(reader)
        self._asleep = protocol.asleep(reader)
        self._evicted = protocol.evicted(reader)
        self.read = read

    def available(self) -> int:
        """How many units have arrived and are not released: at most as many as there are places.

        Raises WireError if the writer's word says more and it has not evicted this reader.
        """
        seen = self._memory.words[HEAD]
        available = (seen >> 1) - self.read
        if available > self._places:
            if not self.evicted():
                raise WireError(f"the writer says that {available} units came, with {self._places} places")
            return self._places
        return max(available, 0)

    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        """The writer's word, if it must change before ``count`` units can be read, as (word, seen)."""
        seen = self._memory.words[HEAD]
        return None if protocol.has_come(seen, self.read, count) else (HEAD, seen)

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        protocol.park(self._memory, *awaited, self._asleep, seconds)

    def poll(self, count: int, spin_s: float, nap_s: float) -> bool:
        """Whether ``count`` units have arrived, after spinning for ``spin_s`` and one sleep of ``nap_s``
        seconds at most. May return spuriously.
        """
        if self.spin(count, spin_s):
            return True
        awaited = self.blocked_on(count)
        if awaited is not None:
            self.park(awaited, nap_s)
        return self.blocked_on(count) is None

    def evicted(self) -> bool:
        """Whether the writer has evicted this reader: then bytes that were copied before may be of a later
        unit.

        Check it after copying, before using the copy.
        """
        return bool(self._memory.words[self._evicted])

    def release(self, count: int = 1) -> None:
        """Release ``count`` read units to the writer."""
        self.read += count
        protocol.announce(self._memory, self._tail, self.read << 1, [WRITER_ASLEEP])

    def end(self) -> None:
        """End: nothing more is read."""
        protocol.announce(self._memory, self._tail, protocol.word_of(self.read, over=True), [WRITER_ASLEEP])

    def evict_writer(self) -> None:
        """Mark the writer as ended: no more units than the published ones. All readers see the mark."""
        # Read first: if another thread marks the writer meanwhile, it has set `writer_evicted` before.
        ended = protocol.is_over(self._memory.words[HEAD])
        if not self.writer_evicted:
            self._writer_ended = ended
        self.writer_evicted = True
        protocol.announce(self._memory, HEAD, self._memory.words[HEAD] | OVER, [self._asleep])

    def writer_over(self, count: int = 1) -> bool:
        """Whether the next ``count`` units will never arrive: the writer has ended, and fewer are left."""
        over = self.writer_evicted
        seen = self._memory.words[HEAD]
        return (over or protocol.is_over(seen)) and not protocol.has_come(seen, self.read, count)

    @property
    def writer_ended(self) -> bool:
        """Whether the writer has said itself that it ended."""
        return self._writer_ended if self.writer_evicted else protocol.is_over(self._memory.words[HEAD])


def _checked(places: int) -> int:
    if not 0 < places <= protocol.MAX_PLACES:
        raise ValueError(f"a ring has 1 to {protocol.MAX_PLACES} places, not {places}")
    return places
