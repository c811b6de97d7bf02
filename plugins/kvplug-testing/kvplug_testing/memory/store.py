"""The store "memory": pages in a dict of this process. Its ends share it by a path."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from kvplug import CapacityError
from kvplug.kit import SERIES_BYTES, ExecutedStore
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    BlockingStore,
    Job,
    PageEvent,
    PageSeal,
    Presence,
    Series,
    Store,
    Timeout,
    Usage,
)

_FOR_EVER_S = 1e8

_places: dict[str, PagePlace] = {}
"""By path, as long as an end is open."""
_entering = threading.Lock()

End: TypeAlias = "MemoryStore"
Listener: TypeAlias = Callable[[PageEvent], None]


class PagePlace(BlockingStore):
    """Whole pages by key, the least recently used first; declarations and leases of each end; the events.

    Thread-safe. Listeners are called under the lock, so they get the events in order. A declared page whose
    time is over is noticed by the next lookup.
    """

    is_shared = False  # other processes do not see them

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.pages: OrderedDict[bytes, bytes] = OrderedDict()
        self.used_bytes = 0
        self.lock = threading.RLock()
        self.ends: set[End] = set()
        self._leases: dict[bytes, dict[End, float]] = {}
        """For each leased page: until when, by each end."""
        self._declared: dict[bytes, dict[End, float]] = {}
        """For each page that is expected: until when, by each end that declared it."""
        self._series: dict[bytes, bytes] = {}
        """The series of the declared pages."""
        self._log = PageEvent.Log()
        self._listeners: list[Listener] = []

    def leave(self, end: End) -> None:
        """The end is closed: what it leased and declared ends, too."""
        with self.lock:
            self.ends.discard(end)
            self.release(end, list(self._leases))
            self.withdraw(end, list(self._declared))

    # -- pages ---------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        return [key in self.pages for key in keys]

    def read(self, key: bytes, into: Sequence[memoryview]) -> int | None:
        self.touch([key])
        page = self.pages.get(key)
        return None if page is None else fill(into, page)

    def write(self, key: bytes, page: Sequence[memoryview]) -> bool:
        return self.keep(key, b"".join(page))

    def keep(self, key: bytes, page: bytes) -> bool:
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
            self._publish(self._log.stored(series_of(page), [key]))
            return True

    def _make_room(self, nbytes: int) -> bool:
        """Evict pages that are not leased until there is room; none if there are too few."""
        now, free, evicted = time.monotonic(), self.budget_bytes - self.used_bytes, []
        for key, page in self.pages.items():
            if free >= nbytes:
                break
            if not any(until > now for until in self._leases.get(key, {}).values()):
                evicted.append(key)
                free += len(page)
        if free < nbytes:
            return False
        self._drop(evicted, PageEvent.Removal.EVICTED)
        return True

    def _drop(self, keys: Iterable[bytes], reason: PageEvent.Removal) -> None:
        for key in keys:
            page = self.pages.pop(key, None)
            if page is not None:
                self.used_bytes -= len(page)
                self._leases.pop(key, None)
                self._publish(self._log.removed(series_of(page), [key], reason))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Forget pages, and that they were declared."""
        with self.lock:
            self._drop(keys, PageEvent.Removal.REMOVED)
            for end in list(self.ends):
                self._undeclare(end, keys, PageEvent.Removal.REMOVED)

    def clear(self) -> None:
        with self.lock:
            for kept in (self.pages, self._leases, self._declared, self._series):
                kept.clear()
            self.used_bytes = 0
            self._publish(self._log.cleared())

    def touch(self, keys: Sequence[bytes]) -> None:
        with self.lock:
            for key in keys:
                if key in self.pages:
                    self.pages.move_to_end(key)

    def keys(self, series: bytes) -> list[bytes]:
        with self.lock:
            return [key for key, page in self.pages.items() if series_of(page) == series]

    def usage(self) -> Usage:
        return Usage(num_pages=len(self.pages), used_bytes=self.used_bytes, budget_bytes=self.budget_bytes)

    # -- leases, and pages that are expected ---------------------------------------------------

    def lookup(self, end: End, keys: Sequence[bytes], lease_s: float) -> list[Presence]:
        """What there is of each key. Held pages are leased to the end for that long."""
        with self.lock:
            self._expire()
            return [self._presence(end, key, lease_s) for key in keys]

    def _presence(self, end: End, key: bytes, lease_s: float) -> Presence:
        if key not in self.pages:
            return Presence.COMING if key in self._declared else Presence.ABSENT
        if lease_s:
            leased = self._leases.setdefault(key, {})
            leased[end] = max(leased.get(end, 0.0), time.monotonic() + lease_s)
        return Presence.HELD

    def release(self, end: End, keys: Sequence[bytes]) -> None:
        """The end's leases on the pages end."""
        with self.lock:
            for key in keys:
                self._leases.get(key, {}).pop(end, None)

    def declare(self, end: End, series: bytes, keys: Sequence[bytes], for_s: float) -> None:
        """The end is going to write these pages within ``for_s`` seconds."""
        with self.lock:
            new = [key for key in keys if key not in self.pages]
            for key in new:
                self._declared.setdefault(key, {})[end] = time.monotonic() + for_s
                self._series[key] = series
            if new:
                self._publish(self._log.declared(series, new, for_s))

    def withdraw(self, end: End, keys: Sequence[bytes]) -> None:
        """The end does not write these pages after all."""
        with self.lock:
            self._undeclare(end, keys, PageEvent.Removal.WITHDRAWN)

    def _expire(self) -> None:
        now = time.monotonic()
        for key, ends in list(self._declared.items()):
            for end in [end for end, until in ends.items() if until <= now]:
                self._undeclare(end, [key], PageEvent.Removal.EXPIRED)

    def _undeclare(self, end: End, keys: Iterable[bytes], reason: PageEvent.Removal) -> None:
        for key in keys:
            ends = self._declared.get(key, {})
            if ends.pop(end, None) and not ends:
                del self._declared[key]
                self._publish(self._log.removed(self._series.pop(key), [key], reason))

    # -- events --------------------------------------------------------------------------------

    def _publish(self, event: PageEvent) -> None:
        for listener in self._listeners:
            listener(event)

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """As :meth:`kvplug.transport.store.store.Store.subscribe`."""
        with self.lock:
            self._expire()
            now = time.monotonic()
            held: dict[bytes, list[bytes]] = {}
            for key, page in self.pages.items():
                held.setdefault(series_of(page), []).append(key)
            declared = [
                (self._series[key], [key], max(0.0, max(ends.values()) - now))
                for key, ends in self._declared.items()
            ]
            for event in self._log.snapshot(held, declared):
                listener(event)
            self._listeners.append(listener)

        def end() -> None:
            with self.lock:
                if listener in self._listeners:
                    self._listeners.remove(listener)

        return end


