"""How ends end while jobs are under way and others go on, and what they leave at the store."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kvplug import UnsupportedError
from kvplug.transport import Job, MissReason, PutReason
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import CLOSE_S
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.contract.store.deadlines import SLACK_S
from kvplug_testing.contract.store.ends import StoreGeneral
from kvplug_testing.contract.store.held_memory import HeldMemory, held_request
from kvplug_testing.contract.store.pages import MIB, sized_format
from kvplug_testing.contract.store.suite import at_both_ends, ended, got, got_or_missed, kept, put
from kvplug_testing.contract.store.writers import put_without_end
from kvplug_testing.waits import Call, until

at_once_and_politely = pytest.mark.parametrize("verb", ["close", "abort"])


class Endings(StoreGeneral):
    """What the general laws do not show."""

    @law("ALL-1", "ALL-5")
    @at_both_ends
    def test_closing_finishes_puts_and_ends_other_jobs(self, end: str) -> None:
        first, store = self.first_and(end)
        there, coming = self.batch(first, 3), self.batch(first, 3)
        kept(first, there)
        getting, reading = held_request(there)
        putting, writing = held_request(coming, at=1, filled=True)
        with reading, writing:
            get, job = store.submit_get(getting), store.submit_put(putting)
            until(lambda: reading.began.is_set() or writing.began.is_set())
            closing = Call(lambda: store.close(timeout=waits.patience_s))
            assert ended(get)[0] is MissReason.CLOSED
            assert not job.done, "a put that had begun was not finished"
            reading.go_on.set()
            assert closing.is_blocked(0.1), "it did not wait for a put that had begun"
        assert ended(job) == [None] * 3
        closing.result()
        if end == "other":
            got(first, coming)

    @law("ALL-1", "ALL-5")
    @at_both_ends
    def test_aborting_ends_every_job_at_once(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        memories: list[HeldMemory] = []
        jobs: list[Job[Any]] = []
        with ExitStack() as stack:
            for _ in range(3):
                getting, reading = held_request(pages)
                putting, writing = held_request(self.batch(first, 3), filled=True)
                memories += [stack.enter_context(reading), stack.enter_context(writing)]
                jobs += [store.submit_get(getting), store.submit_put(putting)]
            until(lambda: any(memory.began.is_set() for memory in memories), what="that a copy begins")
            aborting = Call(store.abort)
            begun = time.monotonic()
            for job in jobs:
                assert {*ended(job)} <= {None, MissReason.CLOSED, PutReason.CLOSED}
            assert time.monotonic() - begun < SLACK_S
        aborting.result()
        for job in jobs:
            assert job.wait_settled(waits.patience_s), "the memory of a job is still in use"

    @law("ALL-1", "ALL-5", "STORE-3")
    @at_once_and_politely
    def test_jobs_end_while_the_store_does_not_answer(self, verb: str) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        with self.holding_up(store):
            jobs: list[Job[Any]] = [
                store.submit_get(pages.empty()),
                store.submit_lookup(pages.keys),
                store.submit_remove(pages.keys),
                store.submit_put(self.batch(store, 2).filled()),
            ]
            ending = Call(partial(store.close, CLOSE_S) if verb == "close" else store.abort)
            for job in jobs:
                ended(job)
            assert jobs[0].results() == [MissReason.CLOSED] * 3
        ending.result()

    @law("ALL-1", "STORE-7")
    @at_once_and_politely
    def test_the_end_of_one_end_disturbs_no_other(self, verb: str) -> None:
        place = self.place()
        first = self.open(place)
        one, other = self.other(place), self.other(place)
        pages, more = self.batch(first, 3), self.batch(first, 3)
        kept(one, pages)
        Call(getattr(one, verb)).result()
        for store in (other, first):
            got(store, pages)
        kept(other, more)
        got(first, more)
        Call(getattr(first, verb)).result()
        got_or_missed(other, pages)
        put(other, self.batch(other, 1))
        Call(other.close).result()

    @law("ALL-1", "ALL-2")
    @pytest.mark.parametrize("ends", ["the store", "the peer"])
    def test_serving_ends_with_the_store_and_with_its_peer(self, ends: str) -> None:
        place = self.place()
        first = self.open(place)
        if not self.can(first, "serve"):
            Call(lambda: first.serve(None)).raised(UnsupportedError)  # type: ignore[arg-type]
            return
        if self.way(place) == "options":
            pytest.skip(f"other ends of {self.called} are opened by options, and are not served")
        serve, begun, over = first.serve, threading.Event(), threading.Event()

        def watched(link: Any) -> None:
            begun.set()
            try:
                serve(link)
            finally:
                over.set()

        first.serve = watched  # type: ignore[method-assign]
        store = self.other(place)
        assert begun.wait(waits.patience_s)
        kept(store, self.batch(store, 1))
        assert not over.is_set()
        Call((first if ends == "the store" else store).close).result()
        assert over.wait(waits.patience_s), f"{ends} has ended, and it is still served"

    @law("ALL-6", needs="forked_processes")
    @at_both_ends
    def test_in_a_forked_child_jobs_under_way_have_ended_and_the_parents_go_on(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 2)
        kept(store, pages)
        request, memory = held_request(pages)
        with memory:
            job = store.submit_get(request)
            memory.wait_begun()

            def look() -> str:
                results = job.results()
                is_over = job.settled and results is not None and results[0] is MissReason.CLOSED
                return "" if is_over else f"a job of the parent's says {results} in the child"

            assert not (wrong := in_forked_child(look)), wrong
            assert not job.done
        assert ended(job) == [None] * 2

    @law("ALL-7")
    def test_other_ends_that_come_and_go_leave_nothing_at_the_first(self) -> None:
        place = self.place(64 * MIB)
        first = self.open(place)
        pages = self.batch(first, 4, sized_format(50_000))
        kept(first, pages)
        self.make_reachable(place)

        def one(number: int) -> None:
            with self.scope():
                store = self.other(place)
                got(store, pages)
                (store.close if number % 2 else store.abort)()

        self._leaves_nothing(one, 20, [])
        got(first, pages)

    @law("ALL-7", "ALL-2", needs="other_and_forked_processes", level="long", timeout_s=120)
    def test_ends_whose_processes_are_killed_leave_nothing_at_the_first(self) -> None:
        place = self.place(64 * MIB)
        first = self.open(place)
        kept(first, self.batch(first, 4))
        self.make_reachable(place)

        def one(_: int) -> None:
            with self.scope():
                child = self.remote(place, put_without_end, b"killed")
                assert child.recv(waits.patience_s) == "ready"
                child.kill()

        self._leaves_nothing(one, 5, [])

    @law("STORE-2", "STORE-3", "ALL-5")
    @at_both_ends
    def test_many_threads_use_one_end(self, end: str) -> None:
        first, store = self.first_and(end)
        batches = [self.batch(first, 4, sized_format(5_000)) for _ in range(6)]
        go = threading.Event()

        def work(number: int) -> None:
            go.wait(waits.patience_s)
            for turn in range(8):
                pages = batches[(number + turn) % len(batches)]
                kept(store, pages)
                got(store, pages)
                assert ended(store.submit_lookup(pages.keys)) == ["held"] * 4
                store.usage()

        calls = [Call(partial(work, number)) for number in range(6)]
        go.set()
        for call in calls:
            call.result(60)
