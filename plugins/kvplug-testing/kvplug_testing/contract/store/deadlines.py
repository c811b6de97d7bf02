"""Time: submitting never waits, every job ends by its deadline, and memory is left alone afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug.transport import Job, MissReason, Presence, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.held_memory import HeldMemory, held_request
from kvplug_testing.contract.store.pages import FILL, Batch, sized_format
from kvplug_testing.contract.store.suite import (
    SOON_S,
    StoreSuite,
    at_both_ends,
    ended,
    got,
    got_or_missed,
    kept,
    put,
)
from kvplug_testing.waits import Call, raises, until

SLACK_S = 1.5
"""How much later than its deadline a job may end on a busy machine."""
_MANY = 50
"""Requests of each kind to a store that does not answer."""
_ALLOWED: dict[str, set[Any]] = {
    "submit_lookup": {Presence.ABSENT, Presence.HELD},  # what there is may be known without asking
    "submit_put": {PutReason.TIMEOUT},
    "submit_get": {MissReason.TIMEOUT},
    "submit_remove": {False},
}
"""The results of a job that ran out of time."""
by_timeout_or_cancelled = pytest.mark.parametrize("how", ["timeout", "cancel"])


def submits(store: Store, pages: Batch, timeout: float | None) -> dict[str, Callable[[], Job[Any]]]:
    """All calls that make a job."""
    return {
        "submit_lookup": partial(store.submit_lookup, pages.keys, timeout=timeout),
        "submit_put": partial(store.submit_put, pages.filled(), timeout=timeout),
        "submit_get": partial(store.submit_get, pages.empty(), timeout=timeout),
        "submit_remove": partial(store.submit_remove, pages.keys, timeout=timeout),
    }


def check_timed_out(store: Store, pages: Batch, known: Sequence[str] = ()) -> None:
    """Each job ends by its deadline, with what is not known yet; jobs in ``known`` may give other results."""
    for name, submit in submits(store, pages, SOON_S).items():
        begun = time.monotonic()
        results = ended(Call(submit).result(SLACK_S))
        took = time.monotonic() - begun
        assert took < SOON_S + SLACK_S, f"{name} took {took:.2f} s, its deadline was at {SOON_S} s"
        is_known = name in known and MissReason.STORE_GONE not in results
        assert is_known or {*results} <= _ALLOWED[name], f"{name} gave {results}, and the store is held up"


def _end(job: Job[Any], how: str) -> None:
    """Cancel the job, unless it ends by its timeout."""
    if how == "cancel":
        Call(job.cancel).result()


def _timeout(how: str) -> float:
    return SOON_S if how == "timeout" else 60.0


def content_of(memory: HeldMemory) -> bytes:
    return bytes(memory.inner.rows().buffer)


class Deadlines(StoreSuite):
    """Jobs while the store does not answer, and while a copy takes long."""

    @law("STORE-3")
    @at_both_ends
    def test_submitting_does_not_wait_for_copies(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 4)
        kept(first, pages)
        with ExitStack() as stack:
            for _ in range(20):
                for submit, of, filled in (
                    (store.submit_get, pages, False),
                    (store.submit_put, self.batch(first, 2), True),
                ):
                    request, memory = held_request(of, filled=filled)
                    stack.enter_context(memory)
                    Call(partial(submit, request)).result(5)

    @law("STORE-3", "ALL-4")
    def test_jobs_end_by_their_deadlines_while_the_store_does_not_answer(self) -> None:
        store = self.hold()
        pages = self.batch(store, 4)
        kept(store, pages)
        with self.holding_up(store):
            check_timed_out(store, pages)
        until(lambda: _works(store, self.batch(store, 2)), what="that the store works again")

    @law("STORE-3")
    @at_both_ends
    @by_timeout_or_cancelled
    def test_a_get_that_ends_during_its_copy_leaves_the_memory_alone_once_it_is_settled(
        self, end: str, how: str
    ) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        request, memory = held_request(pages, at=1)
        with memory:
            job = store.submit_get(request, timeout=_timeout(how))
            begun = time.monotonic()
            memory.wait_begun()
            _end(job, how)
            results = ended(job)
            assert time.monotonic() - begun < SOON_S + SLACK_S, "it ended when its copy had ended"
            due = MissReason.TIMEOUT if how == "timeout" else MissReason.CANCELLED
            assert results[1] is due, f"the page in the middle gave {results[1]}"
            assert set(results) <= {None, due}
            assert not job.settled, "it is settled, and a copy is under way"
        assert job.wait_settled(waits.patience_s), "it does not settle"
        left = content_of(memory)
        memory.began.clear()
        time.sleep(0.1)
        assert content_of(memory) == left, "memory was written after the job had settled"
        assert not memory.began.is_set()
        got(store, pages)

    @law("STORE-3")
    @by_timeout_or_cancelled
    def test_pages_that_come_after_the_end_of_a_get_are_not_copied(self, how: str) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        request = pages.empty()
        rows = request.memory.rows()
        assert rows is not None
        with self.holding_up(store):
            job = store.submit_get(request, timeout=_timeout(how))
            time.sleep(0.05)
            _end(job, how)
            assert None not in ended(job)
            assert job.wait_settled(waits.patience_s)
            left = bytes(rows.buffer)
        until(lambda: _works(store, pages), what="that the store works again")
        time.sleep(0.1)
        assert bytes(rows.buffer) == left, "memory was written after the job had settled"

    @law("STORE-3")
    @at_both_ends
    @by_timeout_or_cancelled
    def test_a_put_that_ends_during_its_copy_keeps_no_mixture(self, end: str, how: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3)
        request, memory = held_request(pages, at=1, filled=True)
        with memory:
            job = store.submit_put(request, timeout=_timeout(how))
            memory.wait_begun()
            _end(job, how)
            assert ended(job)[1] is not None
        assert job.wait_settled(waits.patience_s)
        memory.inner.rows().buffer[:] = bytes([FILL]) * memory.inner.rows().buffer.nbytes
        for end_ in (first, store):
            got_or_missed(end_, pages)

    @law("STORE-3")
    def test_a_store_that_does_not_answer_holds_up_no_submit_and_no_job_that_is_cancelled(self) -> None:
        store = self.hold()
        pages = self.batch(store, 30)
        kept(store, pages)
        with self.holding_up(store):
            jobs = []
            for _ in range(_MANY):
                for name, submit in submits(store, pages, 60.0).items():
                    jobs.append((name, Call(submit).result(5)))
            for name, job in jobs:
                Call(job.cancel).result()
                begun = time.monotonic()
                results = ended(job)
                assert time.monotonic() - begun < SLACK_S, f"{name} ended late"
                assert len(results) == 30
                if name == "submit_get":
                    assert results == [MissReason.CANCELLED] * 30
                job.cancel()
        until(lambda: _works(store, self.batch(store, 2)), what="that the store works again")

    @law("STORE-3", "ALL-4")
    @at_both_ends
    def test_the_progress_of_a_load_grows_and_waiting_for_it_has_a_deadline_of_its_own(
        self, end: str
    ) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 16, sized_format(200_000))
        kept(first, pages)
        request, memory = held_request(pages, at=15)
        calls: list[Job[Any]] = []
        with memory:
            began = time.monotonic()
            job = store.submit_get(request)
            job.add_done_callback(calls.append)
            until(lambda: job.progressed_at > began, what="the progress of a load whose last page is held up")
            assert not job.done
            assert job.results() is None
            raises(TimeoutError, lambda: job.wait(0.05))
            raises(TimeoutError, lambda: job.wait_for_layer(pages.form.num_layers - 1, 0.05))
            assert Call(lambda: job.wait_settled(0.05)).result() is False
        assert ended(job) == [None] * 16
        Call(lambda: job.wait_for_layer(pages.form.num_layers - 1)).result()
        assert job.num_layers_ready == pages.form.num_layers
        job.add_done_callback(calls.append)
        until(lambda: len(calls) >= 2, what="that every callback is called")
        time.sleep(0.02)
        assert calls == [job, job], f"two callbacks were called {len(calls)} times"


def _works(store: Store, pages: Batch) -> bool:
    """Whether a put and a get succeed."""
    if put(store, pages) != [None] * len(pages):
        return False
    got(store, pages)
    return True