def series_of(page: bytes) -> bytes:
    """The series id in a page's header; zeros if it has none."""
    found = PageSeal.split(page)
    return bytes(SERIES_BYTES) if found is None else found[1]


def fill(into: Sequence[memoryview], page: bytes) -> int:
    """Copy the page into the buffers, as far as they reach. Returns its length."""
    at = 0
    for buffer in into:
        part = page[at : at + len(buffer)]
        buffer[: len(part)] = part
        at += len(buffer)
    return len(page)


class MemoryStore(ExecutedStore):
    """One end. Pages move in threads of the executor; everything else is answered at once."""

    place_type: type[PagePlace] = PagePlace

    def __init__(self, context: Store.Context) -> None:
        self._path = context.options.path if context.options is not None else ""
        with _entering:
            self.place = _places.get(self._path) or self.place_type(context.buffer_size)
            if self._path:
                _places[self._path] = self.place
            self.place.ends.add(self)
        super().__init__(self.place, name="memory", seal=context.seal, timeout_s=context.timeout_s)

    def _lookup(self, keys: Sequence[bytes], lease_s: float, timeout: Timeout) -> Job[Presence]:
        job: Job[Presence] = Job(len(keys), self._deadline(timeout))
        self._jobs.check_open()
        job.set(self.place.lookup(self, keys, lease_s))
        return job

    def declare(self, series: Series, keys: Sequence[bytes], *, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        for_s = self._deadline(timeout).remaining()
        self._jobs.check_open()
        self.place.declare(self, series.id, keys, _FOR_EVER_S if for_s is None else for_s)

    def withdraw(self, keys: Sequence[bytes]) -> None:
        self._jobs.check_open()
        self.place.withdraw(self, keys)

    def release(self, keys: Sequence[bytes]) -> None:
        self._jobs.check_open()
        self.place.release(self, keys)

    @property
    def has_events(self) -> bool:
        return True

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._jobs.check_open()
        return self.place.subscribe(listener)

    def _abort(self) -> None:
        super()._abort()
        with _entering:
            self.place.leave(self)
            if not self.place.ends and _places.get(self._path) is self.place:
                del _places[self._path]
