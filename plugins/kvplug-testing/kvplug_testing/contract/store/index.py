"""What is there: keys, usage, and indices that are made of events."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvplug import UnsupportedError
from kvplug.transport import (
    PageEvent,
    PageFollower,
    PageRemoval,
    PagesCleared,
    PagesDeclared,
    PagesRemoved,
    PagesSnapshot,
    PagesStored,
    Presence,
    Store,
)
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import Batch, kv_format, sized_format
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    forgotten,
    kept,
    looked_up,
    put,
)
from kvplug_testing.waits import Call, until


class Index:
    """What a listener knows: the held and the expected keys of each series."""

    def __init__(self) -> None:
        self._follower = PageFollower()
        self._lock = threading.Lock()
        self.held: dict[bytes, set[bytes]] = {}
        self.coming: dict[bytes, set[bytes]] = {}
        self.events: list[PageEvent] = []
        self.faults: list[str] = []

    def __call__(self, event: PageEvent) -> None:
        if not self._lock.acquire(blocking=False):
            self.faults.append("two events came at the same time")
            return
        try:
            self._apply(event)
        finally:
            self._lock.release()

    def _apply(self, event: PageEvent) -> None:
        self.events.append(event)
        if not self._follower.accept(event):
            self.faults.append(f"{event} is not the next event")
        match event:
            case PagesSnapshot():
                self.held, self.coming = {}, {}
            case PagesCleared():
                self.held, self.coming = {}, {}
            case PagesStored():
                self.held.setdefault(event.series, set()).update(event.keys)
                self.coming.get(event.series, set()).difference_update(event.keys)
            case PagesDeclared():
                self.coming.setdefault(event.series, set()).update(event.keys)
            case PagesRemoved():
                for known in (self.held, self.coming):
                    known.get(event.series, set()).difference_update(event.keys)

    def check(self) -> None:
        """Raises AssertionError: an event was missing, twice there, or out of order."""
        assert not self.faults, "; ".join(self.faults)
        assert self._follower.ready, "the snapshot is not whole"

    def removals(self, key: bytes) -> list[PageRemoval]:
        """Why a key was removed, each time."""
        return [
            event.reason for event in self.events if isinstance(event, PagesRemoved) and key in event.keys
        ]


class WhatIsThere(StoreSuite):
    """Keys, usage, events."""

    def _keys(self, store: Store, pages: Batch) -> set[bytes]:
        found = Call(lambda: store.keys(pages.series)).result()
        assert len(found) == len(set(found)), "a key comes twice"
        return set(found)

    @law("STORE-10")
    @at_both_ends
    def test_keys_are_those_of_the_series_that_are_held(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 5)
        other = self.batch(first, 3, kv_format(3))
        shard = self.batch(first, 2, shard=b"1 of 2")
        try:
            before = self._keys(store, pages)
        except UnsupportedError:
            return
        kept(first, pages)
        kept(first, other)
        assert self._keys(store, pages) - before == set(pages.keys)
        assert self._keys(store, other) >= set(other.keys)
        assert not self._keys(store, other) & set(pages.keys)
        assert not self._keys(store, shard) & {*pages.keys, *other.keys}
        forgotten(first, pages.keys[:2])
        assert self._keys(store, pages) - before == set(pages.keys[2:])

    @law("STORE-10")
    def test_usage_counts_pages_and_their_bytes(self) -> None:
        store = self.hold()
        self.must(store, "usage")
        before = store.usage()
        pages = self.batch(store, 10, sized_format(10_000))
        kept(store, pages)
        usage = store.usage()
        assert usage.num_pages - before.num_pages == 10
        assert usage.used_bytes - before.used_bytes >= 100_000
        kept(store, pages)
        assert store.usage().num_pages == usage.num_pages, "a page that is there already is counted twice"

    # -- events ----------------------------------------------------------------------------------

    @property
    def _events(self) -> tuple[Store, Index]:
        store = self.hold()
        self._needs_events(store)
        index = Index()
        self.later(Call(lambda: store.subscribe(index)).result())
        return store, index

    def _needs_events(self, store: Store) -> None:
        if not store.has_events:
            pytest.skip(f"{self.called} has no events")

    @law("STORE-10")
    def test_a_store_without_events_refuses_listeners(self) -> None:
        store = self.hold()
        if store.has_events:
            self.later(store.subscribe(Index()))
            return
        Call(lambda: store.subscribe(Index())).raised(UnsupportedError)

    @law("STORE-10")
    def test_a_listener_gets_a_snapshot_and_then_every_change(self) -> None:
        store = self.hold()
        self._needs_events(store)
        pages, more = self.batch(store, 5), self.batch(store, 3, kv_format(3))
        kept(store, pages)
        index = Index()
        self.later(store.subscribe(index))
        self._follows(store, index, pages)
        assert index.held.get(pages.series.id) == set(pages.keys)
        kept(store, more)
        forgotten(store, pages.keys[:2])
        self._follows(store, index, pages, more)
        assert index.held[more.series.id] == set(more.keys)
        assert index.removals(pages.keys[0]) == [PageRemoval.REMOVED]

    @law("STORE-10")
    def test_a_page_that_is_put_again_is_no_second_event(self) -> None:
        store, index = self._events
        pages = self.batch(store, 3)
        kept(store, pages)
        kept(store, pages)
        self._follows(store, index, pages)
        stored = [key for event in index.events if isinstance(event, PagesStored) for key in event.keys]
        assert sorted(stored) == sorted(pages.keys)

    @law("STORE-10", "STORE-6")
    def test_evicted_pages_are_told(self) -> None:
        store = self.hold(self.budget_bytes)
        self._needs_events(store)
        index = Index()
        self.later(store.subscribe(index))
        batches = [self.batch(store, 4, sized_format(self.budget_bytes // 24)) for _ in range(16)]
        for pages in batches:
            put(store, pages)
        self._follows(store, index, *batches)
        evicted = [event for event in index.events if isinstance(event, PagesRemoved)]
        assert evicted
        assert {event.reason for event in evicted} == {PageRemoval.EVICTED}

    @law("STORE-10", "STORE-8")
    def test_declared_pages_are_told_and_what_becomes_of_them(self) -> None:
        store, index = self._events
        self.must(store, "declare")
        pages = self.batch(store, 4)
        store.declare(pages.series, pages.keys[:1], timeout=0.3)
        store.declare(pages.series, pages.keys[1:], timeout=60)
        late = Index()
        self.later(store.subscribe(late))
        until(lambda: index.coming.get(pages.series.id), what="an event of the declared pages")
        kept(store, pages[1:2])
        store.withdraw(pages.keys[2:3])
        until(lambda: index.removals(pages.keys[0]), within=5, what="an event of the page whose time is over")
        for each in (index, late):
            self._follows(store, each, pages)
            until(lambda each=each: each.coming.get(pages.series.id) == {pages.keys[3]})  # type: ignore[misc]
            assert each.removals(pages.keys[0]) == [PageRemoval.EXPIRED]
            assert each.removals(pages.keys[2]) == [PageRemoval.WITHDRAWN]
            assert not each.removals(pages.keys[1])
        assert looked_up(store, pages.keys[3:]) == [Presence.COMING]

    @law("STORE-10")
    def test_a_subscription_that_was_ended_gets_nothing_more(self) -> None:
        store = self.hold()
        self._needs_events(store)
        gone, stays = Index(), Index()
        end = store.subscribe(gone)
        self.later(store.subscribe(stays))
        pages = self.batch(store, 2)
        kept(store, pages)
        self._follows(store, gone, pages)
        end()
        end()
        count = len(gone.events)
        more = self.batch(store, 2)
        kept(store, more)
        self._follows(store, stays, pages, more)
        assert len(gone.events) == count, "a listener that had ended its subscription was called"

    @law("STORE-10", level="long")
    def test_listeners_that_come_while_pages_come_and_go_miss_nothing(self) -> None:
        store = self.hold(self.budget_bytes)
        self._needs_events(store)
        form = sized_format(self.budget_bytes // 60)
        batches = [self.batch(store, 8, form) for _ in range(30)]
        indices: list[Index] = []

        def work() -> None:
            for number, pages in enumerate(batches):
                put(store, pages)
                if number % 3 == 0:
                    forgotten(store, pages.keys[:4])

        working = Call(work)
        while not working.ended:
            index = Index()
            indices.append(index)
            self.later(store.subscribe(index))
            if len(indices) > 200:
                working.end(60)
        working.result(60)
        for index in indices:
            self._follows(store, index, *batches)

    @law("STORE-10", "STORE-9")
    def test_a_store_that_forgets_everything_tells_so(self) -> None:
        store, index = self._events
        pages = self.batch(store, 3)
        kept(store, pages)
        try:
            assert store.submit_remove(None).wait(20) == [True]
        except UnsupportedError:
            return
        self._follows(store, index, pages)
        assert not any(index.held.values())

    @law("STORE-10")
    def test_each_life_of_a_store_has_an_epoch_of_its_own(self) -> None:
        epochs = set()
        for _ in range(3):
            store = self.hold()
            self._needs_events(store)
            index = Index()
            self.later(store.subscribe(index))
            until(lambda index=index: index.events)  # type: ignore[misc]
            epochs.add(index.events[0].epoch)
        assert len(epochs) == 3

    def _follows(self, store: Store, index: Index, *batches: Batch) -> None:
        """An index may be a moment behind; then it has the keys that the store has."""

        def equal() -> Any:
            return all(
                index.held.get(pages.series.id, set()) == self._keys(store, pages) for pages in batches
            )

        until(equal, within=5, what="that an index made of events has the keys that the store has")
        index.check()
