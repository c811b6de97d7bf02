"""The pages of a store: memory and index under one lock, for threads of this process and for its peers."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from kvplug import CapacityError, ResourceExhaustedError
from kvplug.transport import (
    JobEngine,
    JobTask,
    MissReason,
    PageEvent,
    PageFormat,
    PutReason,
    Usage,
    close_after_fork,
)
from kvplug_host.arena.segments import Segments
from kvplug_host.arena.slots import Slot, SlotTable
from kvplug_host.jobs.put import Put
from kvplug_host.pages.index import Entry, Holder, Index
from kvplug_host.pages.slot_buffers import SlotBuffers
from kvplug_host.pages.subscribers import Subscribers

_log = logging.getLogger(__name__)

_WARN_EVERY_S: Final = 60.0


class Pages:
    """Thread-safe. Listeners of events are called without the lock."""

    def __init__(self, num_segments: int, segment_bytes: int, jobs: JobEngine) -> None:
        """
        Args:
            jobs: has the puts, and calls at the deadlines of declared pages.

        Raises:
            CapacityError: there are not enough addresses for the memory.
        """
        self.segments = Segments(num_segments, segment_bytes)
        self.jobs = jobs
        self._slots = SlotTable(num_segments, segment_bytes, self.segments.grow)
        self.index = Index(self._slots, self.segments.clear_generation, time.monotonic)
        self.lock = threading.RLock()
        """For all of this."""
        self.is_closed = False
        self._subscribers = Subscribers()
        self._abandoned: deque[list[Slot | None]] = deque()
        self._expiry: JobEngine.Alarm | None = None
        self._said_no_memory = False
        self._num_unread = 0
        """Evicted pages that waited for a reader, as far as the log has them."""
        self._may_warn_at = 0.0
        close_after_fork(self)

    @contextlib.contextmanager
    def changing(self) -> Iterator[Index]:
        """The index, with the lock; then the listeners get the events."""
        try:
            with self.lock:
                self._reclaim()
                try:
                    yield self.index
                finally:
                    self._subscribers.queue(self.index.take_events())
        finally:
            self._subscribers.hand_out()

    def _reclaim(self) -> None:
        """With the lock: the slots of memory that was dropped are free."""
        while self._abandoned:
            for slot in self._abandoned.popleft():
                if slot is not None:
                    self._slots.free(slot)

    def usage(self) -> Usage:
        """Pages, and what they take of the budget."""
        with self.lock:
            self._reclaim()
            return self.index.usage()

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        """A snapshot, then every event. Returns what ends it."""
        with self.changing() as index:
            self._subscribers.queue(index.take_events())  # they come before the snapshot
            return self._subscribers.add(listener, index.snapshot())

    # -- reading -------------------------------------------------------------------------------

    def pin(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """The pages, whose slots are not used again until :meth:`unpin`."""
        with self.lock:
            entries = [self.index.pages.get(key) for key in keys]
            for entry in entries:
                if entry is not None:
                    self.index.pin(entry)
            return entries

    def unpin(self, entries: Sequence[Entry | None], reader: Holder, *, were_used: bool = True) -> None:
        """The pages are not read any more by that end. ``were_used``: it has got them, and uses them."""
        with self.lock:
            there = [entry for entry in entries if entry is not None]
            for entry in there:
                self.index.unpin(entry)
            if were_used:
                self.index.read([entry.key for entry in there if not entry.is_gone], reader)

    def discard(self, entry: Entry | None, reason: MissReason) -> None:
        """A page was found to be wrong: it makes room for a right one."""
        if entry is None:
            return
        _log.warning("a page in the store is wrong (%s), and is removed", reason)
        with self.changing() as index:
            index.remove_entry(entry, PageEvent.Removal.CORRUPT)

    # -- writing -------------------------------------------------------------------------------

    def reserve(
        self, put: Put, sizes: Mapping[int, int], most_bytes: float = math.inf
    ) -> tuple[dict[int, Slot], list[tuple[int, PutReason | None]]]:
        """Slots for pages of a put, by number, given the bytes of each with its header; and the results of
        those that need none. Pages that would exceed ``most_bytes`` together have no room.

        Raises:
            JobTask.OverError: the put has ended.
        """
        pages, memory = put.pages, put.pages.memory
        slots: dict[int, Slot] = {}
        results: list[tuple[int, PutReason | None]] = []
        with self.changing() as index:
            if put.is_over or self.is_closed:
                raise JobTask.OverError
            held = []
            for at, nbytes in sizes.items():
                key = pages.keys[at]
                if put.is_forgotten(key):
                    results.append((at, PutReason.CANCELLED))
                elif key in index.pages:
                    held.append(key)
                    results.append((at, None))
                elif nbytes > most_bytes:
                    results.append((at, PutReason.NO_ROOM))
                else:
                    own = memory.take(at, nbytes) if isinstance(memory, SlotBuffers) else None
                    found = own or self._new_slot(index, nbytes)
                    if isinstance(found, PutReason):
                        results.append((at, found))
                    else:
                        slots[at] = found
                        most_bytes -= nbytes
            index.use(held)
        return slots, results

    def _new_slot(self, index: Index, nbytes: int) -> Slot | PutReason:
        try:
            slot = index.reserve(nbytes)
            self._warn_of_unread(index)
            return slot
        except (CapacityError, ResourceExhaustedError) as e:
            if not self._said_no_memory:
                _log.warning("the store keeps less than its budget: %s", e)
                self._said_no_memory = True
            return PutReason.NO_ROOM

    def _warn_of_unread(self, index: Index) -> None:
        num, now = index.num_unread - self._num_unread, time.monotonic()
        if not num or now < self._may_warn_at:
            return
        self._num_unread, self._may_warn_at = index.num_unread, now + _WARN_EVERY_S
        _log.warning(
            "%d pages were evicted that another engine was to load: more pages wait for it than the %d MiB of"
            " the store hold; raise options.host.size",
            num,
            index.slots.budget_bytes >> 20,
        )

    def give_back(self, slots: Iterable[Slot]) -> None:
        """Slots are free that hold no page."""
        with self.lock:
            for slot in slots:
                self._slots.free(slot)

    def publish(
        self,
        put: Put,
        slots: Mapping[int, Slot],
        header_bytes: Mapping[int, int],
        results: Iterable[tuple[int, PutReason | None]],
    ) -> None:
        """The pages are in their slots, whole, and their headers behind them: they are held from now on.

        ``results``: of other pages of the put, which are noted with them.
        """
        pages, noted, stored = put.pages, [*results], []
        with self.changing() as index:
            for at, slot in slots.items():
                key = pages.keys[at]
                if put.is_forgotten(key) or self.is_closed:
                    self._slots.free(slot)
                    noted.append((at, PutReason.CANCELLED))
                    continue
                generation = self.segments.next_generation()
                entry = index.publish(
                    key,
                    pages.series.id,
                    slot,
                    payload_bytes=pages.series.format.nbytes,
                    header_bytes=header_bytes[at],
                    generation=generation,
                )
                if entry is not None:
                    self.segments.set_generation(slot.word, generation)
                    stored.append(key)
                noted.append((at, None))
            index.tell_stored(pages.series.id, stored)
            put.note_all(noted)

    def settled(self, put: Put) -> None:
        """Nothing of a put is copied any more: slots of its memory that it did not need are free."""
        with self.lock:
            memory = put.pages.memory
            if isinstance(memory, SlotBuffers):
                self.give_back(memory.take_all())
            self.index.refresh(put.pages.keys)

    def allocate(self, form: PageFormat, count: int, header_bytes: int) -> SlotBuffers | None:
        """Slots for pages that the caller fills; ``None``: there is no room."""
        slots: list[Slot] = []
        with self.changing() as index:
            while len(slots) < count:
                found = self._new_slot(index, form.nbytes + header_bytes)
                if isinstance(found, PutReason):
                    self.give_back(slots)
                    return None
                slots.append(found)
        return SlotBuffers(form, self.segments.view, slots, self._abandoned.append)

    # -- what is expected, and what goes -------------------------------------------------------

    def declare(self, holder: Holder, series: bytes, keys: Sequence[bytes], for_s: float | None) -> None:
        """An end is going to put these pages within ``for_s`` seconds."""
        with self.changing() as index:
            index.declare(series, keys, holder, for_s)
        self._expire()

    def _expire(self) -> None:
        """End declared pages whose time is over, and have this called again when the next one's is."""
        with self.changing() as index:
            if self.is_closed:
                return
            again = index.expire()
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                self._expiry = None if again is None else self.jobs.at(again, self._expire)
            except RuntimeError as e:  # a lookup knows the time without it
                _log.warning("the store needs another thread: %s", e)

    def remove(self, keys: Sequence[bytes] | None) -> None:
        """Forget pages, also those that are declared or being put; ``None``: all."""
        with self.changing() as index:
            for task in self.jobs.tasks():
                if isinstance(task, Put):
                    task.forget(keys)
            if keys is None:
                index.clear()
            else:
                index.remove(keys)

    def forget_holders(self, holders: Iterable[Holder]) -> None:
        """Ends are gone: what they leased and declared ends."""
        with self.changing() as index:
            for holder in holders:
                index.forget_holder(holder)

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """No page is held any more. The memory lives on with the last copy out of it."""
        with self.lock:
            self.is_closed = True
        self._subscribers.end()
        self.segments.close()

    def _after_fork_in_child(self) -> None:
        self.is_closed = True
