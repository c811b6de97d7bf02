"""The two ends of a ring: who may touch which places, and when.

Counts are in units: bytes, or messages. An end belongs to one thread at a time; only what gives up the other
end (:meth:`WritingEnd.evict`, :meth:`ReadingEnd.evict_writer`) may be called by any other at any time.
"""

from __future__ import annotations

import abc
import os
import time

from kvplug.transport import WireError
from kvplug_shm.ring import protocol
from kvplug_shm.ring.protocol import HEAD, OVER, WRITER_ASLEEP, Memory


class RingEnd(abc.ABC):
    """What both ends have: a word of the other one that they wait for."""

    @abc.abstractmethod
    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        """The word that has to change before this end has ``count`` units, and what was seen there."""

    @abc.abstractmethod
    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        """Sleep until that word changes, for ``seconds`` at most. May return without a reason."""

    def spin(self, count: int, seconds: float) -> bool:
        """Whether ``count`` units need not be waited for, after looking again and again for ``seconds``."""
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
    """Writes units from ``sent`` on, as many as there is room for, then publishes them."""

    def __init__(self, memory: Memory, num_readers: int, places: int, *, sent: int = 0) -> None:
        """Raises ValueError for a number of places that no ring has."""
        self._memory = memory
        self._places = _checked(places)
        self._readers = [(protocol.tail(reader), protocol.evicted(reader)) for reader in range(num_readers)]
        self._sleepers = [protocol.asleep(reader) for reader in range(num_readers)]
        self.sent = sent

    def room(self) -> int:
        """How many units can be written now: no reader that takes part has its places overwritten.

        Raises WireError if a reader's word says what no reader can have done.
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
        """A reader whose word has to change before ``count`` units fit, as (word, seen)."""
        words, sent, places = self._memory.words, self.sent, self._places
        for tail, evicted in self._readers:
            seen = words[tail]
            if not protocol.has_room(seen, sent, places, count) and not words[evicted]:
                return tail, seen
        return None

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        protocol.park(self._memory, *awaited, WRITER_ASLEEP, seconds)

    def publish(self, count: int = 1) -> None:
        """What was written, ``count`` units of it, is the readers' from here on."""
        self.sent += count
        protocol.announce(self._memory, HEAD, self.sent << 1, self._sleepers)

    def end(self) -> None:
        """Nothing more is published."""
        protocol.announce(self._memory, HEAD, protocol.word_of(self.sent, over=True), self._sleepers)

    def evict(self, reader: int) -> None:
        """Wait for this reader no more, now or ever. It need not be dead: it finds out."""
        words, (tail, evicted) = self._memory.words, self._readers[reader]
        words[evicted] = 1
        protocol.announce(self._memory, tail, words[tail] | OVER, [WRITER_ASLEEP])

    def over(self, reader: int) -> bool:
        """Whether this reader has ended or was evicted."""
        tail, evicted = self._readers[reader]
        return protocol.is_over(self._memory.words[tail]) or bool(self._memory.words[evicted])

    def lag(self, reader: int) -> int:
        """How many published units this reader has not released. Only to be told: it is not checked."""
        return self.sent - protocol.count_in(self._memory.words[protocol.tail(reader)])


class ReadingEnd(RingEnd):
    """Reads units from ``read`` on, as many as have come, and gives their places back."""

    _writer_evicted = False

    def __init__(self, memory: Memory, reader: int, places: int, *, read: int = 0) -> None:
        """Raises ValueError for a number of places that no ring has."""
        self._memory = memory
        self._places = _checked(places)
        self._tail = protocol.tail(reader)
        self._asleep = protocol.asleep(reader)
        self._evicted = protocol.evicted(reader)
        self.read = read

    def available(self) -> int:
        """How many units have come and were not released: at most as many as there are places.

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
        """The writer's word, if it has to change before ``count`` units can be read, as (word, seen)."""
        seen = self._memory.words[HEAD]
        return None if protocol.has_come(seen, self.read, count) else (HEAD, seen)

    def park(self, awaited: tuple[int, int], seconds: float | None = None) -> None:
        protocol.park(self._memory, *awaited, self._asleep, seconds)

    def poll(self, count: int, spin_s: float, nap_s: float) -> bool:
        """Whether ``count`` units have come, after looking for ``spin_s`` seconds and one sleep of ``nap_s``
        at most. May return without a reason.
        """
        if self.spin(count, spin_s):
            return True
        awaited = self.blocked_on(count)
        if awaited is not None:
            self.park(awaited, nap_s)
        return self.blocked_on(count) is None

    def evicted(self) -> bool:
        """Whether the writer has evicted this reader: if so, what was copied before may be of a later unit.

        To be asked after copying, before what was copied is believed.
        """
        return bool(self._memory.words[self._evicted])

    def release(self, count: int = 1) -> None:
        """What was read, ``count`` units of it, is the writer's from here on."""
        self.read += count
        protocol.announce(self._memory, self._tail, self.read << 1, [WRITER_ASLEEP])

    def end(self) -> None:
        """Nothing more is read."""
        protocol.announce(self._memory, self._tail, protocol.word_of(self.read, over=True), [WRITER_ASLEEP])

    def evict_writer(self) -> None:
        """Expect nothing more of the writer than what it has published. Other readers see the same."""
        self._writer_evicted = True
        protocol.announce(self._memory, HEAD, self._memory.words[HEAD] | OVER, [self._asleep])

    def writer_over(self, count: int = 1) -> bool:
        """Whether the next ``count`` units will never come: the writer is over, and fewer are left."""
        over = self._writer_evicted
        seen = self._memory.words[HEAD]
        return (over or protocol.is_over(seen)) and not protocol.has_come(seen, self.read, count)


def _checked(places: int) -> int:
    if not 0 < places <= protocol.MAX_PLACES:
        raise ValueError(f"a ring has 1 to {protocol.MAX_PLACES} places, not {places}")
    return places
