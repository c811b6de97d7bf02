"""What the store holds and expects: pages by key, their leases, readers and eviction, declared pages, events.

Pure: no memory, no lock, no thread; the clock is passed in. The store calls it under its lock, and hands
:attr:`Index.events` to the listeners, in their order."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from kvplug.transport import PageEvent, Presence, PutReason, Usage
from kvplug_host.arena.slots import Chunk, SizeClass, Slot, SlotTable

REBALANCE_AFTER: Final = 64
"""Evictions of one size, after which it is looked whether pages of other sizes are used less."""
FOR_EVER_S: Final = 1e8
"""What a listener is told of a page that is declared without an end."""

MAX_EXPECTED: Final = 1 << 16
"""Pages that are not here yet and for which readers are remembered; more forget the oldest."""

Holder = Hashable
"""An end of the store: it has leases, has declared pages, and expects readers of others."""


class Entry(Slot):
    """A slot that holds a page."""

    __slots__ = (
        "expected_by",
        "generation",
        "header_bytes",
        "is_gone",
        "key",
        "leases",
        "payload_bytes",
        "readers",
        "series",
    )

    def __init__(
        self, key: bytes, series: bytes, slot: Slot, payload_bytes: int, header_bytes: int, generation: int
    ) -> None:
        super().__init__(slot.chunk, slot.offset)
        self.key = key
        self.series = series
        self.payload_bytes = payload_bytes
        """They begin where the slot begins; the header follows them."""
        self.header_bytes = header_bytes
        self.generation = generation
        self.readers = 0
        """Copies of this process under way: the slot is not used again before they have ended."""
        self.leases: dict[Holder, float] | None = None
        self.is_gone = False
        """It was removed, and its slot is still being read."""
        self.expected_by: Holder = None
        """The end that was the last to expect that another one reads it."""

    def is_leased(self, now: float) -> bool:
        """Whether a lease has not expired."""
        return self.leases is not None and any(until > now for until in self.leases.values())


class _Declared:
    __slots__ = ("series", "until")

    def __init__(self, series: bytes) -> None:
        self.series = series
        self.until: dict[Holder, float] = {}


class Index:
    """Pages in the slots of a table.

    ``clear_generation`` is called with the place of a slot's word whenever the slot's page is gone."""

    def __init__(
        self,
        slots: SlotTable,
        clear_generation: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self.slots = slots
        self._clear_generation = clear_generation
        self._clock = clock
        self.pages: dict[bytes, Entry] = {}
        self.events: list[PageEvent] = []
        """What has happened and was not told yet."""
        self.num_evicted = 0
        """Since the store was opened."""
        self.num_unread = 0
        """How many of these waited for a reader."""
        self._expected: OrderedDict[bytes, tuple[Holder, int]] = OrderedDict()
        """Pages that are not here yet: who expects that others read them, and how many."""
        self._log = PageEvent.Log()
        self._uses = itertools.count(1)
        self._evicted: dict[bytes, list[bytes]] = defaultdict(list)
        """By series, of the operation under way."""
        self._leased: dict[Holder, dict[Entry, None]] = defaultdict(dict)
        self._aside: list[tuple[float, int, Entry]] = []
        """Pages that could not be evicted since they were leased: until when."""
        self._numbers = itertools.count()
        self._declared: dict[bytes, _Declared] = {}
        self._due: list[tuple[float, int, bytes, Holder]] = []
        """Declared pages: until when."""

    @property
    def epoch(self) -> str:
        """Of this life of the store."""
        return self._log.position[0]

    # -- questions -----------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], holder: Holder = None, lease_s: float = 0.0) -> list[Presence]:
        """What there is of each key. Held pages are leased to the holder for that long."""
        pages = self.pages
        if lease_s > 0:
            self.lease(filter(None, map(pages.get, keys)), holder, lease_s)
        if not self._declared:
            return [Presence.HELD if key in pages else Presence.ABSENT for key in keys]
        return [Presence.HELD if key in pages else self._unheld(key) for key in keys]

    def _unheld(self, key: bytes) -> Presence:
        declared = self._declared.get(key)
        now = self._clock()
        if declared is not None and any(until > now for until in declared.until.values()):
            return Presence.COMING
        return Presence.ABSENT

    def keys(self, series: bytes) -> list[bytes]:
        """The held keys of a series."""
        return [key for key, entry in self.pages.items() if entry.series == series]

    def usage(self) -> Usage:
        """Pages, and what they take of the budget."""
        return Usage(
            num_pages=len(self.pages),
            used_bytes=self.slots.used_bytes,
            budget_bytes=self.slots.budget_bytes,
            num_waiting=sum(size.eviction.num_waiting for size in self.slots.sizes.values()),
        )

    def snapshot(self) -> list[PageEvent]:
        """The first events of a new listener."""
        self._tell_evicted()
        now = self._clock()
        held: dict[bytes, list[bytes]] = defaultdict(list)
        for key, entry in self.pages.items():
            held[entry.series].append(key)
        declared = [
            (each.series, [key], _for_s(max(each.until.values()) - now))
            for key, each in self._declared.items()
        ]
        return self._log.snapshot(held, declared)

    # -- use -----------------------------------------------------------------------------------

    def use(self, keys: Iterable[bytes]) -> None:
        """Pages were used, as far as they are there. Of keys in the order of a prompt the last goes first."""
        now = next(self._uses)
        for key in reversed([*keys]):
            entry = self.pages.get(key)
            if entry is not None:
                chunk = entry.chunk
                chunk.last_use = now
                chunk.size.eviction.use(key)

    def expect_reader(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Another end than the holder is going to read these pages, also those that have still to come. Of
        keys in the order of a prompt the last goes first."""
        now = next(self._uses)
        for key in reversed([*keys]):
            entry = self.pages.get(key)
            if entry is not None:
                entry.expected_by = holder
                entry.chunk.last_use = now
                entry.chunk.size.eviction.expect(key)
                continue
            _, num_readers = self._expected.pop(key, (None, 0))
            self._expected[key] = holder, num_readers + 1
        while len(self._expected) > MAX_EXPECTED:
            self._expected.popitem(last=False)

    def read(self, keys: Iterable[bytes], holder: Holder) -> None:
        """An end has read these pages, as far as they are there. That is a use, except that of an end that
        was expected."""
        used = []
        for key in reversed([*keys]):
            entry = self.pages.get(key)
            if entry is not None and entry.expected_by not in (None, holder):
                entry.chunk.size.eviction.read(key)
            else:
                used.append(key)
        self.use(reversed(used))

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Pages of one prompt have come, in its order: now that all are there, the last goes first."""
        for key in reversed([*keys]):
            entry = self.pages.get(key)
            if entry is not None:
                entry.chunk.size.eviction.refresh(key)

    def pin(self, entry: Entry) -> None:
        """The slot is being read."""
        entry.readers += 1

    def unpin(self, entry: Entry) -> None:
        """A reader is done."""
        entry.readers -= 1
        if entry.readers:
            return
        if entry.is_gone:
            self.slots.free(entry)
        elif not entry.is_leased(self._clock()):
            entry.chunk.size.eviction.restore(entry.key)

    def lease(self, entries: Iterable[Entry], holder: Holder, lease_s: float) -> None:
        """Pages are not evicted for that long. A lease never ends earlier than one that was there before."""
        until = self._clock() + lease_s
        leased = self._leased[holder]
        for entry in entries:
            if entry.leases is None:
                entry.leases = {}
            entry.leases[holder] = max(until, entry.leases.get(holder, 0.0))
            leased[entry] = None

    def release(self, keys: Iterable[bytes], holder: Holder) -> None:
        """The holder's leases on the pages end."""
        leased = self._leased.get(holder)
        if leased is None:
            return
        for key in keys:
            entry = self.pages.get(key)
            if entry is not None and leased.pop(entry, 0) is None:
                self._end_lease(entry, holder)
        if not leased:
            del self._leased[holder]

    def _end_lease(self, entry: Entry, holder: Holder) -> None:
        if entry.leases is None:
            return
        entry.leases.pop(holder, None)
        if not entry.leases:
            entry.leases = None
        if not entry.readers and not entry.is_leased(self._clock()):
            entry.chunk.size.eviction.restore(entry.key)

    def forget_holder(self, holder: Holder) -> None:
        """An end is gone: what it leased and declared ends."""
        for entry in self._leased.pop(holder, ()):
            self._end_lease(entry, holder)
        self._undeclare(
            [key for key, each in self._declared.items() if holder in each.until],
            holder,
            PageEvent.Removal.WITHDRAWN,
        )

    # -- pages come ----------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Slot | PutReason:
        """A slot for a page and its header, for which other pages may go; or why there is none.

        Raises:
            CapacityError: the system has not the memory that the budget allows.
        """
        size = self.slots.size_for(nbytes)
        if size is None:
            return PutReason.TOO_LARGE
        slot = self.slots.take(size)
        while slot is None:
            if not self._make_room(size):
                return PutReason.NO_ROOM
            slot = self.slots.take(size)
        return slot

    def _make_room(self, size: SizeClass) -> bool:
        """Evict a page of this size, or the pages of other sizes in a whole chunk. Returns whether one
        went."""
        self._restore_expired()
        now = self._clock()
        rebalance = len(self.slots.sizes) > 1 and size.num_evictions % REBALANCE_AFTER == 0
        if rebalance and self._take_chunk(size, now, only_colder=bool(size.chunks)):
            size.num_evictions += 1
            return True
        if self._evict_one(size, now, size.eviction.victim):
            return True
        # Only now: a page of another size that is used less does not help, a whole chunk of them does.
        if self._take_chunk(size, now, only_colder=False):
            return True
        if self._evict_one(size, now, size.eviction.longest_waiting):
            self.num_unread += 1
            return True
        return self._take_chunk(size, now, only_colder=False, also_waiting=True)

    def _evict_one(
        self, size: SizeClass, now: float, victim: Callable[[Callable[[bytes], bool]], bytes | None]
    ) -> bool:
        def may_go(key: bytes) -> bool:
            entry = self.pages[key]
            if entry.is_leased(now):
                assert entry.leases is not None
                item = (max(entry.leases.values()), next(self._numbers), entry)
                heapq.heappush(self._aside, item)
                return False
            return not entry.readers

        key = victim(may_go)
        if key is None:
            return False
        size.num_evictions += 1
        self._drop(self.pages[key], PageEvent.Removal.EVICTED, forget=False)
        return True

    def _restore_expired(self) -> None:
        now = self._clock()
        while self._aside and self._aside[0][0] <= now:
            _, _, entry = heapq.heappop(self._aside)
            if self.pages.get(entry.key) is not entry or entry.readers:
                continue
            if entry.is_leased(now):
                assert entry.leases is not None
                item = (max(entry.leases.values()), next(self._numbers), entry)
                heapq.heappush(self._aside, item)
            else:
                entry.chunk.size.eviction.restore(entry.key)

    def _take_chunk(
        self, size: SizeClass, now: float, *, only_colder: bool, also_waiting: bool = False
    ) -> bool:
        """Evict the pages of other sizes that make a chunk for this one. ``only_colder``: if their latest use
        is longer ago than that of each chunk of this size. ``also_waiting``: though readers are expected."""

        def waits(entry: Entry) -> bool:
            return entry.chunk.size.eviction.is_waiting(entry.key)

        def may_go(chunk: Chunk) -> bool:
            free = all(not entry.readers and not entry.is_leased(now) for entry in chunk.pages.values())
            if not free or len(chunk.pages) != chunk.taken:
                return False
            return also_waiting or not any(map(waits, chunk.pages.values()))

        found = self.slots.coldest(size, may_go)
        if found is None:
            return False
        coldest = min((chunk.last_use for chunk in size.chunks), default=math.inf)
        if only_colder and max(chunk.last_use for chunk in found) >= coldest:
            return False
        for chunk in found:
            for entry in list(chunk.pages.values()):
                self.num_unread += waits(entry)
                self._drop(entry, PageEvent.Removal.EVICTED)
        return True

    def publish(
        self,
        key: bytes,
        series: bytes,
        slot: Slot,
        *,
        payload_bytes: int,
        header_bytes: int,
        generation: int,
    ) -> Entry | None:
        """The slot holds the page, whole. ``None``: there is one under the key already; the slot is free."""
        if key in self.pages:
            self.slots.free(slot)
            return None
        entry = Entry(key, series, slot, payload_bytes, header_bytes, generation)
        chunk = slot.chunk
        self.pages[key] = entry
        chunk.pages[slot.offset] = entry
        chunk.last_use = next(self._uses)
        entry.expected_by, num_readers = self._expected.pop(key, (None, 0))
        chunk.size.eviction.add(key, num_readers)
        self._declared.pop(key, None)
        return entry

    def tell_stored(self, series: bytes, keys: Sequence[bytes]) -> None:
        """Tell the listeners of pages that were published."""
        if keys:
            self._tell_evicted()
            self.events.append(self._log.stored(series, keys))

    # -- pages go ------------------------------------------------------------------------------

    def _drop(self, entry: Entry, reason: PageEvent.Removal, *, forget: bool = True) -> None:
        """A page is gone. ``forget``: also from the order of eviction."""
        del self.pages[entry.key]
        del entry.chunk.pages[entry.offset]
        self._clear_generation(entry.word)
        if forget:
            entry.chunk.size.eviction.discard(entry.key)
        for holder in entry.leases or ():
            leased = self._leased[holder]
            leased.pop(entry, None)
            if not leased:
                del self._leased[holder]
        entry.leases = None
        if entry.readers:
            entry.is_gone = True
        else:
            self.slots.free(entry)
        if reason is PageEvent.Removal.EVICTED:
            self.num_evicted += 1
            self._evicted[entry.series].append(entry.key)

    def _tell_evicted(self) -> None:
        if self._evicted:
            evicted, self._evicted = self._evicted, defaultdict(list)
            for series, keys in evicted.items():
                self.events.append(self._log.removed(series, keys, PageEvent.Removal.EVICTED))

    def take_events(self) -> list[PageEvent]:
        """All that has happened and was not told yet."""
        self._tell_evicted()
        events, self.events = self.events, []
        return events

    def remove(self, keys: Iterable[bytes], reason: PageEvent.Removal = PageEvent.Removal.REMOVED) -> None:
        """Forget pages, and that they were declared."""
        keys = [*keys]
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            self._expected.pop(key, None)
            entry = self.pages.get(key)
            if entry is not None:
                gone[entry.series].append(key)
                self._drop(entry, reason)
        self._tell_removed(gone, reason)
        self._undeclare(keys, None, reason)

    def remove_entry(self, entry: Entry, reason: PageEvent.Removal) -> None:
        """Forget this page, if it is still the one under its key."""
        if self.pages.get(entry.key) is entry:
            self._drop(entry, reason)
            self._tell_removed({entry.series: [entry.key]}, reason)

    def _tell_removed(self, gone: dict[bytes, list[bytes]], reason: PageEvent.Removal) -> None:
        if gone:
            self._tell_evicted()
        for series, keys in gone.items():
            self.events.append(self._log.removed(series, keys, reason))

    def clear(self) -> None:
        """Forget all pages, declared ones too."""
        for entry in list(self.pages.values()):
            self._drop(entry, PageEvent.Removal.REMOVED)
        for size in self.slots.sizes.values():
            size.eviction.clear()
        self._aside.clear()
        self._declared.clear()
        self._expected.clear()
        self._due.clear()
        self._tell_evicted()
        self.events.append(self._log.cleared())

    # -- declared pages ------------------------------------------------------------------------

    def declare(self, series: bytes, keys: Iterable[bytes], holder: Holder, for_s: float | None) -> None:
        """Pages are going to be put within ``for_s`` seconds; ``None``: at some time."""
        until = math.inf if for_s is None else self._clock() + for_s
        new = [key for key in dict.fromkeys(keys) if key not in self.pages]
        for key in new:
            declared = self._declared.get(key)
            if declared is None:
                declared = self._declared[key] = _Declared(series)
            declared.until[holder] = max(until, declared.until.get(holder, 0.0))
            if until != math.inf:
                heapq.heappush(self._due, (until, next(self._numbers), key, holder))
        if new:
            self._tell_evicted()
            self.events.append(self._log.declared(series, new, _for_s(until - self._clock())))

    def withdraw(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Declared pages are not put after all: one reader less waits for each."""
        keys = [*keys]
        for key in keys:
            who, num_readers = self._expected.pop(key, (None, 0))
            if num_readers > 1:
                self._expected[key] = who, num_readers - 1
        self._undeclare(keys, holder, PageEvent.Removal.WITHDRAWN)

    def expire(self) -> float | None:
        """End what was declared and did not come in time. Returns when to call again; ``None``: never."""
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            _, _, key, holder = heapq.heappop(self._due)
            declared = self._declared.get(key)
            if declared is not None and declared.until.get(holder, math.inf) <= now:
                self._undeclare([key], holder, PageEvent.Removal.EXPIRED)
        return self._due[0][0] if self._due else None

    def _undeclare(self, keys: Iterable[bytes], holder: Holder, reason: PageEvent.Removal) -> None:
        """Pages are not expected from that end any more; ``None``: from any."""
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            declared = self._declared.get(key)
            if declared is None:
                continue
            if holder is not None:
                declared.until.pop(holder, None)
            if holder is None or not declared.until:
                del self._declared[key]
                gone[declared.series].append(key)
        self._tell_removed(gone, reason)


def _for_s(seconds: float) -> float:
    return min(max(0.0, seconds), FOR_EVER_S)
