"""A store that cannot be reached: misses, and it is tried again."""

from __future__ import annotations

import time

from kvplug.transport import MissReason, Store
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.deadlines import SLACK_S, check_timed_out, submits
from kvplug_testing.contract.store.pages import Batch
from kvplug_testing.contract.store.suite import StoreSuite, ended, got, is_missed, kept, put
from kvplug_testing.waits import Call, until


class Gone(StoreSuite):
    """The store, or the process that serves it, goes away."""

    @law("STORE-7")
    def test_a_store_that_is_gone_is_a_miss_at_once_and_is_used_again_when_it_is_back(self) -> None:
        store = self.hold()
        pages, more = self.batch(store, 3), self.batch(store, 3)
        kept(store, pages)
        with self.going_away(store):
            for _ in range(3):
                is_missed(store, pages, more)
            begun = time.monotonic()
            for _ in range(200):
                assert ended(store.submit_get(pages.empty())) == [MissReason.STORE_GONE] * 3
            assert time.monotonic() - begun < 10 * SLACK_S, "each request waits for a store that is gone"
        until(lambda: _kept(store, more), what="that the store is tried again")
        got(store, more)

    @law("STORE-7", "STORE-3", needs="served_by_processes", timeout_s=120)
    def test_jobs_end_by_their_deadlines_while_the_stores_process_is_stopped(self) -> None:
        place = self.place()
        holder = self.remote_first(place)
        store = self.other(place)
        pages = self.batch(store, 3)
        kept(store, pages)
        holder.stop()
        # pages that are held need not be put again, and memory of the store may be read without it
        check_timed_out(store, pages, known=("submit_put", "submit_get"))
        assert not store.is_lost, "a store that is stopped was taken for dead"
        holder.cont()
        until(lambda: _kept(store, pages), what="that the store answers again")
        got(store, pages)

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
        if not self.by_link:
            return f"no other process serves the pages of {self.called}"
        return self.other_and_forked_processes


def _kept(store: Store, pages: Batch) -> bool:
    return put(store, pages) == [None] * len(pages)
