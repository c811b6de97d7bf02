"""What the store holds and expects: pages by key, their leases, readers and eviction, declared pages, events.

Pure: no memory, no lock, no thread; the clock is passed in. The store calls it under its lock, and hands
:attr:`Index.events` to the listeners, in their order.

The time of a call grows with the number of keys that are passed, and not with the number of pages in the
store. A call that would change many other pages changes some of them, and says whether to call again: other
threads have the store's lock in between."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final, Generic, TypeVar

from kvplug.transport import PageEvent, Presence, PutReason, Usage
from kvplug_host.arena.slots import Chunk, SizeClass, Slot, SlotTable
from kvplug_host.eviction import MOST_LOOKED_AT
from kvplug_host.key_table import KeyTable

REBALANCE_AFTER: Final = 64
"""Evictions of one size, after which it is looked whether pages of other sizes are used less."""
FOR_EVER_S: Final = 1e8
"""What a listener is told of a page that is declared without an end."""

MAX_EXPECTED: Final = 1 << 16
"""Pages that are not here yet and for which readers are remembered; more forget the oldest."""

T = TypeVar("T")
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


class Declared:
    """A page that is going to be put."""

    __slots__ = ("latest", "series", "until")

    def __init__(self, series: bytes) -> None:
        self.series = series
        self.latest = 0.0
        """When the last of these ends has put it, at the latest."""
        self.until: dict[Holder, float] = {}
        """By the end that is going to put it."""


class Holdings(Generic[T]):
    """What each end has leased or declared.

    What it has not any more stays here for a while: when ends get more, twice as many are looked at. A set of
    what it has would take long when it grows.
    """

    def __init__(self, is_still: Callable[[T, Holder], bool]) -> None:
        """``is_still``: whether an end has something."""
        self._is_still = is_still
        self._of: dict[Holder, deque[T]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._of

    def add(self, holder: Holder, new: Sequence[T]) -> None:
        """An end has got what it had not."""
        if not new:
            return
        held = self._of.setdefault(holder, deque())
        for _ in range(min(len(held), 2 * len(new))):
            each = held.popleft()
            if self._is_still(each, holder):
                held.append(each)
        held.extend(new)

    def take(self, holder: Holder, most: int) -> list[T]:
        """Remove some of what an end had, and return it."""
        held = self._of.get(holder, deque())
        found = [held.popleft() for _ in range(min(most, len(held)))]
        if not held:
            self._of.pop(holder, None)
        return found


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
        self.pages: KeyTable[Entry] = KeyTable()
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
        self._cleared: list[dict[bytes, Entry]] = []
        """Pages that were cleared, and have still to leave their slots."""
        self._leased: Holdings[Entry] = Holdings(lambda entry, holder: holder in (entry.leases or ()))
        self._aside: list[tuple[float, int, Entry]] = []
        """Pages that could not be evicted since they were leased: until when."""
        self._numbers = itertools.count()
        self.declared: KeyTable[Declared] = KeyTable()
        self._declared_by: Holdings[bytes] = Holdings(self._has_declared)
        self._due: list[tuple[float, int, list[bytes], Holder]] = []
        """Declared pages: until when."""

    @property
    def epoch(self) -> str:
        """Of this life of the store."""
        return self._log.position[0]

    # -- questions -----------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], holder: Holder = None, lease_s: float = 0.0) -> list[Presence]:
        """What there is of each key. Held pages are leased to the holder for that long."""
        if lease_s > 0:
            self.lease(filter(None, map(self.pages.get, keys)), holder, lease_s)
        parts = self.pages.parts  # not its methods: a call for each key would take half of the time
        if not self.declared:
            return [Presence.HELD if key in parts[key[0]] else Presence.ABSENT for key in keys]
        return [Presence.HELD if key in parts[key[0]] else self._unheld(key) for key in keys]

    def _has_declared(self, key: bytes, holder: Holder) -> bool:
        declared = self.declared.get(key)
        return declared is not None and holder in declared.until

    def _unheld(self, key: bytes) -> Presence:
        declared = self.declared.get(key)
        now = self._clock()
        if declared is not None and any(until > now for until in declared.until.values()):
            return Presence.COMING
        return Presence.ABSENT

    def usage(self) -> Usage:
        """Pages, and what they take of the budget."""
        return Usage(
            num_pages=len(self.pages),
            used_bytes=self.slots.used_bytes,
            budget_bytes=self.slots.budget_bytes,
            num_waiting=sum(size.eviction.num_waiting for size in self.slots.sizes.values()),
        )

    def log_now(self) -> PageEvent.Log:
        """The log of events as it is now, for a snapshot."""
        return copy.copy(self._log)

    # -- use -----------------------------------------------------------------------------------

    def use(self, keys: Iterable[bytes]) -> None:
        """Pages were used, in this order, as far as they are there."""
        now = next(self._uses)
        for key in keys:
            entry = self.pages.get(key)
            if entry is not None:
                chunk = entry.chunk
                chunk.last_use = now
                chunk.size.eviction.use(key)

    def expect_reader(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Another end than the holder is going to read these pages, also those that have still to come. The
        first one goes first."""
        now = next(self._uses)
        for key in keys:
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
        """An end has read these pages, in this order, as far as they are there. That is a use, except that of
        an end that was expected."""
        used = []
        for key in keys:
            entry = self.pages.get(key)
            if entry is not None and entry.expected_by not in (None, holder):
                entry.chunk.size.eviction.read(key)
            else:
                used.append(key)
        self.use(used)

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Pages of one put have come: now that all are there, they go in this order."""
        for key in keys:
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
        new = []
        for entry in entries:
            if entry.leases is None:
                entry.leases = {}
            if holder not in entry.leases:
                new.append(entry)
            entry.leases[holder] = max(until, entry.leases.get(holder, 0.0))
        self._leased.add(holder, new)

    def release(self, keys: Iterable[bytes], holder: Holder) -> None:
        """The holder's leases on the pages end."""
        for key in keys:
            entry = self.pages.get(key)
            if entry is not None:
                self._end_lease(entry, holder)

    def _end_lease(self, entry: Entry, holder: Holder) -> None:
        if entry.leases is None or entry.leases.pop(holder, None) is None:
            return
        if not entry.leases:
            entry.leases = None
        if not entry.readers and not entry.is_leased(self._clock()):
            entry.chunk.size.eviction.restore(entry.key)

    def forget_holder(self, holder: Holder, most: int) -> bool:
        """An end is gone: end so many of its leases, and so many of its declarations. Returns whether it has
        more."""
        for entry in self._leased.take(holder, most):
            self._end_lease(entry, holder)
        self._undeclare(self._declared_by.take(holder, most), holder, PageEvent.Removal.WITHDRAWN)
        return holder in self._leased or holder in self._declared_by

    # -- pages come ----------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Slot | PutReason | None:
        """A slot for a page and its header, for which other pages may go; or why there is none. ``None``: not
        yet; call again.

        Raises:
            CapacityError: the system has not the memory that the budget allows.
        """
        size = self.slots.size_for(nbytes)
        if size is None:
            return PutReason.TOO_LARGE
        slot = self.slots.take(size)
        if slot is None:
            if not self._make_room(size):
                return PutReason.NO_ROOM
            slot = self.slots.take(size)
        return slot

    def _make_room(self, size: SizeClass) -> bool:
        """Evict a page of this size, or pages of other sizes that lie in a whole chunk. Looks at some pages,
        and returns whether a slot is free or there are more to look at."""
        now = self._clock()
        if self.free_cleared(1):  # before all others: only pages that are held are evicted
            return True
        if self._drain(size, now):
            return True
        more_expire = self._restore_expired(now)
        rebalance = len(self.slots.sizes) > 1 and size.num_evictions % REBALANCE_AFTER == 0
        if rebalance and self._take_chunk(size, now, only_colder=bool(size.chunks)):
            size.num_evictions += 1
            return True
        if self._evict_one(size, now):
            return True
        # Only now: a page of another size that is used less does not help, a whole chunk of them does.
        if self._take_chunk(size, now):
            return True
        if self._evict_one(size, now, waiting=True):
            return True
        return more_expire or self._take_chunk(size, now, also_waiting=True)

    def _evict_one(self, size: SizeClass, now: float, *, waiting: bool = False) -> bool:
        """Evict a page of this size; ``waiting``: one that waits for readers. Returns whether one went, or
        others may go."""

        def may_go(key: bytes) -> bool:
            entry = self.pages.get(key)
            assert entry is not None
            if entry.is_leased(now):
                self._set_aside(entry)
                return False
            return not entry.readers

        order = size.eviction
        key = order.longest_waiting(may_go) if waiting else order.victim(may_go)
        if key is None:
            return order.num_in_line(waiting=waiting) > 0
        entry = self.pages.get(key)
        assert entry is not None
        size.num_evictions += 1
        self.num_unread += waiting
        self._drop(entry, PageEvent.Removal.EVICTED, forget=False)
        return True

    def _set_aside(self, entry: Entry) -> None:
        assert entry.leases is not None
        heapq.heappush(self._aside, (max(entry.leases.values()), next(self._numbers), entry))

    def _restore_expired(self, now: float) -> bool:
        """Pages whose leases have expired may go again. Returns whether there may be more of them."""
        for _ in range(MOST_LOOKED_AT):
            if not self._aside or self._aside[0][0] > now:
                return False
            _, _, entry = heapq.heappop(self._aside)
            if self.pages.get(entry.key) is not entry or entry.readers:
                continue
            if entry.is_leased(now):
                self._set_aside(entry)
            else:
                entry.chunk.size.eviction.restore(entry.key)
        return True

    def _may_go(self, entry: Entry, now: float, also_waiting: bool) -> bool:
        if entry.readers or entry.is_leased(now):
            return False
        return also_waiting or not entry.chunk.size.eviction.is_waiting(entry.key)

    def _take_chunk(
        self, size: SizeClass, now: float, *, only_colder: bool = False, also_waiting: bool = False
    ) -> bool:
        """Begin to evict the pages of other sizes that make a chunk for this one. ``only_colder``: if their
        latest use is longer ago than that of each chunk of this size. ``also_waiting``: though readers are
        expected."""

        def may_go(chunk: Chunk) -> bool:
            return len(chunk.pages) == chunk.taken and all(
                self._may_go(entry, now, also_waiting) for entry in chunk.pages.values()
            )

        before = min((chunk.last_use for chunk in size.chunks), default=math.inf) if only_colder else math.inf
        found = self.slots.coldest(size, before, may_go)
        if found is None:
            return False
        size.to_drain, size.drains_waiting = found, also_waiting
        for chunk in found:
            self.slots.hold_back(chunk)
        return self._drain(size, now)

    def _drain(self, size: SizeClass, now: float) -> bool:
        """Evict some pages in the chunks that are to serve this size. If one of them may not go any more, the
        chunks stay with their sizes. Returns whether there were such chunks."""
        while size.to_drain:
            chunk = size.to_drain[-1]
            if not chunk.taken:
                size.to_drain.pop()
                continue
            some = [*itertools.islice(chunk.pages.values(), MOST_LOOKED_AT)]
            if some and all(self._may_go(entry, now, size.drains_waiting) for entry in some):
                for entry in some:
                    self.num_unread += chunk.size.eviction.is_waiting(entry.key)
                    self._drop(entry, PageEvent.Removal.EVICTED)
            else:
                for each in size.to_drain:
                    self.slots.hand_out(each)
                size.to_drain = []
            return True
        return False

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
        self.pages.add(key, entry)
        chunk.pages[slot.offset] = entry
        chunk.last_use = next(self._uses)
        entry.expected_by, num_readers = self._expected.pop(key, (None, 0))
        chunk.size.eviction.add(key, num_readers)
        if (declared := self.declared.get(key)) is not None:
            self._end_declaration(key, declared, None)
        return entry

    def tell_stored(self, series: bytes, keys: Sequence[bytes]) -> None:
        """Tell the listeners of pages that were published."""
        if keys:
            self._tell_evicted()
            self.events.append(self._log.stored(series, keys))

    # -- pages go ------------------------------------------------------------------------------

    def _drop(self, entry: Entry, reason: PageEvent.Removal, *, forget: bool = True) -> None:
        """A page is gone, or has been since the store was cleared. ``forget``: also from the order of
        eviction."""
        is_held = self.pages.get(entry.key) is entry
        if is_held:
            self.pages.pop(entry.key)
            if forget:
                entry.chunk.size.eviction.discard(entry.key)
            if reason is PageEvent.Removal.EVICTED:
                self.num_evicted += 1
                self._evicted[entry.series].append(entry.key)
        del entry.chunk.pages[entry.offset]
        self._clear_generation(entry.word)
        entry.leases = None
        if entry.readers:
            entry.is_gone = True
        else:
            self.slots.free(entry)

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

    def clear(self) -> object:
        """Forget all pages, declared ones too. They are in their slots until :meth:`free_cleared` has freed
        these.

        Returns what the store has known of them: the caller drops it without the lock, since that takes long.
        """
        self._cleared += self.pages.parts
        orders = [(size, size.eviction) for size in self.slots.sizes.values()]
        known = orders, self.declared, self._declared_by, self._due, self._aside, self._expected
        self.pages, self.declared = KeyTable(), KeyTable()
        self._declared_by, self._expected = Holdings(self._has_declared), OrderedDict()
        self._due, self._aside = [], []
        for size, _ in orders:
            size.new_eviction()
        self._tell_evicted()
        self.events.append(self._log.cleared())
        return known

    def free_cleared(self, most: int) -> bool:
        """Free the slots of so many pages that were cleared. Returns whether there were any."""
        left = most
        while self._cleared and left:
            part = self._cleared[-1]
            if not part:
                self._cleared.pop()
                continue
            left -= 1
            _, entry = part.popitem()
            self._drop(entry, PageEvent.Removal.REMOVED)
        return left < most

    # -- declared pages ------------------------------------------------------------------------

    def declare(self, series: bytes, keys: Iterable[bytes], holder: Holder, for_s: float | None) -> None:
        """Pages are going to be put within ``for_s`` seconds; ``None``: at some time."""
        until = math.inf if for_s is None else self._clock() + for_s
        new = [key for key in dict.fromkeys(keys) if key not in self.pages]
        if not new:
            return
        self._declared_by.add(holder, [key for key in new if not self._has_declared(key, holder)])
        for key in new:
            declared = self.declared.get(key)
            if declared is None:
                declared = Declared(series)
                self.declared.add(key, declared)
            declared.until[holder] = max(until, declared.until.get(holder, 0.0))
            declared.latest = max(until, declared.latest)
        if until != math.inf:
            heapq.heappush(self._due, (until, next(self._numbers), new, holder))
        self._tell_evicted()
        self.events.append(self._log.declared(series, new, seconds_left(until - self._clock())))

    def withdraw(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Declared pages are not put after all: one reader less waits for each."""
        keys = [*keys]
        for key in keys:
            who, num_readers = self._expected.pop(key, (None, 0))
            if num_readers > 1:
                self._expected[key] = who, num_readers - 1
        self._undeclare(keys, holder, PageEvent.Removal.WITHDRAWN)

    def expire(self) -> float | None:
        """End pages that were declared in one call and did not come in time. Returns when to call again;
        ``None``: never."""
        now = self._clock()
        if self._due and self._due[0][0] <= now:
            _, _, keys, holder = heapq.heappop(self._due)
            late = [
                key
                for key in keys
                if (each := self.declared.get(key)) is not None and each.until.get(holder, math.inf) <= now
            ]
            self._undeclare(late, holder, PageEvent.Removal.EXPIRED)
        return self._due[0][0] if self._due else None

    def _undeclare(self, keys: Iterable[bytes], holder: Holder, reason: PageEvent.Removal) -> None:
        """Pages are not expected from that end any more; ``None``: from any."""
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            declared = self.declared.get(key)
            if declared is None:
                continue
            self._end_declaration(key, declared, holder)
            if not declared.until:
                gone[declared.series].append(key)
        self._tell_removed(gone, reason)

    def _end_declaration(self, key: bytes, declared: Declared, holder: Holder) -> None:
        if holder is None:
            declared.until.clear()
        else:
            declared.until.pop(holder, None)
        declared.latest = max(declared.until.values(), default=0.0)
        if not declared.until:
            self.declared.pop(key)


def seconds_left(seconds: float) -> float:
    """The time that a listener is told."""
    return min(max(0.0, seconds), FOR_EVER_S)
