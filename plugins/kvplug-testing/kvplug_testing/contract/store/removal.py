"""Forgetting pages: those that are there, those that are being put, and all."""

from __future__ import annotations

import pytest

from kvplug import UnsupportedError
from kvplug.transport import PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.held_memory import held_request
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    ended,
    forgotten,
    got,
    held,
    kept,
    missed,
)


class Removal(StoreSuite):
    """``submit_remove``."""

    def _removes(self, store: Store) -> None:
        """Skip the test if the store cannot remove pages."""
        pages = self.batch(store, 1)
        kept(store, pages)
        if ended(store.submit_remove(pages.keys)) != [True]:
            assert held(store, pages) == [True], "a removal failed, and the page is gone"
            pytest.skip(f"{self.called} cannot remove pages")

    @law("STORE-9")
    @at_both_ends
    def test_pages_that_were_removed_are_absent_and_can_be_put_again(self, end: str) -> None:
        first, store = self.first_and(end)
        self._removes(first)
        pages = self.batch(first, 6)
        kept(first, pages)
        forgotten(store, pages.keys[:3])
        forgotten(store, pages.keys[:3])
        for end_ in (first, store):
            assert held(end_, pages) == [False] * 3 + [True] * 3
            missed(end_, pages[:3])
            got(end_, pages[3:])
        again = pages.with_bits_of("another computation")
        kept(store, again[:3])
        got(first, again[:3])

    @law("STORE-9")
    @at_both_ends
    def test_a_put_under_way_does_not_bring_back_what_is_removed(self, end: str) -> None:
        first, store = self.first_and(end)
        self._removes(first)
        for queued in (False, True):
            pages = self.batch(first, 3)
            before, blocker = held_request(self.batch(first, 1), filled=True)
            request, memory = held_request(pages, at=0, filled=True)
            jobs = [store.submit_put(before)] if queued else []
            putting = store.submit_put(request)
            if not queued:
                assert memory.began.wait(waits.patience_s)
            removing = store.submit_remove(pages.keys[:2])
            blocker.go_on.set()
            memory.go_on.set()
            assert ended(removing) == [True, True]
            results = ended(putting)
            for job in jobs:
                ended(job)
            if results[0] is None:
                raise AssertionError("a page that was removed while it was put counts as kept")
            assert isinstance(results[0], PutReason)
            for end_ in (first, store):
                assert held(end_, pages)[0] is False, "a put that had begun brought the page back"
                missed(end_, pages[:1])
            got(store, pages[2:])
            fresh = pages.with_bits_of("a later computation")
            kept(store, fresh[:1])
            got(first, fresh[:1])

    @law("STORE-9")
    def test_all_pages_can_be_forgotten_or_that_is_refused(self) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        request, memory = held_request(self.batch(store, 1), filled=True)
        with memory:
            putting = store.submit_put(request)
            memory.wait_begun()
            try:
                job = store.submit_remove(None)
            except UnsupportedError:
                got(store, pages)
                return
        assert ended(job) == [True]
        assert ended(putting) != [None], "a put that had begun counts as kept"
        missed(store, pages)
        assert not any(held(store, pages))
        assert store.usage().num_pages == 0
        kept(store, pages)
        got(store, pages)

    @law("STORE-9")
    def test_a_reader_that_has_begun_gets_its_pages_or_misses(self) -> None:
        store = self.hold()
        self._removes(store)
        pages = self.batch(store, 3)
        kept(store, pages)
        request, memory = held_request(pages, at=1)
        with memory:
            job = store.submit_get(request)
            memory.wait_begun()
            forgotten(store, pages.keys)
        results = ended(job)
        inner = pages.request(memory.inner)
        assert not (wrong := pages.unlike(inner, results)), wrong
        missed(store, pages)
