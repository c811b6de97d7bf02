"""Time, and ends: jobs end by their deadlines and with their store, whatever is copied or does not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug.transport import Job, MissReason, PageRequest, Presence, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import CLOSE_S
from kvplug_testing.contract.store.calls import ended, got, is_missed, kept, put
from kvplug_testing.contract.store.ends import StoreGeneral
from kvplug_testing.contract.store.pages import Batch, found, held_request, sized_format
from kvplug_testing.contract.store.suite import SOON_S
from kvplug_testing.waits import Call, raises, until

_SLACK_S = 1.5
"""How much later than its deadline a job may end on a busy machine."""
_MANY = 50
"""Requests of each kind to a store that does not answer."""
_DUE = {"timeout": "TIMEOUT", "cancel": "CANCELLED", "close": "CLOSED", "abort": "CLOSED"}
"""The reason of a job that ends so."""


def _submits(store: Store, pages: Batch, into: PageRequest, timeout: float | None) -> list[Callable[[], Any]]:
    """All calls that make a job."""
    return [
        partial(store.submit_get, into, timeout=timeout),
        partial(store.submit_put, pages.filled(), timeout=timeout),
        partial(store.submit_lookup, pages.keys, timeout=timeout),
        partial(store.submit_remove, pages.keys, timeout=timeout),
    ]


def _check_ends(store: Store, pages: Batch, into: PageRequest, how: str) -> tuple[list[Job[Any]], Call]:
    """While the store does not answer, jobs end when they are due or cancelled, or with their store.

    Returns them, and the call that ends them.
    """
    submits = _submits(store, pages, into, SOON_S if how == "timeout" else 60.0)
    jobs = [Call(submit).result(5) for submit in submits * _MANY]
    begun = time.monotonic()
    ending: dict[str, Callable[[], Any]] = {
        "timeout": lambda: None,
        "cancel": lambda: [job.cancel() for job in jobs],
        "close": partial(store.close, CLOSE_S),
        "abort": store.abort,
    }
    call = Call(ending[how])
    # pages that are held need not be put again, and a removal cancels the puts before it
    allowed = {None, False, MissReason[_DUE[how]], MissReason.CANCELLED}
    for job in jobs:
        results = ended(job)
        assert time.monotonic() - begun < SOON_S + _SLACK_S, "a job ended late"
        wrong = {each for each in results if not isinstance(each, Presence)} - allowed
        assert not wrong, f"a job gave {wrong}, and the store does not answer"
    return jobs, call


def _works(store: Store, pages: Batch) -> bool:
    """Whether a put and a get succeed."""
    if put(store, pages) != [None] * len(pages):
        return False
    got(store, pages)
    return True


class Deadlines(StoreGeneral):
    """Jobs while the store does not answer or is gone, while a copy takes long, and at the end."""

    @law("STORE-3", "ALL-1", "ALL-4", "ALL-5")
    @pytest.mark.parametrize("how", _DUE)
    def test_jobs_of_a_store_that_does_not_answer_end_when_due_cancelled_or_closed(self, how: str) -> None:
        _, store, pages = self.with_pages("first", 30)
        into = pages.empty()
        with self.holding_up(store):
            jobs, ending = _check_ends(store, pages, into, how)
            if how in ("timeout", "cancel"):
                assert jobs[0].wait_settled(waits.patience_s), "it does not settle, and nothing is copied"
            left = found(into)
        ending.result()
        assert all(job.wait_settled(waits.patience_s) for job in jobs), "the memory of a job is still in use"
        if how in ("timeout", "cancel"):
            until(lambda: _works(store, self.batch(store, 2)), what="that the store works again")
            time.sleep(0.1)
            assert found(into) == left, "memory was written after the job had settled"

    @law("STORE-3", "ALL-4")
    @pytest.mark.parametrize(("how", "count", "nbytes"), [("timeout", 3, 512), ("cancel", 16, 200_000)])
    def test_a_get_that_ends_during_its_copy_leaves_the_memory_alone_once_it_is_settled(
        self, end: str, how: str, count: int, nbytes: int
    ) -> None:
        _, store, pages = self.with_pages(end, count, sized_format(nbytes))
        request, memory = held_request(pages, at=count - 1)
        with memory:
            begun = time.monotonic()
            job = store.submit_get(request, timeout=SOON_S if how == "timeout" else 60.0)
            memory.wait_begun()
            if how == "cancel":
                until(
                    lambda: job.progressed_at > begun, what="the progress of a load whose last page is held"
                )
                assert job.results() is None
                for wait in (job.wait, partial(job.wait_for_layer, pages.form.num_layers - 1)):
                    raises(TimeoutError, partial(wait, 0.05))
                begun = time.monotonic()
                Call(job.cancel).result()
            results = ended(job)
            assert time.monotonic() - begun < SOON_S + _SLACK_S, "it ended when its copy had ended"
            due = MissReason.TIMEOUT if how == "timeout" else MissReason.CANCELLED
            assert results[-1] is due
            assert {*results} <= {None, due}
            assert Call(partial(job.wait_settled, 0.05)).result() is False, "settled, and a copy is under way"
        assert job.wait_settled(waits.patience_s), "it does not settle"
        left = bytes(memory.inner.rows().buffer)
        time.sleep(0.1)
        assert bytes(memory.inner.rows().buffer) == left, "memory was written after the job had settled"
        got(store, pages)

    # -- gone ----------------------------------------------------------------------------------

    @law("STORE-7")
    def test_a_store_that_is_gone_is_a_miss_at_once_and_is_used_again_when_it_is_back(self) -> None:
        _, store, pages = self.with_pages("first")
        more = self.batch(store, 3)
        with self.going_away(store):
            for _ in range(3):
                is_missed(store, pages, more)
            begun = time.monotonic()
            for _ in range(200):
                assert ended(store.submit_get(pages.empty())) == [MissReason.STORE_GONE] * 3
            assert time.monotonic() - begun < 10 * _SLACK_S, "each request waits for a store that is gone"
        until(lambda: _works(store, more), what="that the store is tried again")

    @law("STORE-7", "STORE-3", "ALL-2", needs="other_and_forked_processes", timeout_s=120)
    def test_jobs_end_in_time_while_the_stores_process_is_stopped_and_when_it_is_killed(self) -> None:
        if not self.by_link:
            pytest.skip(f"no other process serves the pages of {self.called}")
        ends, first = self.across(0)
        store, holder = ends[1].end.thing, first.child  # type: ignore[attr-defined]
        pages = self.batch(store, 3)
        kept(store, pages)
        holder.stop()
        _check_ends(store, pages, pages.empty(), "timeout")
        assert not store.is_lost, "a store that is stopped was taken for dead"
        holder.cont()
        until(lambda: _works(store, pages), what="that the store answers again")
        holder.stop()
        jobs = [submit() for submit in _submits(store, pages, pages.empty(), None)]
        holder.kill()
        for job in jobs:
            ended(job)
        ends[1].run("is_gone")
        Call(store.abort).result()

    # -- ends ----------------------------------------------------------------------------------

    @law("ALL-1", "ALL-5")
    def test_closing_finishes_puts_and_ends_other_jobs(self, end: str) -> None:
        first, store, there = self.with_pages(end)
        coming = self.batch(first, 3)
        getting, reading = held_request(there)
        putting, writing = held_request(coming, at=1, filled=True)
        with reading, writing:
            get, job = store.submit_get(getting), store.submit_put(putting)
            until(lambda: reading.began.is_set() or writing.began.is_set())
            closing = Call(lambda: store.close(timeout=waits.patience_s))
            assert ended(get)[0] is MissReason.CLOSED
            reading.go_on.set()
            assert closing.is_blocked(0.1), "it did not wait for a put that had begun"
            assert not job.done
        assert ended(job) == [None] * 3
        closing.result()
        if end == "other":
            got(first, coming)

    @law("ALL-1", "ALL-5")
    def test_the_end_of_one_end_disturbs_no_other(self) -> None:
        first, other, pages = self.with_pages("other")
        request, memory = held_request(pages)
        with memory:
            job = first.submit_get(request)
            memory.wait_begun()
            Call(other.abort).result()
            assert not job.done, "a job ended with another end"
        assert ended(job) == [None] * 3
        assert _works(first, self.batch(first, 3))

    @law("STORE-2", "STORE-3", "ALL-5")
    def test_many_threads_use_one_end(self, end: str) -> None:
        first, store = self.first_and(end)
        batches = [self.batch(first, 4, sized_format(5_000)) for _ in range(8)]

        def work() -> None:
            for pages in batches:
                kept(store, pages)
                got(store, pages)
                store.usage()

        for call in [Call(work) for _ in range(6)]:
            call.result(60)
