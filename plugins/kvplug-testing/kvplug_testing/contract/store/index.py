"""What is there and what is to come: keys, events, declared pages, and pages that are removed.

Random calls are compared with a dict by :mod:`machine`; here is what takes time, or several ends.
"""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

from kvplug import UnsupportedError
from kvplug.transport import PageEvent, Presence, Series, Store
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.calls import ended, got, held, kept, looked_up, missed, put, remove
from kvplug_testing.contract.store.pages import Batch, held_request, sized_format
from kvplug_testing.contract.store.suite import StoreSuite
from kvplug_testing.waits import Call, until

ABSENT, COMING = Presence.ABSENT, Presence.COMING


class Index:
    """An index made of events, as by a listener: the keys of each series."""

    def __init__(self) -> None:
        self._follower = PageEvent.Follower()
        self._known: dict[bytes, dict[bytes, Presence]] = defaultdict(dict)
        self.events: list[PageEvent] = []
        self._faults: list[str] = []

    def __call__(self, event: PageEvent) -> None:
        self.events.append(event)
        if not self._follower.accept(event):
            self._faults.append(f"{event} is not the next event")
        match event.kind:
            case "snapshot" | "cleared":
                self._known.clear()
            case "stored":
                known = self._known[event.series]
                if any(known.get(key) is Presence.HELD for key in event.keys):
                    self._faults.append(f"{event} is of pages that were there")
                known.update(dict.fromkeys(event.keys, Presence.HELD))
            case "declared":
                self._known[event.series].update(dict.fromkeys(event.keys, COMING))
            case "removed":
                for key in event.keys:
                    self._known[event.series].pop(key, None)

    def has_only(self, series: Series, held: set[bytes], coming: set[bytes]) -> bool:
        """Whether these are the keys of a series, and no others."""
        right = dict.fromkeys(held, Presence.HELD) | dict.fromkeys(coming, COMING)
        return self._known[series.id] == right

    def check(self) -> None:
        """Raises AssertionError: an event was missing, twice there, or out of order."""
        assert not self._faults, "; ".join(self._faults)
        assert self._follower.ready, "the snapshot is not whole"

    def removals(self, key: bytes) -> list[PageEvent.Removal]:
        """Why a key was removed, each time."""
        removed = [event for event in self.events if event.kind == "removed"]
        return [event.reason for event in removed if key in event.keys]


class WhatIsThere(StoreSuite):
    """Events, declared pages, removals."""

    def _listen(self, store: Store) -> Index:
        if not store.has_events:
            Call(lambda: store.subscribe(Index())).raised(UnsupportedError)
            pytest.skip(f"{self.called} has no events")
        index = Index()
        self.later(store.subscribe(index))
        return index

    def _follows(self, store: Store, index: Index, series: Series) -> None:
        """An index may be a moment behind; then it has the keys that the store has."""
        until(
            lambda: index.has_only(series, {*store.keys(series)}, set()),
            within=5,
            what="that an index made of events has the keys that the store has",
        )
        index.check()

    @law("STORE-10", "STORE-6")
    def test_listeners_that_come_while_pages_come_and_go_miss_nothing(self) -> None:
        store, another_life = self.hold(self.budget_bytes), self.hold()
        indices, gone = [self._listen(store)], Index()
        leave = store.subscribe(gone)
        batches = [self.batch(store, 8, sized_format(self.budget_bytes // 60)) for _ in range(31)]

        def work() -> None:
            for number, pages in enumerate(batches[1:]):
                put(store, pages)
                if number % 3 == 0:
                    remove(store, pages.keys[:4])

        working = Call(work)
        while not working.ended and len(indices) < 200:
            indices.append(self._listen(store))
        working.result(60)
        for index in [gone, *indices]:
            self._follows(store, index, batches[0].series)
        removed = [event for event in gone.events if event.kind == "removed"]
        assert {event.reason for event in removed} == {PageEvent.Removal.EVICTED, PageEvent.Removal.REMOVED}
        leave()
        leave()
        count = len(gone.events)
        put(store, batches[0])
        self._follows(store, indices[0], batches[0].series)
        assert len(gone.events) == count, "a listener that had left was called"
        newer = self._listen(another_life)
        until(lambda: newer.events, within=5, what="the events of another life")
        assert newer.events[0].epoch != gone.events[0].epoch

    # -- declared pages ------------------------------------------------------------------------

    def _ends(self, end: str) -> tuple[Store, Store, Batch]:
        """The end that declares, the one that looks up, and pages."""
        first, other = self.first_and(end)
        for each in (first, other):
            self.must(each, "declare")
        return first, other, self.batch(first, 3)

    def _becomes(self, store: Store, pages: Batch, *wanted: Presence) -> None:
        """An end may learn of it a moment later."""
        until(lambda: looked_up(store, pages.keys) == [*wanted], within=5, what=f"{[*wanted]} of the store")

    @law("STORE-8", "STORE-3", "STORE-10")
    def test_a_declared_page_whose_time_is_over_is_absent(self, end: str) -> None:
        first, other, pages = self._ends(end)
        indices = [self._listen(first)] if first.has_events else []
        begun = time.monotonic()
        for at, timeout in ((0, 0.4), (1, 60.0), (2, 0.3), (2, 60.0)):  # the last is declared again
            first.declare(pages.series, pages.keys[at : at + 1], timeout=timeout)
        indices += [self._listen(first)] if first.has_events else []
        self._becomes(other, pages, COMING, COMING, COMING)
        self._becomes(other, pages[:1], ABSENT)
        assert time.monotonic() - begun >= 0.35, "its time was not over"
        time.sleep(0.1)
        assert looked_up(other, pages.keys) == [ABSENT, COMING, COMING]
        first.withdraw(pages.keys[1:2])
        for index in indices:
            until(lambda index=index: index.removals(pages.keys[1]))  # type: ignore[misc]
            assert [index.removals(key) for key in pages.keys] == [
                [PageEvent.Removal.EXPIRED],
                [PageEvent.Removal.WITHDRAWN],
                [],
            ]

    @law("STORE-8")
    def test_what_an_end_that_is_closed_has_declared_is_absent(self) -> None:
        first, other, pages = self._ends("other")
        other.declare(pages.series, pages.keys, timeout=60)
        self._becomes(first, pages, COMING, COMING, COMING)
        Call(other.close).result()
        self._becomes(first, pages, ABSENT, ABSENT, ABSENT)

    # -- removing ------------------------------------------------------------------------------

    @law("STORE-9")
    @pytest.mark.parametrize("queued", [False, True])
    def test_a_put_under_way_does_not_bring_back_what_is_removed(self, end: str, queued: bool) -> None:
        first, store, pages = self.with_pages(end)
        if ended(store.submit_remove(pages.keys)) != [True] * 3:
            assert all(held(store, pages)), "a removal failed, and the page is gone"
            pytest.skip(f"{self.called} cannot remove pages")
        before, blocker = held_request(self.batch(first, 1), filled=True)
        request, memory = held_request(pages, filled=True)
        jobs = [store.submit_put(each) for each in ([before] if queued else []) + [request]]
        if not queued:
            memory.wait_begun()
        removing = store.submit_remove(pages.keys[:2])
        blocker.go_on.set()
        memory.go_on.set()
        assert ended(removing) == [True, True]
        assert ended(jobs[-1])[0] is not None, "a page that was removed while it was put counts as kept"
        for end_ in (first, store):
            missed(end_, pages[:1])
        got(store, pages[2:])
        kept(store, pages)
        got(first, pages)
