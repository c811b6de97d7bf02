"""The two ends of a ring: which end may access which places, and when.

Counts are in units: bytes, or messages. An end belongs to one thread at a time; only the methods that evict
the other end (:meth:`WritingEnd.evict`, :meth:`ReadingEnd.evict_writer`) may be called by any thread at any
time. After the memory was released, every call raises ValueError.
"""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Callable
from typing import Any

from kvplug.net.wire.copying import LOCK_FREE_BYTES, CopyBytes, address_of, copy_bytes
from kvplug.transport import WireError
from kvplug_shm.memory.words import Words
from kvplug_shm.native.library import LONGEST_NS, EndStruct, in_ns, library
from kvplug_shm.ring import protocol
from kvplug_shm.ring.protocol import HEAD, OVER


class RingEnd(abc.ABC):
    """The common part of both ends: waiting for a word of the other one."""

    _poll: Callable[..., int]

    def __init__(self, words: Words, readers: int, places: int, count: int) -> None:
        """Raises ValueError for an invalid number of places."""
        if not 0 < places <= protocol.MAX_PLACES:
            raise ValueError(f"a ring has 1 to {protocol.MAX_PLACES} places, not {places}")
        self._words = words
        self._steps = words.steps
        self._places = places
        self.state = EndStruct(words=words.address, places=places, count=count, readers=readers)
        self.pointer = ctypes.c_void_p(ctypes.addressof(self.state))

    def poll(self, count: int = 1, spin_s: float = 0.0, nap_s: float | None = 0.0) -> bool:
        """Whether there are ``count`` units, after spinning for ``spin_s`` and one sleep of ``nap_s`` seconds
        at most; ``None``: the longest single sleep. True too if the other end's word is impossible.

        It does not sleep if the other end has ended.
        """
        spin_ns, nap_ns = in_ns(spin_s), self._words.nap_ns(nap_s)
        while spin_ns > LONGEST_NS:  # in pieces: between two, signals are handled
            self._words.check()
            if self._poll(self.pointer, count, LONGEST_NS, 0):
                return True
            spin_ns -= LONGEST_NS
        self._words.check()
        return bool(self._poll(self.pointer, count, spin_ns, nap_ns))


class WritingEnd(RingEnd):
    """The writer's end: writes units from ``sent`` on, as many as there is room for, then publishes them."""

    def __init__(self, words: Words, num_readers: int, places: int, *, sent: int = 0) -> None:
        """Raises ValueError for an invalid number of places."""
        super().__init__(words, num_readers, places, sent)
        self.state.window = places
        self._poll = self._steps.poll_room

    @property
    def sent(self) -> int:
        return int(self.state.count)

    def room(self) -> int:
        """How many units can be written now without overwriting units that a reader has not released.

        Raises WireError if a reader's word is impossible.
        """
        self._words.check()
        room = self._steps.room(self.pointer)
        if room < 0:
            raise WireError(
                f"a reader states a count outside of {self.sent - self._places} to {self.sent} units"
            )
        return int(room)

    def blocked_on(self, count: int = 1) -> tuple[int, int] | None:
        """The word of a reader that must change before ``count`` units fit, as (word, seen)."""
        self._words.check()
        seen = ctypes.c_uint64()
        word = self._steps.blocked_on(self.pointer, count, ctypes.byref(seen))
        return None if word < 0 else (word, seen.value)

    def publish(self, count: int = 1) -> None:
        """Publish ``count`` written units to the readers."""
        self._words.check()
        self._steps.publish(self.pointer, count)

    def end(self) -> None:
        """End: nothing more is published."""
        self._words.check()
        self._steps.end_writing(self.pointer)

    def evict(self, reader: int) -> None:
        """Never wait for this reader again. It may be alive: it notices the eviction."""
        self._words.check()
        self._steps.evict(self.pointer, reader)

    def over(self, reader: int) -> bool:
        """Whether this reader has ended or was evicted."""
        load = self._words.load
        return bool(load(protocol.tail(reader)) & OVER or load(protocol.evicted(reader)))

    def lag(self, reader: int) -> int:
        """How many published units this reader has not released. For messages only: not validated."""
        return self.sent - protocol.count_in(self._words.load(protocol.tail(reader)))


class ReadingEnd(RingEnd):
    """A reader's end: reads units from ``read`` on, as many as have arrived, and releases their places."""

    writer_evicted = False
    """Whether this end has marked the writer as ended."""
    _writer_ended = False

    def __init__(self, words: Words, reader: int, places: int, *, read: int = 0) -> None:
        """Raises ValueError for an invalid number of places."""
        super().__init__(words, reader, places, read)
        self._poll = self._steps.poll_units

    @property
    def read(self) -> int:
        return int(self.state.count)

    def available(self) -> int:
        """How many units have arrived and are not released: at most as many as there are places.

        Raises WireError if the writer's word states more and the writer has not evicted this reader.
        """
        self._words.check()
        available = self._steps.available(self.pointer)
        if available < 0:
            raise WireError(f"the writer states more units than the {self._places} places can hold")
        return int(available)

    def evicted(self) -> bool:
        """Whether the writer has evicted this reader: then bytes that were copied before may be of a later
        unit.

        Check it after copying, before using the copy.
        """
        self._words.check()
        return bool(self._steps.evicted(self.pointer))

    def release(self, count: int = 1) -> None:
        """Release ``count`` read units to the writer."""
        self._words.check()
        self._steps.release(self.pointer, count)

    def end(self) -> None:
        """End: nothing more is read."""
        self._words.check()
        self._steps.end_reading(self.pointer)

    def evict_writer(self) -> None:
        """Mark the writer as ended: no more units than the published ones. All readers see the mark."""
        # Read first: if another thread marks the writer meanwhile, it has set `writer_evicted` before.
        ended = protocol.is_over(self._words.load(HEAD))
        if not self.writer_evicted:
            self._writer_ended = ended
        self.writer_evicted = True
        self._steps.evict_writer(self.pointer)

    def writer_over(self, count: int = 1) -> bool:
        """Whether the next ``count`` units will never arrive: the writer has ended, and fewer are left."""
        over = self.writer_evicted
        seen = self._words.load(HEAD)
        return (over or protocol.is_over(seen)) and protocol.count_in(seen) - self.read < count

    @property
    def writer_ended(self) -> bool:
        """Whether the writer itself has announced its end."""
        return self._writer_ended if self.writer_evicted else protocol.is_over(self._words.load(HEAD))


def copy_for_one_of(num_readers: int) -> CopyBytes:
    """How a reader copies a large message out of memory from which others copy it, too."""
    copy_one_of: Any = library().copy_one_of
    copies = num_readers + 1  # the ring has one as well

    def copy(target: memoryview, source: memoryview) -> None:
        if source.nbytes < LOCK_FREE_BYTES or source.nbytes != target.nbytes:
            copy_bytes(target, source)  # raises for the latter
        else:
            copy_one_of(address_of(target), address_of(source), source.nbytes, copies)

    return copy
