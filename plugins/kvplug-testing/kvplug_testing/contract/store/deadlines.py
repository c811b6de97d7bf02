"""Time: submitting never waits, every job ends by its deadline, and memory is left alone afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.transport import Job, MissReason, PageRequest, Presence, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.held_memory import HeldMemory
from kvplug_testing.contract.store.pages import FILL, Batch, sized_format
from kvplug_testing.contract.store.suite import (
    SOON_S,
    StoreSuite,
    at_both_ends,
    ended,
    got,
    kept,
)
from kvplug_testing.waits import Call, raises, until

SLACK_S = 1.5
"""How much later than its deadline a job may end on a busy machine."""


def held_request(pages: Batch, at: int = 0, *, filled: bool = False) -> tuple[PageRequest, HeldMemory]:
    """A request whose copy of one page is held up."""
    request = pages.filled() if filled else pages.empty()
    memory = HeldMemory(request.memory, at)
    return attrs.evolve(request, memory=memory), memory


def content_of(memory: HeldMemory) -> bytes:
    return bytes(memory.inner.rows().buffer)


def submits(store: Store, pages: Batch, timeout: float | None) -> dict[str, Callable[[], Job[Any]]]:
    """All calls that make a job."""
    return {
        "submit_lookup": partial(store.submit_lookup, pages.keys, timeout=timeout),
        "submit_put": partial(store.submit_put, pages.filled(), timeout=timeout),
        "submit_get": partial(store.submit_get, pages.empty(), timeout=timeout),
        "submit_remove": partial(store.submit_remove, pages.keys, timeout=timeout),
    }


def is_late(name: str, results: Sequence[Any]) -> bool:
    """Whether these may be the results of a job that ran out of time, and nothing was known by then.

    What there is may be known without asking.
    """
    allowed: dict[str, set[Any]] = {
        "submit_lookup": {Presence.ABSENT, Presence.HELD},
        "submit_put": {PutReason.TIMEOUT},
        "submit_get": {MissReason.TIMEOUT},
        "submit_remove": {False},
    }
    return set(results) <= allowed[name]


class Deadlines(StoreSuite):
    """Jobs while the store does not answer, and while a copy takes long."""

    @law("STORE-3")
    @at_both_ends
    def test_submitting_does_not_wait_for_copies(self, end: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 4)
        kept(first, pages)
        held_up = []
        try:
            for number in range(20):
                getting, memory = held_request(pages)
                held_up.append(memory)
                putting, memory = held_request(self.batch(first, 2), filled=True)
                held_up.append(memory)
                for call in (partial(store.submit_get, getting), partial(store.submit_put, putting)):
                    assert Call(call).end(5).error is None, f"request {number} was refused"
        finally:
            for memory in held_up:
                memory.go_on.set()

    @law("STORE-3")
    def test_submitting_does_not_wait_for_a_store_that_does_not_answer(self) -> None:
        store = self.hold()
        pages = self.batch(store, 4)
        kept(store, pages)
        with self.holding_up(store):
            jobs = []
            for _ in range(50):
                for name, submit in submits(store, pages, 10.0).items():
                    call = Call(submit).end(5)
                    assert call.error is None, f"{name} raised {call.error!r}"
                    jobs.append(call.value)
            for job in jobs:
                Call(job.cancel).result()
            for job in jobs:
                ended(job)

    @law("STORE-3", "ALL-4")
    def test_jobs_end_by_their_deadlines_while_the_store_does_not_answer(self) -> None:
        store = self.hold()
        pages = self.batch(store, 4)
        kept(store, pages)
        with self.holding_up(store):
            for name, submit in submits(store, pages, SOON_S).items():
                begun = time.monotonic()
                job = submit()
                results = ended(job)
                took = time.monotonic() - begun
                assert is_late(name, results), f"{name} gave {results}"
                assert took < SOON_S + SLACK_S, f"{name} took {took:.2f} s, its deadline was at {SOON_S} s"
        until(lambda: _works(store, self.batch(store, 2)), what="that the store works again")

    @law("STORE-3", "ALL-4")
    def test_where_nothing_is_said_the_contexts_timeout_applies(self) -> None:
        place = self.place()
        usual, type(self).timeout_s = type(self).timeout_s, SOON_S
        try:
            store = self.open(place)
        finally:
            type(self).timeout_s = usual
        pages = self.batch(store, 2)
        with self.holding_up(store):
            job = store.submit_get(pages.empty())
            assert job.wait(SOON_S + SLACK_S) == [MissReason.TIMEOUT] * 2

    @law("STORE-3")
    @at_both_ends
    @pytest.mark.parametrize("how", ["timeout", "cancel"])
    def test_a_get_that_ends_during_its_copy_leaves_the_memory_alone_once_it_is_settled(
        self, end: str, how: str
    ) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        request, memory = held_request(pages, at=1)
        begun = time.monotonic()
        job = store.submit_get(request, timeout=SOON_S if how == "timeout" else 60.0)
        try:
            assert memory.began.wait(waits.patience_s)
            if how == "cancel":
                begun = time.monotonic() - SOON_S
                Call(job.cancel).result()
            results = ended(job)
            assert time.monotonic() - begun < SOON_S + SLACK_S, "it ended when its copy had ended"
            due = MissReason.TIMEOUT if how == "timeout" else MissReason.CANCELLED
            assert results[1] is due, f"the page in the middle gave {results[1]}"
            assert set(results) <= {None, due}
            assert not job.settled, "it is settled, and a copy is under way"
        finally:
            memory.go_on.set()
        assert job.wait_settled(waits.patience_s), "it does not settle"
        left = content_of(memory)
        memory.began.clear()
        time.sleep(0.1)
        assert content_of(memory) == left, "memory was written after the job had settled"
        assert not memory.began.is_set()
        got(store, pages)

    @law("STORE-3")
    @pytest.mark.parametrize("how", ["timeout", "cancel"])
    def test_pages_that_come_after_the_end_of_a_get_are_not_copied(self, how: str) -> None:
        store = self.hold()
        pages = self.batch(store, 3)
        kept(store, pages)
        request = pages.empty()
        rows = request.memory.rows()
        assert rows is not None
        with self.holding_up(store):
            job = store.submit_get(request, timeout=SOON_S if how == "timeout" else 60.0)
            if how == "cancel":
                time.sleep(0.05)
                job.cancel()
            assert None not in ended(job)
            assert job.wait_settled(waits.patience_s)
            left = bytes(rows.buffer)
        until(lambda: _works(store, pages), what="that the store works again")
        time.sleep(0.1)
        assert bytes(rows.buffer) == left, "memory was written after the job had settled"

    @law("STORE-3")
    @at_both_ends
    @pytest.mark.parametrize("how", ["timeout", "cancel"])
    def test_a_put_that_ends_during_its_copy_keeps_no_mixture(self, end: str, how: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 3)
        request, memory = held_request(pages, at=1, filled=True)
        job = store.submit_put(request, timeout=SOON_S if how == "timeout" else 60.0)
        try:
            assert memory.began.wait(waits.patience_s)
            if how == "cancel":
                Call(job.cancel).result()
            assert ended(job)[1] is not None
        finally:
            memory.go_on.set()
        assert job.wait_settled(waits.patience_s)
        memory.inner.rows().buffer[:] = bytes([FILL]) * memory.inner.rows().buffer.nbytes
        for end_ in (first, store):
            wanted = pages.empty()
            results = ended(end_.submit_get(wanted))
            assert not (wrong := pages.unlike(wanted, results)), wrong

    @law("STORE-3")
    def test_a_cancelled_job_ends_at_once_while_the_store_does_not_answer(self) -> None:
        store = self.hold()
        pages = self.batch(store, 30)
        kept(store, pages)
        with self.holding_up(store):
            jobs = {name: submit() for name, submit in submits(store, pages, 60.0).items()}
            for name, job in jobs.items():
                Call(job.cancel).result()
                begun = time.monotonic()
                results = ended(job)
                assert time.monotonic() - begun < SLACK_S, f"{name} ended late"
                assert len(results) == 30
                Call(job.cancel).result()
            assert jobs["submit_get"].results() == [MissReason.CANCELLED] * 30
        until(lambda: _works(store, self.batch(store, 2)), what="that the store works again")

    @law("STORE-3", "ALL-4")
    @at_both_ends
    def test_a_timeout_of_zero_is_no_hang(self, end: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 4)
        kept(first, pages)
        for name, submit in submits(store, pages, 0).items():
            begun = time.monotonic()
            results = ended(submit())
            assert len(results) == 4
            assert time.monotonic() - begun < SLACK_S, f"{name} took longer than its timeout"

    @law("ALL-4")
    @at_both_ends
    def test_a_timeout_that_is_none_is_refused(self, end: str) -> None:
        first, store = self.ends(end)
        for bad in (-1.0, float("nan")):
            for submit in submits(store, self.batch(first, 1), bad).values():
                raises(ValueError, submit)

    @law("ALL-4", "STORE-3")
    def test_waiting_for_a_job_has_a_deadline_of_its_own(self) -> None:
        store = self.hold()
        pages = self.batch(store, 2)
        kept(store, pages)
        request, memory = held_request(pages)
        job = store.submit_get(request)
        try:
            assert memory.began.wait(waits.patience_s)
            raises(TimeoutError, lambda: job.wait(0.05))
            raises(TimeoutError, lambda: job.wait_for_layer(pages.form.num_layers - 1, 0.05))
            assert Call(lambda: job.wait_settled(0.05)).result() is False
            assert job.results() is None
        finally:
            memory.go_on.set()
        assert ended(job) == [None, None]
        Call(lambda: job.wait_for_layer(pages.form.num_layers - 1)).result()
        assert job.num_layers_ready == pages.form.num_layers

    @law("STORE-3")
    @at_both_ends
    def test_callbacks_of_jobs_are_called_once(self, end: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 4)
        calls: list[Job[Any]] = []
        jobs = []
        for submit in submits(store, pages, 20.0).values():
            job = submit()
            job.add_done_callback(calls.append)
            jobs.append(job)
            ended(job)
            job.add_done_callback(calls.append)
        until(lambda: len(calls) >= 8, what="that every callback is called")
        assert sorted(map(id, calls)) == sorted([*map(id, jobs), *map(id, jobs)])

    @law("STORE-3")
    @at_both_ends
    def test_the_progress_of_a_load_grows(self, end: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 16, sized_format(200_000))
        kept(first, pages)
        request, memory = held_request(pages, at=15)
        began = time.monotonic()
        job = store.submit_get(request)
        try:
            until(lambda: job.progressed_at > began, what="the progress of a load whose last page is held up")
            assert not job.done
        finally:
            memory.go_on.set()
        assert ended(job) == [None] * 16


def _works(store: Store, pages: Batch) -> bool:
    """Whether a put and a get succeed."""
    if ended(store.submit_put(pages.filled())) != [None] * len(pages):
        return False
    got(store, pages)
    return True
