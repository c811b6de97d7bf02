"""A store that cannot be reached: misses, and it is tried again."""

from __future__ import annotations

import time

from kvplug.transport import MissReason, Presence, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.deadlines import SLACK_S, is_late, submits
from kvplug_testing.contract.store.pages import Batch
from kvplug_testing.contract.store.suite import SOON_S, StoreSuite, ended, got, got_or_missed, kept, missed
from kvplug_testing.waits import Call, until

GONE = {MissReason.STORE_GONE, MissReason.TIMEOUT}


class Gone(StoreSuite):
    """The store, or the process that serves it, goes away."""

    @law("STORE-7")
    def test_a_store_that_is_gone_is_a_miss_and_is_used_again_when_it_is_back(self) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        with self.going_away(store):
            for _ in range(3):
                self._is_missed(store, pages)
        more = self.batch(store, 3)
        until(lambda: _kept(store, more), what="that the store is tried again")
        got(store, more)

    @law("STORE-7")
    def test_while_it_is_gone_requests_end_at_once(self) -> None:
        store = self.hold()
        pages = self.batch(store, 1)
        with self.going_away(store):
            self._is_missed(store, pages)
            begun = time.monotonic()
            for _ in range(200):
                assert ended(store.submit_get(pages.empty())) == [MissReason.STORE_GONE]
            assert time.monotonic() - begun < 10 * SLACK_S, "each request waits for a store that is gone"

    @law("STORE-7", "STORE-3", needs="served_by_processes", timeout_s=120)
    def test_jobs_end_by_their_deadlines_while_the_stores_process_is_stopped(self) -> None:
        place = self.place()
        holder = self.remote_first(place)
        store = self.other(place)
        pages = self.batch(store, 3)
        kept(store, pages)
        holder.stop()
        for name, submit in submits(store, pages, SOON_S).items():
            begun = time.monotonic()
            call = Call(submit).end(SLACK_S)
            assert call.error is None, f"{name} raised {call.error!r}"
            results = ended(call.value)
            took = time.monotonic() - begun
            assert took < SOON_S + SLACK_S, f"{name} took {took:.2f} s, its deadline was at {SOON_S} s"
            # pages that are held need not be put again, and memory of the store may be read without it
            known = name in ("submit_put", "submit_get") and not results.count(MissReason.STORE_GONE)
            assert known or is_late(name, results), f"{name} gave {results}, and the process is stopped"
        assert not store.is_lost, "a store that is stopped was taken for dead"
        holder.cont()
        until(lambda: _kept(store, pages), what="that the store answers again")
        got(store, pages)

    @law("STORE-7", "ALL-2", needs="served_by_processes", timeout_s=120)
    def test_requests_to_a_store_whose_process_is_killed_are_misses(self) -> None:
        place = self.place()
        holder = self.remote_first(place)
        store = self.other(place)
        pages = self.batch(store, 3)
        kept(store, pages)
        got(store, pages)
        holder.kill()
        results = got_or_missed(store, pages)  # memory of the store may outlive it for a moment
        assert set(results) <= {None, *GONE}
        until(lambda: store.is_lost, what="that the end knows that its store is gone for good")
        self._is_missed(store, pages)
        Call(store.close).result()

    @law("STORE-7", "ALL-2", needs="served_by_processes", timeout_s=120)
    def test_requests_that_wait_for_a_store_that_is_killed_end(self) -> None:
        place = self.place()
        holder = self.remote_first(place)
        store = self.other(place)
        pages = self.batch(store, 3)
        kept(store, pages)
        holder.stop()
        jobs = [submit() for submit in submits(store, pages, None).values()]
        holder.kill()
        for job in jobs:
            ended(job)
        Call(store.abort).result()

    @property
    def served_by_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if not self._by_link:
            return f"no other process serves the pages of {self.called}"
        return self.other_and_forked_processes

    def _is_missed(self, store: Store, pages: Batch) -> None:
        missed(store, pages, *GONE)
        assert {*ended(store.submit_lookup(pages.keys))} <= {Presence.ABSENT, Presence.HELD}
        results = ended(store.submit_put(self.batch(store, 2).filled(), timeout=waits.patience_s))
        assert set(results) <= {PutReason.STORE_GONE, PutReason.TIMEOUT}, f"a put gave {results}"
        assert ended(store.submit_remove(pages.keys)) == [False] * len(pages)


def _kept(store: Store, pages: Batch) -> bool:
    return ended(store.submit_put(pages.filled())) == [None] * len(pages)  # type: ignore[no-any-return]
