"""The pages of a store: memory and index under one lock, for threads of this process and for its peers.

The lock is held for a moment at a time, however many pages the store holds and a call names: work for many
pages is done in slices. In between, other threads see the store with a part of it done. That is right, since
calls for several pages promise something for each page, and nothing for all at once; what must be true of all
pages at one moment (a snapshot, or that no page is held after ``remove(None)``) is made so by other means."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from kvplug import CapacityError, ResourceExhaustedError
from kvplug.transport import (
    JobEngine,
    JobTask,
    MissReason,
    PageEvent,
    PageFormat,
    PageMemory,
    Presence,
    PutReason,
    Usage,
    close_after_fork,
)
from kvplug_host.arena.pinned import PinnedSegments
from kvplug_host.arena.segments import Segments
from kvplug_host.arena.slots import Slot, SlotTable
from kvplug_host.jobs import Put
from kvplug_host.key_table import KeyTable
from kvplug_host.pages.index import Entry, Holder, Index
from kvplug_host.pages.slot_buffers import SlotBuffers
from kvplug_host.pages.snapshot import Snapshot
from kvplug_host.pages.subscribers import Subscribers, Subscription
from kvplug_host.pages.yielding_lock import YieldingLock

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WARN_EVERY_S: Final = 60.0
SLICE: Final = 16
"""Pages for which the lock is held at a time. A page takes between one and six microseconds."""
PUT_SLICE: Final = 32
"""The same for the steps of puts: more, so that two steps at once seldom wait for each other."""
LOOKUP_SLICE: Final = 512
"""The same for lookups and copies of the index, which take less than a tenth of a microsecond."""


class Pages:
    """Memory and index. Thread-safe. Listeners of events are called without the lock."""

    def __init__(self, num_segments: int, segment_bytes: int, jobs: JobEngine) -> None:
        """
        Args:
            jobs: has the puts, and calls at the deadlines of declared pages.

        Raises:
            CapacityError: there are not enough addresses for the memory.
        """
        self.segments = Segments(num_segments, segment_bytes)
        self.jobs = jobs
        self._slots = SlotTable(num_segments, segment_bytes, self.segments.allocate)
        self.index = Index(self._slots, self.segments.clear_generation, time.monotonic)
        self.lock = YieldingLock()
        """Protects the index and the slots."""
        self.is_closed = False
        self._pinned = PinnedSegments(self.segments, jobs)
        self._subscribers = Subscribers()
        self._abandoned: deque[list[Slot | None]] = deque()
        self._expiry: JobEngine.Alarm | None = None
        self._has_warned_of_memory = False
        self._num_unread = 0
        """Number of evicted pages that waited for a reader and that a warning has reported."""
        self._may_warn_at = 0.0
        close_after_fork(self)

    @contextlib.contextmanager
    def changing(self) -> Iterator[Index]:
        """Return the index, with the lock. Afterwards call the listeners with the events."""
        self._reclaim()
        try:
            with self.lock:
                try:
                    yield self.index
                finally:
                    self._subscribers.queue(self.index.take_events())
        finally:
            self._subscribers.hand_out()

    def _slices(self, items: Sequence[T], most: int | None = None) -> Iterator[tuple[Index, Sequence[T]]]:
        """Yield the index and a part of the items, with the lock. Gives the lock to other threads in
        between."""
        most = most or SLICE
        for begin in range(0, len(items), most):
            if begin:
                self.lock.give_way()
            if self._abandoned:
                self._reclaim()
            with self.lock:
                yield self.index, items[begin : begin + most]
                if events := self.index.take_events():
                    self._subscribers.queue(events)
            if events:
                self._subscribers.hand_out()

    def _reclaim(self) -> None:
        """Free the slots of memory that its user dropped."""
        while self._abandoned:
            with contextlib.suppress(IndexError):  # another thread does it
                self.give_back([slot for slot in self._abandoned.popleft() if slot is not None])

    def usage(self) -> Usage:
        """Return the number of pages, and the bytes that they take."""
        self._reclaim()
        with self.lock:
            return self.index.usage()

    def subscribe(self, listener: Callable[[PageEvent], None]) -> Callable[[], None]:
        """Call the listener with a snapshot, then with every event. Returns a function that ends this."""
        snapshot, subscription = Snapshot(time.monotonic), Subscription(listener)

        def end() -> None:
            with self.lock:
                self._subscribers.end_one(subscription)

        try:
            with self.changing() as index:
                self._subscribers.queue(index.take_events())  # they come before the snapshot
                self._subscribers.add(subscription)
            for held in self._copies(lambda index: index.pages):
                snapshot.add_held((key, entry.series) for key, entry in held.items())
            for declared in self._copies(lambda index: index.declared):
                snapshot.add_declared((key, each.series, each.latest) for key, each in declared.items())
            with self.changing() as index:
                self._subscribers.queue(index.take_events())
                snapshot.end(index.log_now())
                self._subscribers.begin(subscription, snapshot)
        except BaseException:
            end()
            raise
        return end

    def _copies(self, table_of: Callable[[Index], KeyTable[T]]) -> Iterator[dict[bytes, T]]:
        """Yield copies of the parts of a table. They are copied at different moments."""
        number = 0
        while KeyTable.has_more(number):
            with self.lock:
                found, number = table_of(self.index).copy_from(number, LOOKUP_SLICE)
            yield found
            self.lock.give_way()

    def keys(self, series: bytes) -> list[bytes]:
        """Return the held keys of a series."""
        return [
            key
            for held in self._copies(lambda index: index.pages)
            for key, entry in held.items()
            if entry.series == series
        ]

    # -- reading -------------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], holder: Holder, lease_s: float = 0.0) -> list[Presence]:
        """Return the presence of each key, and lease the held pages to the holder for ``lease_s`` seconds."""
        found: list[Presence] = []
        for index, part in self._slices(keys, None if lease_s > 0 else LOOKUP_SLICE):
            found += index.lookup(part, holder, lease_s)
        return found

    def lease(self, keys: Sequence[bytes], holder: Holder, lease_s: float) -> list[Entry | None]:
        """Return the held pages, leased to the holder for ``lease_s`` seconds; 0: not leased."""
        found: list[Entry | None] = []
        for index, part in self._slices(keys):
            entries = [index.pages.get(key) for key in part]
            if lease_s > 0:
                index.lease(filter(None, entries), holder, lease_s)
            found += entries
        return found

    def release(self, keys: Sequence[bytes], holder: Holder) -> None:
        """End the holder's leases on the pages."""
        for index, part in self._slices(keys):
            index.release(part, holder)

    def pin(self, keys: Sequence[bytes]) -> list[Entry | None]:
        """Return the held pages. Their slots are not used again until :meth:`unpin`."""
        found: list[Entry | None] = []
        for index, part in self._slices(keys):
            entries = [index.pages.get(key) for key in part]
            for entry in filter(None, entries):
                index.pin(entry)
            found += entries
        return found

    def unpin(self, entries: Sequence[Entry | None], reader: Holder, *, were_used: bool = True) -> None:
        """End the reading of pages, which are in the order of a prompt. ``were_used``: the reader has got
        them and uses them; the last one is evicted first."""
        for index, part in self._slices(entries[::-1]):
            there = [entry for entry in part if entry is not None]
            for entry in there:
                index.unpin(entry)
            if were_used:
                index.read([entry.key for entry in there if not entry.is_gone], reader)

    def use(self, keys: Sequence[bytes]) -> None:
        """Note that pages were used, in the order of a prompt: the last one is evicted first."""
        for index, part in self._slices(keys[::-1]):
            index.use(part)

    def read(self, keys: Sequence[bytes], reader: Holder) -> None:
        """Note that an end has read pages, in the order of a prompt: the last one is evicted first."""
        for index, part in self._slices(keys[::-1]):
            index.read(part, reader)

    def expect_reader(self, keys: Sequence[bytes], holder: Holder) -> None:
        """Note that an end other than the holder is going to read these pages, also those that are not held
        yet. They are in the order of a prompt: the last one is evicted first."""
        for index, part in self._slices(keys[::-1]):
            index.expect_reader(part, holder)

    def discard(self, entry: Entry | None, reason: MissReason) -> None:
        """Remove a page whose bytes are wrong, so that a right one can be put."""
        if entry is None:
            return
        _log.warning("a page in the store is wrong (%s), and is removed", reason)
        with self.changing() as index:
            index.remove_entry(entry, PageEvent.Removal.CORRUPT)

    # -- writing -------------------------------------------------------------------------------

    def known_results(self, put: Put, sizes: Sequence[int]) -> list[tuple[int, PutReason | None]]:
        """The results of the pages of a put, by number, whose bytes are not needed, given the bytes of each
        with its header: the store has the page, or it is too large."""
        results: list[tuple[int, PutReason | None]] = []
        for index, part in self._slices([*enumerate(put.pages.keys)], PUT_SLICE):
            held = []
            for at, key in part:
                if key in index.pages:
                    held.append(key)
                    results.append((at, None))
                elif self._slots.size_for(sizes[at]) is None:
                    results.append((at, PutReason.TOO_LARGE))
            index.use(held[::-1])
        return results

    def reserve(
        self, put: Put, sizes: Mapping[int, int]
    ) -> tuple[dict[int, Slot], list[tuple[int, PutReason | None]]]:
        """Slots for pages of a put, by number, given the bytes of each with its header; and the results of
        those that need none.

        Raises:
            JobTask.OverError: the put has ended.
        """
        pages, memory = put.pages, put.pages.memory
        slots: dict[int, Slot] = {}
        results: list[tuple[int, PutReason | None]] = []
        left, is_over = deque(sizes.items()), False
        while left:
            with self.changing() as index:
                if is_over := put.is_over or self.is_closed:
                    break
                held, refused = [], math.inf
                for at, nbytes in [*itertools.islice(left, PUT_SLICE)]:
                    key, result = pages.keys[at], None
                    if put.is_forgotten(key):
                        result = PutReason.CANCELLED
                    elif key in index.pages:
                        held.append(key)
                    else:
                        own = memory.take(at, nbytes) if isinstance(memory, SlotBuffers) else None
                        found = own or (
                            PutReason.NO_ROOM if nbytes >= refused else self._new_slot(index, nbytes)
                        )
                        if found is None:
                            break
                        if found is PutReason.NO_ROOM:  # it may have looked at all pages of other sizes
                            refused = nbytes
                        if isinstance(found, Slot):
                            slots[at] = found
                        else:
                            result = found
                    if at not in slots:
                        results.append((at, result))
                    left.popleft()
                index.use(held[::-1])
            if left:
                self.lock.give_way()
        if is_over:
            self.give_back(slots.values())
            raise JobTask.OverError
        return slots, results

    def _new_slot(self, index: Index, nbytes: int) -> Slot | PutReason | None:
        """Call :meth:`Index.reserve`. After ``None`` the caller gives way and calls again."""
        try:
            slot = index.reserve(nbytes)
            self._warn_of_unread(index)
            return slot
        except (CapacityError, ResourceExhaustedError) as e:
            if not self._has_warned_of_memory:
                _log.warning("the store keeps less than its budget: %s", e)
                self._has_warned_of_memory = True
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
        """Free slots that hold no page."""
        left = [*slots]
        while left:
            with self.lock:
                for slot in left[:SLICE]:
                    self._slots.free(slot)
            del left[:SLICE]
            if left:
                self.lock.give_way()

    def publish(
        self,
        put: Put,
        slots: Mapping[int, Slot],
        header_bytes: Mapping[int, int],
        results: Iterable[tuple[int, PutReason | None]],
    ) -> None:
        """Hold pages that are complete in their slots, with their headers behind them.

        ``results``: those of other pages of the put, which are noted, too.
        """
        pages = put.pages
        put.note_all([*results])
        for index, part in self._slices([*slots.items()], PUT_SLICE):
            noted: list[tuple[int, PutReason | None]] = []
            stored = []
            for at, slot in part:
                key = pages.keys[at]
                if put.is_over or put.is_forgotten(key) or self.is_closed:  # no removal reaches it any more
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
            index.log_stored(pages.series.id, stored)
            put.note_all(noted)

    def settled(self, put: Put) -> None:
        """End a put whose last copy has ended: free the slots of its memory that it did not need."""
        self.free(put.pages.memory)
        for index, part in self._slices(put.pages.keys[::-1]):
            index.refresh(part)

    def allocate(self, form: PageFormat, count: int, header_bytes: int) -> SlotBuffers | None:
        """Return slots for pages that the caller fills, or ``None`` if there is no room."""
        slots = self._take(form.nbytes + header_bytes, count)
        if len(slots) < count:
            self.give_back(slots)
            return None
        return self._buffers(form, self.segments.view, slots)

    def reserve_pinned(
        self, form: PageFormat, keys: Sequence[bytes], header_bytes: int, device: torch.device
    ) -> SlotBuffers | None:
        """Return slots in pinned memory for the first of these pages, or ``None`` if there are none. Also if
        the store has one of the pages: it needs no copy."""
        view, nbytes = self.segments.view, self.segments.nbytes
        num_held = 0
        for index, part in self._slices(keys, LOOKUP_SLICE):
            num_held += sum(key in index.pages for key in part)
        if num_held or self.is_closed:
            return None
        slots = self._take(form.nbytes + header_bytes, len(keys))
        found = self._buffers(form, view, slots)  # which frees them after an interrupt, too
        pinned = [at for at, slot in enumerate(slots) if self._pinned.has(slot.offset // nbytes, device)]
        if 0 < len(pinned) < len(slots):
            return self._buffers(form, view, [slot for at in pinned if (slot := found.take(at, 0))])
        return found if pinned else None

    def _take(self, nbytes: int, count: int) -> list[Slot]:
        """Return at most ``count`` slots of ``nbytes`` bytes, in the order of their places; fewer if there is
        no room."""
        slots: list[Slot] = []
        has_room = True
        try:
            while has_room and len(slots) < count:
                with self.changing() as index:
                    for _ in range(min(SLICE, count - len(slots))):
                        found = self._new_slot(index, nbytes)
                        if not isinstance(found, Slot):
                            has_room = found is None
                            break
                        slots.append(found)
                self.lock.give_way()
            slots.sort(key=lambda slot: slot.offset)
        except BaseException:
            self.give_back(slots)
            raise
        return slots

    def _buffers(self, form: PageFormat, view: memoryview, slots: Sequence[Slot]) -> SlotBuffers:
        return SlotBuffers(form, view, slots, self.segments.nbytes, self._abandoned.append)

    def free(self, memory: PageMemory) -> None:
        """Free the slots of memory of :meth:`allocate` that hold no page."""
        if isinstance(memory, SlotBuffers):
            with self.lock:
                slots = memory.take_all()
            self.give_back(slots)

    # -- what is expected, and what goes -------------------------------------------------------

    def declare(self, holder: Holder, series: bytes, keys: Sequence[bytes], for_s: float | None) -> None:
        """Note that the holder is going to put these pages within ``for_s`` seconds."""
        until = math.inf if for_s is None else time.monotonic() + for_s
        for index, part in self._slices(keys):
            index.declare(series, part, holder, until)
        self._expire()

    def withdraw(self, keys: Sequence[bytes], holder: Holder) -> None:
        """End the holder's declarations of these pages."""
        for index, part in self._slices(keys):
            index.withdraw(part, holder)

    def _expire(self) -> None:
        """End declarations whose time is over, and schedule the next call."""
        with self.changing() as index:
            if self.is_closed:
                return
            again = index.expire()
            if self._expiry is not None:
                self._expiry.cancel()
            try:
                self._expiry = None if again is None else self.jobs.at(again, self._expire)
            except RuntimeError as e:  # lookups compare the time themselves
                _log.warning("the store needs another thread: %s", e)

    def remove(self, keys: Sequence[bytes] | None) -> None:
        """Remove pages, also those that are declared or being put; ``None``: all that there are now."""
        for task in self.jobs.tasks():  # before the slices: they publish none of these pages any more
            if isinstance(task, Put):
                task.forget(keys)
        if keys is None:
            with self.changing() as index:
                known = index.clear()
            del known  # without the lock
            left = True
            while left:
                with self.lock:
                    left = self.index.free_cleared(SLICE)
                self.lock.give_way()
            return
        for index, part in self._slices(keys):
            index.remove(part)

    def forget_holders(self, holders: Iterable[Holder]) -> None:
        """End the leases and declarations of ends that are gone."""
        for holder in holders:
            left = True
            while left:
                with self.changing() as index:
                    left = index.forget_holder(holder, SLICE)
                if left:
                    self.lock.give_way()

    # -- the end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the memory, which exists until the last copy out of it has ended."""
        with self.lock:
            self.is_closed = True
        self._subscribers.end()
        self.segments.close()

    def _after_fork_in_child(self) -> None:
        self.is_closed = True
