"""Whole or not at all: writers race, and writers are killed."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from kvplug.transport import MissReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.calls import ended, got, got_or_missed, held, kept, missed
from kvplug_testing.contract.store.ends import StoreGeneral, pages_of
from kvplug_testing.contract.store.held_memory import held_request
from kvplug_testing.contract.store.pages import Batch, found, sized_format
from kvplug_testing.contract.store.suite import Place
from kvplug_testing.waits import Call

_PAGES = 8
_OPENERS = 4
"""Threads that open one place at once."""
_OPENINGS = 5
"""Places that they open, one after the other."""
_KILLS = 8


class Writers(StoreGeneral):
    """Puts that race, and writers that die."""

    @law("STORE-2")
    def test_of_two_writers_with_different_bits_one_wins_wholly(self, end: str) -> None:
        first, store = self.first_and(end)
        for _ in range(10):
            pages = self.batch(first, _PAGES, sized_format(30_000))
            writers = [pages.with_bits_of(seed) for seed in (1, 2)]
            requests = [writer.filled() for writer in writers]
            jobs = [end_.submit_put(each) for end_, each in zip((first, store), requests, strict=True)]
            for job in jobs:
                assert ended(job) == [None] * _PAGES
            seen = _contents(first, pages)
            assert seen == _contents(store, pages) == _contents(first, pages), "a page changed"
            for page, *written in zip(seen, *(writer.contents for writer in writers), strict=True):
                assert page in written, "a page is a mixture of two"

    @law("STORE-2")
    def test_ends_that_are_opened_at_once_in_several_threads_share_their_pages(self) -> None:
        if self.one_end:
            pytest.skip(self.one_end)

        def opened(place: Place, gate: threading.Barrier) -> tuple[Store, Batch]:
            gate.wait(waits.patience_s)
            store = self.other(place)
            pages = self.batch(store, 1)
            kept(store, pages)
            return store, pages

        for _ in range(_OPENINGS):
            with self.scope():
                place, gate = self.place(), threading.Barrier(_OPENERS)
                if self.by_link:
                    self.open(place)
                    self.make_reachable(place)
                calls = [Call(partial(opened, place, gate)) for _ in range(_OPENERS)]
                errors = [call.end().error for call in calls]
                assert not any(errors), f"an end that was opened with others at once fails: {errors}"
                there = [call.value for call in calls]
                for store, _ in there:
                    for _, pages in there:
                        got(store, pages)

    @law("STORE-2", "STORE-3")
    @pytest.mark.parametrize("cancelled", [False, True])
    def test_a_page_is_not_visible_before_it_is_whole(self, end: str, cancelled: bool) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3, sized_format(50_000))
        request, memory = held_request(pages, at=1, filled=True)
        with memory:
            job = (store if cancelled else first).submit_put(request)
            memory.wait_begun()
            if cancelled:
                Call(job.cancel).result()
                assert ended(job)[1] is not None
            else:
                assert held(store, pages)[1] is False, "a page that is being put is held already"
                missed(store, pages[1:2])
                got_or_missed(store, pages)
        assert cancelled or ended(job) == [None] * 3
        assert job.wait_settled(waits.patience_s)
        for end_ in (first, store):
            got_or_missed(end_, pages)
        kept(first, pages)
        got(store, pages)

    @law("STORE-2", "ALL-5", needs="other_and_forked_processes", timeout_s=300)
    def test_writers_that_are_killed_at_any_point_leave_whole_pages(self) -> None:
        place = self.place()
        store = self.open(place)
        for turn in range(_KILLS):
            writer, names = self.beside(place), [b"killed %d, put %d" % (turn, at) for at in range(3)]
            for name in names[:2]:
                writer.run("put", name)
            writer.begin("put", names[2])
            time.sleep(0.002 * turn)
            writer.child.kill()
            for name in names:
                pages = pages_of(store, name)
                if name == names[2]:
                    assert {*got_or_missed(store, pages)} <= {None, MissReason.ABSENT}
                    kept(store, pages)
                got(store, pages)
        if self.spec is not None and self.spec.persistent:
            Call(store.close).result()
            got(self.open(place), pages)


def _contents(store: Store, pages: Batch) -> list[bytes]:
    """The bytes of pages that are there."""
    request = pages.empty()
    assert ended(store.submit_get(request)) == [None] * len(pages)
    return found(request)
