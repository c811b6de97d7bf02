"""Whole or not at all: the first put wins, writers race, and writers are killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvplug.transport import MissReason, Store
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.held_memory import held_request
from kvplug_testing.contract.store.pages import Batch, sized_format
from kvplug_testing.contract.store.suite import (
    Place,
    StoreSuite,
    at_both_ends,
    ended,
    got,
    got_or_missed,
    held,
    kept,
    missed,
    put,
)
from kvplug_testing.waits import Call

_PAGES = 8
_OPENERS = 4
"""Threads that open one place at once."""
_OPENINGS = 5
"""Places that they open, one after the other."""
_KILLS = 12
_KILLED = sized_format(100_000)
"""Of the pages whose writer is killed."""


def series_of_puts(suite: Any, store: Store, namespace: bytes) -> Iterator[Batch]:
    """Batches that are the same in every process."""
    for number in range(10_000):
        yield suite.batch(store, _PAGES, _KILLED, namespace=namespace + number.to_bytes(4, "little"))


def put_without_end(parent: peers.Parent, suite: Any, store: Store, namespace: bytes) -> None:
    """In another process: put one batch after the other, and report each that was kept."""
    parent.send("ready")
    for number, pages in enumerate(series_of_puts(suite, store, namespace)):
        if put(store, pages) == [None] * _PAGES:
            parent.send(number)


def put_half(parent: peers.Parent, suite: Any, store: Store, namespace: bytes) -> None:
    """In another process: stop in the middle of gathering a page, and wait to be killed."""
    pages = next(series_of_puts(suite, store, namespace))
    request, memory = held_request(pages, at=3, filled=True)
    store.submit_put(request)
    memory.wait_begun()
    parent.send("in the middle")
    parent.recv(None)


def put_when_told(parent: peers.Parent, suite: Any, store: Store, seed: int) -> None:
    """In another process: put the batches of the given names with bits of this writer."""
    parent.send("ready")
    while (name := parent.recv(None)) is not None:
        pages = suite.batch(store, _PAGES, sized_format(30_000), namespace=name).with_bits_of(seed)
        parent.send([str(reason) for reason in put(store, pages) if reason is not None])


class Writers(StoreSuite):
    """Puts that race, and writers that die."""

    @law("STORE-2")
    @at_both_ends
    def test_a_later_put_counts_as_kept_and_changes_nothing(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 5)
        kept(first, pages[:3])
        kept(store, pages.with_bits_of("another writer"))
        got(first, pages[:3])
        got(store, pages[:3])
        got(store, pages.with_bits_of("another writer")[3:])

    @law("STORE-2")
    @at_both_ends
    def test_of_two_writers_with_different_bits_one_wins_wholly(self, end: str) -> None:
        first, store = self.first_and(end)
        for number in range(10):
            pages = self.batch(first, _PAGES, sized_format(30_000))
            writers = [pages.with_bits_of(seed) for seed in ("one", "other")]
            requests = [writer.filled() for writer in writers]
            jobs = [end_.submit_put(each) for end_, each in zip((first, store), requests, strict=True)]
            for job in jobs:
                assert ended(job) == [None] * _PAGES, f"round {number}"
            winners = [_winner(end_, writers) for end_ in (first, store, first)]
            assert winners[0] == winners[1] == winners[2], f"a page changed: {winners}"

    @law("STORE-2", needs="other_and_forked_processes", timeout_s=120)
    def test_of_writers_in_two_processes_one_wins_wholly(self) -> None:
        place = self.place()
        store = self.open(place)
        children = [self.remote(place, put_when_told, seed) for seed in (1, 2)]
        for child in children:
            assert child.recv(waits.patience_s) == "ready"
        for number in range(10):
            name = b"race %d" % number
            for child in children:
                child.send(name)
            for child in children:
                assert child.recv(waits.patience_s) == [], "a put was not kept"
            pages = self.batch(store, _PAGES, sized_format(30_000), namespace=name)
            _winner(store, [pages.with_bits_of(seed) for seed in (1, 2)])

    @law("STORE-2")
    def test_ends_that_are_opened_at_once_in_several_threads_share_their_pages(self) -> None:
        usual = self.place()
        self.open(usual)
        is_served = self.way(usual) == "link"
        for _ in range(_OPENINGS):
            with self.scope():
                place = self.place()
                if is_served:
                    self.open(place)
                    self.make_reachable(place)
                opened = self._opened_at_once(place)
                for store, _ in opened:
                    for _, pages in opened:
                        got(store, pages)

    def _opened_at_once(self, place: Place) -> list[tuple[Store, Batch]]:
        """Several ends of the place, and a page that each has put."""
        gate = threading.Barrier(_OPENERS)

        def opened() -> tuple[Store, Batch]:
            gate.wait(waits.patience_s)
            store = self.other(place)
            pages = self.batch(store, 1)
            kept(store, pages)
            return store, pages

        calls = [Call(opened) for _ in range(_OPENERS)]
        for call in calls:
            error = call.end().error
            assert error is None, f"one of {_OPENERS} threads that open a place at once fails: {error!r}"
        return [call.value for call in calls]

    @law("STORE-2")
    @at_both_ends
    def test_a_page_is_not_visible_before_it_is_whole(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3, sized_format(50_000))
        request, memory = held_request(pages, at=1, filled=True)
        with memory:
            job = first.submit_put(request)
            memory.wait_begun()
            assert held(store, pages)[1] is False, "a page that is being put is held already"
            missed(store, pages[1:2])
            for end_ in (first, store):
                got_or_missed(end_, pages)
        assert ended(job) == [None] * 3
        got(store, pages)

    @law("STORE-2", "ALL-5", needs="other_and_forked_processes", timeout_s=120)
    def test_a_writer_that_is_killed_in_the_middle_of_a_page_leaves_no_part_of_it(self) -> None:
        place = self.place()
        store = self.open(place)
        namespace = b"killed in the middle"
        writer = self.remote(place, put_half, namespace)
        assert writer.recv(waits.patience_s) == "in the middle"
        pages = next(series_of_puts(self, store, namespace))
        writer.kill()
        results = got_or_missed(store, pages)
        assert results[3] is MissReason.ABSENT
        kept(store, pages)
        got(store, pages)

    @law("STORE-2", "ALL-5", level="long", needs="other_and_forked_processes", timeout_s=300)
    def test_writers_that_are_killed_at_any_point_leave_whole_pages(self) -> None:
        """Kill each a little later than the one before, over the time that one put takes."""
        place = self.place()
        store = self.open(place)
        self.make_reachable(place)
        one = self._time_of_a_put(store)
        for number in range(_KILLS):
            namespace = b"killed %d " % number
            with self.scope():
                writer = self.remote(place, put_without_end, namespace)
                assert writer.recv(waits.patience_s) == "ready"
                time.sleep(one * 3 * number / _KILLS)
                writer.kill()
                reported = -1
                with contextlib.suppress(Exception):  # what it sent before its death
                    while writer.poll(0.05):
                        reported = writer.recv(0.1)
            for index, pages in enumerate(series_of_puts(self, store, namespace)):
                if index <= reported:
                    got(store, pages)
                    continue
                results = got_or_missed(store, pages)
                wrong = [each for each in results if each not in (None, MissReason.ABSENT)]
                assert not wrong, f"writer {number} was killed, and pages of batch {index} are {wrong}"
                if index > reported + 1:
                    break
                kept(store, pages)
                got(store, pages)
            if number % 2:
                assert all(store.submit_remove(pages.keys).wait(waits.patience_s))

    def _time_of_a_put(self, store: Store) -> float:
        begun = time.monotonic()
        kept(store, self.batch(store, _PAGES, _KILLED))
        return min(time.monotonic() - begun, 1.0)

    @law("STORE-2", needs="other_and_forked_processes", timeout_s=120)
    def test_pages_that_outlive_their_store_are_found_by_the_next_one(self) -> None:
        if self.spec is None or not self.spec.persistent:
            pytest.skip(f"the spec of {self.called} does not say that its pages outlive their processes")
        place = self.place()
        store = self.open(place)
        pages = self.batch(store, 5)
        kept(store, pages)
        Call(store.close).result()
        writer = self.remote(attrs.evolve(place, first=None), put_without_end, b"outlives it")
        assert writer.recv(waits.patience_s) == "ready"
        assert writer.recv(waits.patience_s) == 0
        writer.kill()
        again = self.open(place)
        got(again, pages)
        got(again, next(series_of_puts(self, again, b"outlives it")))


def _winner(store: Store, writers: list[Batch]) -> list[int]:
    """Whose bits each page has; fails if it has a mixture of them, or is not there."""
    request = writers[0].empty()
    results = ended(store.submit_get(request))
    assert results == [None] * len(writers[0]), f"pages that both writers put were missed: {results}"
    rows = request.memory.rows()
    assert rows is not None
    winners = []
    for index in range(len(writers[0])):
        page = bytes(rows.row(index))
        whose = [number for number, writer in enumerate(writers) if writer.contents[index] == page]
        assert whose, f"page {index} is neither writer's"
        winners.append(whose[0])
    return winners
