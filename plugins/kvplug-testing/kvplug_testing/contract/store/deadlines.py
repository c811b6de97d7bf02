"""Time, and ends: jobs end by their deadlines and with their store, whatever is copied or does not answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug.transport import Job, MissReason, Presence, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.ends import CLOSE_S
from kvplug_testing.contract.store.ends import StoreGeneral
from kvplug_testing.contract.store.held_memory import held_request
from kvplug_testing.contract.store.pages import Batch, blank, sized_format
from kvplug_testing.contract.store.suite import (
    SOON_S,
    at_both_ends,
    ended,
    got,
    got_or_missed,
    is_missed,
    kept,
    put,
)
from kvplug_testing.waits import Call, raises, until

_SLACK_S = 1.5
"""How much later than its deadline a job may end on a busy machine."""
_MANY = 50
"""Requests of each kind to a store that does not answer."""
_ALLOWED: dict[str, set[Any]] = {
    "submit_lookup": {Presence.ABSENT, Presence.HELD},  # what there is may be known without asking
    "submit_put": {PutReason.TIMEOUT, PutReason.CANCELLED},
    "submit_get": {MissReason.TIMEOUT, MissReason.CANCELLED},
    "submit_remove": {False},
}
"""The results of a job that ran out of time, or was cancelled."""
at_once_and_politely = pytest.mark.parametrize("verb", ["close", "abort"])


def _submits(store: Store, pages: Batch, timeout: float | None) -> dict[str, Callable[[], Job[Any]]]:
    """All calls that make a job."""
    return {
        "submit_lookup": partial(store.submit_lookup, pages.keys, timeout=timeout),
        "submit_put": partial(store.submit_put, pages.filled(), timeout=timeout),
        "submit_get": partial(store.submit_get, pages.empty(), timeout=timeout),
        "submit_remove": partial(store.submit_remove, pages.keys, timeout=timeout),
    }


def _check_late(store: Store, pages: Batch) -> None:
    """Each job ends by its deadline with what is known by then, while the store does not answer."""
    for name, submit in _submits(store, pages, SOON_S).items():
        begun = time.monotonic()
        results = ended(Call(submit).result(_SLACK_S))
        assert time.monotonic() - begun < SOON_S + _SLACK_S, f"{name} ended late"
        # pages that are held need not be put again, and memory of the store may be read without it
        assert {*results} <= {None, *_ALLOWED[name]}, f"{name} gave {results}, and the store is held up"


def _works(store: Store, pages: Batch) -> bool:
    """Whether a put and a get succeed."""
    if put(store, pages) != [None] * len(pages):
        return False
    got(store, pages)
    return True


class Deadlines(StoreGeneral):
    """Jobs while the store does not answer or is gone, while a copy takes long, and at the end."""

    @law("STORE-3", "ALL-4")
    def test_jobs_end_when_they_are_due_or_cancelled_while_the_store_does_not_answer(
        self,
    ) -> None:
        store = self.hold()
        pages = self.batch(store, 30)
        kept(store, pages)
        with self.holding_up(store):
            _check_late(store, pages)
            submits = [*_submits(store, pages, 60.0).items()] * _MANY
            for name, job in [(name, Call(submit).result(5)) for name, submit in submits]:
                Call(job.cancel).result()
                begun = time.monotonic()
                results = ended(job)
                assert time.monotonic() - begun < _SLACK_S, f"{name} ended late"
                assert {*results} <= _ALLOWED[name], f"{name} gave {results}"
        until(lambda: _works(store, self.batch(store, 2)), what="that the store works again")

    @law("STORE-3")
    @at_both_ends
    @pytest.mark.parametrize("how", ["timeout", "cancel"])
    def test_a_get_that_ends_during_its_copy_leaves_the_memory_alone_once_it_is_settled(
        self, end: str, how: str
    ) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        request, memory = held_request(pages, at=1)
        with memory:
            job = store.submit_get(request, timeout=SOON_S if how == "timeout" else 60.0)
            begun = time.monotonic()
            memory.wait_begun()
            if how == "cancel":
                Call(job.cancel).result()
            results = ended(job)
            assert time.monotonic() - begun < SOON_S + _SLACK_S, "it ended when its copy had ended"
            due = MissReason.TIMEOUT if how == "timeout" else MissReason.CANCELLED
            assert results[1] is due
            assert {*results} <= {None, due}
            assert not job.settled, "it is settled, and a copy is under way"
        assert job.wait_settled(waits.patience_s), "it does not settle"
        left = bytes(memory.inner.rows().buffer)
        time.sleep(0.1)
        assert bytes(memory.inner.rows().buffer) == left, "memory was written after the job had settled"
        got(store, pages)

    @law("STORE-3")
    def test_pages_that_come_after_the_end_of_a_get_are_not_copied(self) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        request = pages.empty()
        rows = request.memory.rows()
        assert rows is not None
        with self.holding_up(store):
            job = store.submit_get(request)
            time.sleep(0.05)
            Call(job.cancel).result()
            assert None not in ended(job)
            assert job.wait_settled(waits.patience_s)
            left = bytes(rows.buffer)
        until(lambda: _works(store, pages), what="that the store works again")
        time.sleep(0.1)
        assert bytes(rows.buffer) == left, "memory was written after the job had settled"

    @law("STORE-3")
    @at_both_ends
    def test_a_put_that_is_cancelled_during_its_copy_keeps_no_mixture(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        request, memory = held_request(pages, at=1, filled=True)
        with memory:
            job = store.submit_put(request)
            memory.wait_begun()
            Call(job.cancel).result()
            assert ended(job)[1] is not None
        assert job.wait_settled(waits.patience_s)
        blank(memory.inner)
        for end_ in (first, store):
            got_or_missed(end_, pages)

    @law("STORE-3", "ALL-4")
    @at_both_ends
    def test_the_progress_of_a_load_grows_and_waiting_for_it_has_a_deadline_of_its_own(
        self, end: str
    ) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 16, sized_format(200_000))
        kept(first, pages)
        request, memory = held_request(pages, at=15)
        with memory:
            began = time.monotonic()
            job = store.submit_get(request)
            until(lambda: job.progressed_at > began, what="the progress of a load whose last page is held up")
            assert job.results() is None
            for wait in (job.wait, partial(job.wait_for_layer, pages.form.num_layers - 1)):
                raises(TimeoutError, partial(wait, 0.05))
            assert Call(lambda: job.wait_settled(0.05)).result() is False
        assert ended(job) == [None] * 16
        assert job.num_layers_ready == pages.form.num_layers

    # -- gone ----------------------------------------------------------------------------------

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
            assert time.monotonic() - begun < 10 * _SLACK_S, "each request waits for a store that is gone"
        until(lambda: _works(store, more), what="that the store is tried again")

    @law("STORE-7", "STORE-3", "ALL-2", needs="served_by_processes", timeout_s=120)
    def test_jobs_end_in_time_while_the_stores_process_is_stopped_and_when_it_is_killed(
        self,
    ) -> None:
        ends, first = self.across(0)
        store, holder = ends[1].end.thing, first.child  # type: ignore[attr-defined]
        pages = self.batch(store, 3)
        kept(store, pages)
        holder.stop()
        _check_late(store, pages)
        assert not store.is_lost, "a store that is stopped was taken for dead"
        holder.cont()
        until(lambda: _works(store, pages), what="that the store answers again")
        holder.stop()
        jobs = [submit() for submit in _submits(store, pages, None).values()]
        holder.kill()
        for job in jobs:
            ended(job)
        ends[1].run("is_gone")
        Call(store.abort).result()

    @property
    def served_by_processes(self) -> str:
        """The reason to skip a test, for ``needs``."""
        if not self.by_link:
            return f"no other process serves the pages of {self.called}"
        return self.other_and_forked_processes

    # -- ends ----------------------------------------------------------------------------------

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
            reading.go_on.set()
            assert closing.is_blocked(0.1), "it did not wait for a put that had begun"
            assert not job.done
        assert ended(job) == [None] * 3
        closing.result()
        if end == "other":
            got(first, coming)

    @law("ALL-1", "ALL-5", "STORE-3")
    @at_once_and_politely
    def test_jobs_end_with_a_store_that_does_not_answer(self, verb: str) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        with self.holding_up(store):
            jobs = [submit() for submit in _submits(store, pages, 60.0).values()]
            ending = Call(partial(store.close, CLOSE_S) if verb == "close" else store.abort)
            for job in jobs:
                ended(job)
            assert jobs[2].results() == [MissReason.CLOSED] * 3
        ending.result()
        for job in jobs:
            assert job.wait_settled(waits.patience_s), "the memory of a job is still in use"

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
        Call(other.close).result()

    @law("STORE-2", "STORE-3", "ALL-5")
    @at_both_ends
    def test_many_threads_use_one_end(self, end: str) -> None:
        first, store = self.first_and(end)
        batches = [self.batch(first, 4, sized_format(5_000)) for _ in range(6)]
        gate = threading.Barrier(6)

        def work(number: int) -> None:
            gate.wait(waits.patience_s)
            for turn in range(8):
                pages = batches[(number + turn) % 6]
                kept(store, pages)
                got(store, pages)
                store.usage()

        for call in [Call(partial(work, number)) for number in range(6)]:
            call.result(60)
