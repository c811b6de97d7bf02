"""The index of a store: pages by key with their leases, readers and eviction; declared pages; events.

Pure: no memory, no lock, no thread; the clock is passed in. The store calls it under its lock, and hands
:attr:`Index.events` to the listeners, in their order.

The time of a call grows with the number of keys that are passed, and not with the number of pages in the
store. A call that would change many other pages changes some of them, and returns whether to call it again:
other threads have the store's lock in between."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from kvplug.transport import PageEvent, Presence, PutReason, Usage
from kvplug_host.arena.slots import Chunk, SizeClass, Slot, SlotTable
from kvplug_host.eviction import MOST_LOOKED_AT
from kvplug_host.key_table import KeyTable

REBALANCE_AFTER: Final = 64
"""Number of evictions of one size after which pages of other sizes are compared with it."""
FOR_EVER_S: Final = 1e8
"""The time in an event for a page that is declared without a time limit."""

MAX_EXPECTED: Final = 1 << 16
"""Limit on pages that are not held and whose expected readers are remembered. Beyond it the oldest goes."""

Holder = Hashable
"""An end of the store, which leases pages, declares pages, and expects other ends to read pages."""


class Entry(Slot):
    """A slot that holds a page."""

    __slots__ = (
        "aside_until",
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
        """Bytes of the page. They begin where the slot begins; the header follows them."""
        self.header_bytes = header_bytes
        self.generation = generation
        self.readers = 0
        """Number of copies under way in this process. The slot is not used again before they have ended."""
        self.leases: dict[Holder, float] | None = None
        self.aside_until = math.inf
        """When the index looks at it again, since it was leased when an eviction passed over it."""
        self.is_gone = False
        """Whether the page was removed while its slot is still being read."""
        self.expected_by: Holder = None
        """The last end that expected another one to read the page."""

    def is_leased(self, now: float) -> bool:
        """Whether the page has a lease that has not expired."""
        return self.leases is not None and any(until > now for until in self.leases.values())


class Declared:
    """A page that is going to be put."""

    __slots__ = ("latest", "series", "until")

    def __init__(self, series: bytes) -> None:
        self.series = series
        self.latest = 0.0
        """The latest time at which one of these ends is going to put it."""
        self.until: dict[Holder, float] = {}
        """Until when each end is going to put it."""


class Holdings:
    """The keys that each end has leased or declared: in many small sets, since a large one takes long to
    grow."""

    def __init__(self) -> None:
        self._of: dict[Holder, dict[int, set[bytes]]] = {}

    def __contains__(self, holder: Holder) -> bool:
        return holder in self._of

    def add(self, holder: Holder, keys: Iterable[bytes]) -> None:
        """Add keys to those of an end."""
        parts = self._of.setdefault(holder, defaultdict(set))
        for key in keys:
            parts[key[0]].add(key)

    def discard(self, holder: Holder, keys: Iterable[bytes]) -> None:
        """Remove keys from those of an end."""
        parts = self._of.get(holder, {})
        for key in keys:
            if key[0] in parts:
                parts[key[0]].discard(key)

    def take(self, holder: Holder, most: int) -> list[bytes]:
        """Remove up to ``most`` keys of an end, and return them."""
        found: list[bytes] = []
        parts = self._of.get(holder, {})
        while parts and len(found) < most:
            number, keys = parts.popitem()
            while keys and len(found) < most:
                found.append(keys.pop())
            if keys:
                parts[number] = keys
        if not parts:
            self._of.pop(holder, None)
        return found


class Index:
    """Pages in the slots of a table.

    ``clear_generation`` is called with the offset of a slot's word when the slot's page is removed."""

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
        """Events that the listeners have not got yet."""
        self.num_unread = 0
        """Number of evicted pages that waited for a reader."""
        self._expected: OrderedDict[bytes, tuple[Holder, int]] = OrderedDict()
        """For pages that are not held: the end that expects readers, and the number of readers."""
        self._log = PageEvent.Log()
        self._uses = itertools.count(1)
        self._evicted: dict[bytes, list[bytes]] = defaultdict(list)
        """Keys by series, evicted by the call that is under way."""
        self._cleared: list[dict[bytes, Entry]] = []
        """Pages that were cleared and are still in their slots."""
        self._leased = Holdings()
        self._aside: list[tuple[float, int, Entry]] = []
        """Leased pages that were passed over by an eviction, by the end of their leases."""
        self._numbers = itertools.count()
        self.declared: KeyTable[Declared] = KeyTable()
        self._declared_by = Holdings()
        self._due: list[tuple[float, int, list[bytes], Holder]] = []
        """Declared pages, by the time until which they are declared."""

    @property
    def epoch(self) -> str:
        """The store's epoch, which is in its events."""
        return self._log.position[0]

    # -- questions -----------------------------------------------------------------------------

    def lookup(self, keys: Sequence[bytes], holder: Holder = None, lease_s: float = 0.0) -> list[Presence]:
        """Return the presence of each key, and lease the held pages to the holder for ``lease_s`` seconds."""
        parts = self.pages.parts  # not its methods: a call for each key would take half of the time
        if lease_s > 0:
            self.lease(filter(None, [parts[key[0]].get(key) for key in keys]), holder, lease_s)
        held, absent = Presence.HELD, Presence.ABSENT
        if not self.declared:
            return [held if key in parts[key[0]] else absent for key in keys]
        return [held if key in parts[key[0]] else self._unheld(key) for key in keys]

    def _unheld(self, key: bytes) -> Presence:
        declared = self.declared.get(key)
        now = self._clock()
        if declared is not None and any(until > now for until in declared.until.values()):
            return Presence.COMING
        return Presence.ABSENT

    def usage(self) -> Usage:
        """Return the number of pages, and the bytes that they take."""
        return Usage(
            num_pages=len(self.pages),
            used_bytes=self.slots.used_bytes,
            budget_bytes=self.slots.budget_bytes,
            num_waiting=sum(size.eviction.num_waiting for size in self.slots.sizes.values()),
        )

    def log_now(self) -> PageEvent.Log:
        """Return a copy of the log of events, for a snapshot."""
        return copy.copy(self._log)

    # -- use -----------------------------------------------------------------------------------

    def use(self, keys: Iterable[bytes]) -> None:
        """Note that pages were used, in this order. Ignores keys that are not held."""
        now, parts = next(self._uses), self.pages.parts
        for key in keys:
            entry = parts[key[0]].get(key)
            if entry is not None:
                chunk = entry.chunk
                chunk.last_use = now
                chunk.size.eviction.use(key)

    def expect_reader(self, keys: Iterable[bytes], holder: Holder) -> None:
        """Note that an end other than the holder is going to read these pages, also those that are not held
        yet. The first one is evicted first."""
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
        """Note that an end has read these pages, in this order. Ignores keys that are not held. Reading
        counts as a use, unless the reader was expected."""
        used = []
        for key in keys:
            entry = self.pages.get(key)
            if entry is not None and entry.expected_by not in (None, holder):
                entry.chunk.size.eviction.read(key)
            else:
                used.append(key)
        self.use(used)

    def refresh(self, keys: Iterable[bytes]) -> None:
        """Put pages, all of one put, at the end of the order of eviction; the first one is evicted first."""
        for key in keys:
            entry = self.pages.get(key)
            if entry is not None:
                entry.chunk.size.eviction.refresh(key)

    def pin(self, entry: Entry) -> None:
        """Count a reader of the slot."""
        entry.readers += 1

    def unpin(self, entry: Entry) -> None:
        """Count a reader less. Frees the slot of a removed page with its last reader."""
        entry.readers -= 1
        if entry.readers:
            return
        if entry.is_gone:
            self.slots.free(entry)
        else:  # also a leased page: the next eviction that comes to it sets it aside until the lease expires
            entry.chunk.size.eviction.restore(entry.key)

    def lease(self, entries: Iterable[Entry], holder: Holder, lease_s: float) -> None:
        """Prevent that pages are evicted, for ``lease_s`` seconds. Does not shorten a lease."""
        until = self._clock() + lease_s
        new = []
        for entry in entries:
            if entry.leases is None:
                entry.leases = {holder: until}
                new.append(entry.key)
                continue
            if holder not in entry.leases:
                new.append(entry.key)
            entry.leases[holder] = max(until, entry.leases.get(holder, 0.0))
        if new:
            self._leased.add(holder, new)

    def release(self, keys: Iterable[bytes], holder: Holder) -> None:
        """End the holder's leases on the pages."""
        ended, parts = [], self.pages.parts
        for key in keys:
            entry = parts[key[0]].get(key)
            if entry is not None and entry.leases is not None and holder in entry.leases:
                del entry.leases[holder]
                entry.leases = entry.leases or None
                entry.chunk.size.eviction.restore(key)
                ended.append(key)
        self._leased.discard(holder, ended)

    def forget_holder(self, holder: Holder, most: int) -> bool:
        """End up to ``most`` leases of an end that is gone, and as many declarations. Returns whether it has
        more."""
        self.release(self._leased.take(holder, most), holder)
        self._undeclare(self._declared_by.take(holder, most), holder, PageEvent.Removal.WITHDRAWN)
        return holder in self._leased or holder in self._declared_by

    # -- pages come ----------------------------------------------------------------------------

    def reserve(self, nbytes: int) -> Slot | PutReason | None:
        """Return a slot for a page and its header, or the reason why there is no room. Evicts other pages.
        ``None``: there may be room after more evictions; call again.

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
        """Evict a page of this size, or pages of other sizes in a whole chunk. Checks a limited number of
        pages. Returns whether a slot may be free now, or after another call."""
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
        """Evict a page of this size, if one of the next may go; ``waiting``: one that waits for readers.
        Returns whether it did, or another call may."""

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
        until = max(entry.leases.values())
        if until < entry.aside_until:
            entry.aside_until = until
            heapq.heappush(self._aside, (until, next(self._numbers), entry))

    def _restore_expired(self, now: float) -> bool:
        """Put pages whose leases have expired back into the order of eviction. Returns whether there may
        be more."""
        for _ in range(MOST_LOOKED_AT):
            if not self._aside or self._aside[0][0] > now:
                return False
            until, _, entry = heapq.heappop(self._aside)
            if self.pages.get(entry.key) is not entry or until != entry.aside_until:
                continue
            entry.aside_until = math.inf
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
        """Begin to evict the pages of other sizes in a chunk that can serve this one. ``only_colder``: only
        if their latest use was before that of each chunk of this size. ``also_waiting``: also pages that
        wait for readers."""

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
        """Evict some pages in the chunks that are going to serve this size. If one of them must not be
        evicted now, the chunks keep their sizes. Returns whether there were such chunks."""
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
        """Hold the page, which is complete in its slot. ``None``: the key is held already; the slot is
        freed."""
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

    def log_stored(self, series: bytes, keys: Sequence[bytes]) -> None:
        """Log that pages were published."""
        if keys:
            self._log_evicted()
            self.events.append(self._log.stored(series, keys))

    # -- pages go ------------------------------------------------------------------------------

    def _drop(self, entry: Entry, reason: PageEvent.Removal, *, forget: bool = True) -> None:
        """Remove a page that is held. ``forget``: also from the order of eviction."""
        self.pages.pop(entry.key)
        if forget:
            entry.chunk.size.eviction.discard(entry.key)
        if reason is PageEvent.Removal.EVICTED:
            self._evicted[entry.series].append(entry.key)
        for holder in entry.leases or ():
            self._leased.discard(holder, [entry.key])
        self._free_slot(entry)

    def _free_slot(self, entry: Entry) -> None:
        """Free the slot of a page that is not held any more, now or when its last reader ends."""
        del entry.chunk.pages[entry.offset]
        self._clear_generation(entry.word)
        entry.leases = None
        if entry.readers:
            entry.is_gone = True
        else:
            self.slots.free(entry)

    def _log_evicted(self) -> None:
        if self._evicted:
            evicted, self._evicted = self._evicted, defaultdict(list)
            for series, keys in evicted.items():
                self.events.append(self._log.removed(series, keys, PageEvent.Removal.EVICTED))

    def take_events(self) -> list[PageEvent]:
        """Return and forget the events that the listeners have not got yet."""
        self._log_evicted()
        events, self.events = self.events, []
        return events

    def remove(self, keys: Sequence[bytes], reason: PageEvent.Removal = PageEvent.Removal.REMOVED) -> None:
        """Remove pages, and end their declarations."""
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            self._expected.pop(key, None)
            entry = self.pages.get(key)
            if entry is not None:
                gone[entry.series].append(key)
                self._drop(entry, reason)
        self._log_removed(gone, reason)
        if self.declared:
            self._undeclare(keys, None, reason)

    def remove_entry(self, entry: Entry, reason: PageEvent.Removal) -> None:
        """Remove this page, if its key has no other page by now."""
        if self.pages.get(entry.key) is entry:
            self._drop(entry, reason)
            self._log_removed({entry.series: [entry.key]}, reason)

    def _log_removed(self, gone: dict[bytes, list[bytes]], reason: PageEvent.Removal) -> None:
        if gone:
            self._log_evicted()
        for series, keys in gone.items():
            self.events.append(self._log.removed(series, keys, reason))

    def clear(self) -> object:
        """Remove all pages, and end all declarations. :meth:`free_cleared` frees the slots afterwards.

        Returns the old tables. Freeing their memory takes long, so the caller drops them without the lock.
        """
        self._cleared += self.pages.parts
        orders = [(size, size.eviction) for size in self.slots.sizes.values()]
        known = orders, self._leased, self.declared, self._declared_by, self._due, self._aside, self._expected
        self.pages, self.declared = KeyTable(), KeyTable()
        self._leased, self._declared_by, self._expected = Holdings(), Holdings(), OrderedDict()
        self._due, self._aside = [], []
        for size, _ in orders:
            size.new_eviction()
        self._log_evicted()
        self.events.append(self._log.cleared())
        return known

    def free_cleared(self, most: int) -> bool:
        """Free the slots of up to ``most`` pages that were cleared. Returns whether there were any."""
        left = most
        while self._cleared and left:
            part = self._cleared[-1]
            if not part:
                self._cleared.pop()
                continue
            left -= 1
            _, entry = part.popitem()
            self._free_slot(entry)
        return left < most

    # -- declared pages ------------------------------------------------------------------------

    def declare(self, series: bytes, keys: Iterable[bytes], holder: Holder, until: float) -> None:
        """Note that the holder is going to put pages by that time of the clock."""
        new = [key for key in dict.fromkeys(keys) if key not in self.pages]
        if not new:
            return
        self._declared_by.add(holder, new)
        for key in new:
            declared = self.declared.get(key)
            if declared is None:
                declared = Declared(series)
                self.declared.add(key, declared)
            declared.until[holder] = max(until, declared.until.get(holder, 0.0))
            declared.latest = max(until, declared.latest)
        if until != math.inf:
            heapq.heappush(self._due, (until, next(self._numbers), new, holder))
        self._log_evicted()
        self.events.append(self._log.declared(series, new, seconds_left(until - self._clock())))

    def withdraw(self, keys: Sequence[bytes], holder: Holder) -> None:
        """End the holder's declarations. One reader less is expected for each page."""
        for key in keys:
            who, num_readers = self._expected.pop(key, (None, 0))
            if num_readers > 1:
                self._expected[key] = who, num_readers - 1
        self._undeclare(keys, holder, PageEvent.Removal.WITHDRAWN)

    def expire(self) -> float | None:
        """End the oldest declarations whose time is over, those of one call of :meth:`declare`. Returns when
        to call again; ``None``: never."""
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
        """End the declarations of pages by that end; ``None``: by all ends."""
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            declared = self.declared.get(key)
            if declared is None:
                continue
            self._end_declaration(key, declared, holder)
            if not declared.until:
                gone[declared.series].append(key)
        self._log_removed(gone, reason)

    def _end_declaration(self, key: bytes, declared: Declared, holder: Holder) -> None:
        for each in [*declared.until] if holder is None else [holder]:
            declared.until.pop(each, None)
            self._declared_by.discard(each, [key])
        declared.latest = max(declared.until.values(), default=0.0)
        if not declared.until:
            self.declared.pop(key)


def seconds_left(seconds: float) -> float:
    """Return the time for an event: not negative, and finite."""
    return min(max(0.0, seconds), FOR_EVER_S)
