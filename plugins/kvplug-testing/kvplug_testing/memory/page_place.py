"""The pages of the store "memory", which its ends in one process share."""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from kvplug import CapacityError
from kvplug.kit import SERIES_BYTES
from kvplug.transport import (
    BackgroundThread,
    PageEvent,
    PageEventLog,
    PageRemoval,
    Presence,
    Usage,
    split_header,
)

Listener = Callable[[PageEvent], None]


class _Timer(BackgroundThread):
    """One call to come."""

    def __init__(self, after_s: float, call: Callable[[], None]) -> None:
        self._over = threading.Event()
        super().__init__(self._wait, name="kvplug_testing timer", stop=self.cancel, args=(after_s, call))

    def _wait(self, after_s: float, call: Callable[[], None]) -> None:
        if not self._over.wait(min(after_s, threading.TIMEOUT_MAX)):
            call()

    def cancel(self) -> None:
        """It is not called, unless it is being called now."""
        self._over.set()


class PagePlace:
    """Whole pages by key, the least recently used first; who declared and who leased which; the events.

    Thread-safe. Listeners are called under the lock, so they get the events in order.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.pages: OrderedDict[bytes, bytes] = OrderedDict()
        self.used_bytes = 0
        self.lock = threading.RLock()
        self.ends: set[int] = set()
        self._numbers = itertools.count()
        self._declared: dict[bytes, dict[int, float]] = {}
        """For each page that is expected: until when, by each end that declared it."""
        self._series: dict[bytes, bytes] = {}
        """The series of the declared pages."""
        self._leases: dict[bytes, dict[int, float]] = {}
        self._expected: dict[bytes, tuple[int, int]] = {}
        """For each page that another end is to read: the end that expects so, and how many readers."""
        self._timers: dict[int, set[_Timer]] = defaultdict(set)
        self._log = PageEventLog()
        self._listeners: list[Listener] = []

    def enter(self) -> int:
        """A number for a new end."""
        with self.lock:
            end = next(self._numbers)
            self.ends.add(end)
            return end

    def leave(self, end: int) -> None:
        """The end is closed: what it leased and declared ends, too."""
        with self.lock:
            self.ends.discard(end)
            for timer in self._timers.pop(end, ()):
                timer.cancel()
            for leased in self._leases.values():
                leased.pop(end, None)
            self._undeclare(self._declared_by(end), end, PageRemoval.WITHDRAWN)

    # -- pages ---------------------------------------------------------------------------------

    def lookup(self, end: int, keys: Sequence[bytes], lease_s: float) -> list[Presence]:
        """What there is of each key. Held pages are leased to the end for that long."""
        now = time.monotonic()
        with self.lock:
            return [self._presence(end, key, now, lease_s) for key in keys]

    def _presence(self, end: int, key: bytes, now: float, lease_s: float) -> Presence:
        if key in self.pages:
            if lease_s:
                leased = self._leases.setdefault(key, {})
                leased[end] = max(leased.get(end, 0.0), now + lease_s)
            return Presence.HELD
        coming = any(until > now for until in self._declared.get(key, {}).values())
        return Presence.COMING if coming else Presence.ABSENT

    def read(self, key: bytes, end: int = -1) -> bytes | None:
        """The page; it counts as used. ``end``: who reads; -1: one of another process."""
        with self.lock:
            self.touch([key])
            by, num_readers = self._expected.get(key, (end, 0))
            if key in self.pages and by != end:
                self._expected[key] = by, num_readers - 1
                if num_readers == 1:
                    del self._expected[key]
            return self.pages.get(key)

    def expect_reader(self, end: int, keys: Iterable[bytes]) -> None:
        """Another end is going to read these pages, also those that have still to come."""
        with self.lock:
            for key in keys:
                self._expected[key] = end, self._expected.get(key, (end, 0))[1] + 1

    def touch(self, keys: Iterable[bytes]) -> None:
        """The pages were used."""
        with self.lock:
            for key in keys:
                if key in self.pages:
                    self.pages.move_to_end(key)

    def write(self, key: bytes, page: bytes) -> bool:
        """Whether the page is kept, or was there before.

        Raises:
            CapacityError: it is larger than the budget.
        """
        if len(page) > self.budget_bytes:
            raise CapacityError(f"a page of {len(page)} bytes in a budget of {self.budget_bytes}")
        with self.lock:
            if key in self.pages:
                return True
            if not self._make_room(len(page)):
                return False
            self.pages[key] = page
            self.used_bytes += len(page)
            self._declared.pop(key, None)
            self._series.pop(key, None)
            self._tell(self._log.stored(series_of(page), [key]))
            return True

    def _make_room(self, nbytes: int) -> bool:
        """Evict pages that are not leased until there is room; none if there are too few."""
        now, free, evicted = time.monotonic(), self.budget_bytes - self.used_bytes, []
        for key, page in sorted(self.pages.items(), key=lambda item: item[0] in self._expected):
            if free >= nbytes:
                break
            if not any(until > now for until in self._leases.get(key, {}).values()):
                evicted.append(key)
                free += len(page)
        if free < nbytes:
            return False
        self._drop(evicted, PageRemoval.EVICTED)
        return True

    def _drop(self, keys: Iterable[bytes], reason: PageRemoval) -> None:
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            page = self.pages.pop(key, None)
            if page is not None:
                self.used_bytes -= len(page)
                self._leases.pop(key, None)
                self._expected.pop(key, None)
                gone[series_of(page)].append(key)
        for series, each in gone.items():
            self._tell(self._log.removed(series, each, reason))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget pages, and that they were declared."""
        with self.lock:
            self._drop(keys, PageRemoval.REMOVED)
            self._undeclare(keys, None, PageRemoval.REMOVED)

    def clear(self) -> None:
        """Forget everything."""
        with self.lock:
            self.pages.clear()
            self._leases.clear()
            self._expected.clear()
            self._declared.clear()
            self._series.clear()
            self.used_bytes = 0
            self._tell(self._log.cleared())

    def release(self, end: int, keys: Sequence[bytes]) -> None:
        """The end's leases on the pages end."""
        with self.lock:
            for key in keys:
                self._leases.get(key, {}).pop(end, None)

    def keys(self, series: bytes) -> list[bytes]:
        """The held keys of a series."""
        with self.lock:
            return [key for key, page in self.pages.items() if series_of(page) == series]

    def usage(self) -> Usage:
        """The pages, without a lock: a number may be that of a moment ago."""
        return Usage(num_pages=len(self.pages), used_bytes=self.used_bytes, budget_bytes=self.budget_bytes)

    # -- pages that are expected ---------------------------------------------------------------

    def declare(self, end: int, series: bytes, keys: Sequence[bytes], for_s: float) -> None:
        """The end is going to write these pages within ``for_s`` seconds."""
        until = time.monotonic() + for_s
        with self.lock:
            new = [key for key in keys if key not in self.pages]
            for key in new:
                self._declared.setdefault(key, {})[end] = until
                self._series[key] = series
            if new:
                self._tell(self._log.declared(series, new, for_s))
                timers = self._timers[end]
                timers.difference_update([each for each in timers if not each.is_alive()])
                timer = _Timer(for_s, partial(self._expire, end, new, until))
                timers.add(timer)
                timer.start()

    def withdraw(self, end: int, keys: Sequence[bytes]) -> None:
        """The end does not write these pages after all."""
        with self.lock:
            self._undeclare(keys, end, PageRemoval.WITHDRAWN)

    def _expire(self, end: int, keys: Sequence[bytes], until: float) -> None:
        with self.lock:
            due = [key for key in keys if self._declared.get(key, {}).get(end, until + 1) <= until]
            self._undeclare(due, end, PageRemoval.EXPIRED)

    def _declared_by(self, end: int) -> list[bytes]:
        return [key for key, ends in self._declared.items() if end in ends]

    def _undeclare(self, keys: Sequence[bytes], end: int | None, reason: PageRemoval) -> None:
        """The pages are not expected from the end any more; ``None``: from any."""
        gone: dict[bytes, list[bytes]] = defaultdict(list)
        for key in keys:
            ends = self._declared.get(key)
            if ends is None:
                continue
            if end is not None:
                ends.pop(end, None)
            if end is None or not ends:
                del self._declared[key]
                gone[self._series.pop(key)].append(key)
        for series, each in gone.items():
            self._tell(self._log.removed(series, each, reason))

    # -- events --------------------------------------------------------------------------------

    def _tell(self, event: PageEvent) -> None:
        for listener in self._listeners:
            listener(event)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """As :meth:`kvplug.transport.store.store.Store.subscribe`."""
        now = time.monotonic()
        with self.lock:
            held: dict[bytes, list[bytes]] = defaultdict(list)
            for key, page in self.pages.items():
                held[series_of(page)].append(key)
            expected = [
                (self._series[key], [key], max(0.0, max(ends.values()) - now))
                for key, ends in self._declared.items()
            ]
            for event in self._log.snapshot(held, expected):
                listener(event)
            self._listeners.append(listener)

        def end() -> None:
            with self.lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return end


def series_of(page: bytes) -> bytes:
    """The series id in a page's header; zeros if it has none."""
    found = split_header(page)
    return bytes(SERIES_BYTES) if found is None else found[1]
