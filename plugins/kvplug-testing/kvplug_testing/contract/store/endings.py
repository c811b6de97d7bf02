"""How ends end: by close, by abort, while jobs are under way, in a forked child; and what is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug import ClosedError, UnsupportedError
from kvplug.transport import Job, MissReason, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.footprint import Footprint
from kvplug_testing.contract.forked_child import held as descriptors_held, in_forked_child
from kvplug_testing.contract.store.deadlines import SLACK_S, held_request
from kvplug_testing.contract.store.held_memory import HeldMemory
from kvplug_testing.contract.store.pages import Batch, sized_format
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
from kvplug_testing.contract.store.writers import put_without_end
from kvplug_testing.waits import Call, until

at_once_and_politely = pytest.mark.parametrize("verb", ["close", "abort"])


def calls_of(store: Store, pages: Batch, can: Callable[[str], bool]) -> dict[str, Callable[[], Any]]:
    """The calls of an end that an open one answers, by name."""
    calls: dict[str, Callable[[], Any]] = {
        "submit_lookup": lambda: store.submit_lookup(pages.keys),
        "submit_lookup of nothing": lambda: store.submit_lookup(()),
        "submit_put": lambda: store.submit_put(pages.filled()),
        "submit_get": lambda: store.submit_get(pages.empty()),
        "submit_remove": lambda: store.submit_remove(pages.keys),
        "usage": store.usage,
    }
    more: dict[str, Callable[[], Any]] = {
        "touch": lambda: store.touch(pages.keys),
        "expect_reader": lambda: store.expect_reader(pages.keys),
        "keys": lambda: store.keys(pages.series),
        "declare": lambda: store.declare(pages.series, pages.keys),
        "withdraw": lambda: store.withdraw(pages.keys),
        "release": lambda: store.release(pages.keys),
        "subscribe": lambda: store.subscribe(lambda event: None),
    }
    return calls | {name: call for name, call in more.items() if can(name)}


def not_closed(store: Store, pages: Batch, can: Callable[[str], bool]) -> str:
    """The calls that do not raise ``ClosedError``; empty if all do."""
    wrong = []
    for name, call in calls_of(store, pages, can).items():
        try:
            wrong.append(f"{name} returned {call()!r}")
        except (ClosedError, UnsupportedError) as e:
            if isinstance(e, UnsupportedError) and name not in ("keys", "subscribe"):
                wrong.append(f"{name} raised {e!r}")
        except BaseException as e:
            wrong.append(f"{name} raised {e!r}")
    if not store.is_lost:
        wrong.append("it does not say that it is lost")
    return "; ".join(wrong)


class Endings(StoreSuite):
    """Each end, in each state."""

    def _is_closed(self, store: Store, pages: Batch) -> None:
        wrong = Call(lambda: not_closed(store, pages, partial(self.can, store))).result()
        assert not wrong, wrong

    @law("ALL-1")
    @at_both_ends
    @at_once_and_politely
    def test_after_it_every_call_raises_closed_error(self, end: str, verb: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 2)
        kept(store, pages)
        assert store.is_lost is False
        Call(getattr(store, verb)).result()
        self._is_closed(store, pages)
        for again in ("close", "abort", "close"):
            Call(getattr(store, again)).result()
        self._is_closed(store, pages)

    @law("ALL-1")
    def test_leaving_the_block_closes_it(self) -> None:
        with self.hold() as store:
            pages = self.batch(store, 1)
            kept(store, pages)
        self._is_closed(store, pages)

    @law("ALL-1")
    @at_once_and_politely
    def test_an_end_that_was_never_used_can_be_ended(self, verb: str) -> None:
        store = self.hold()
        Call(getattr(store, verb)).result()
        assert store.is_lost

    @law("ALL-1", "ALL-5")
    @at_both_ends
    def test_closing_finishes_puts_and_ends_other_jobs(self, end: str) -> None:
        place = self.place()
        first = self.open(place)
        store = first if end == "first" else self.other(place)
        there, coming = self.batch(first, 3), self.batch(first, 3)
        kept(first, there)
        getting, reading = held_request(there)
        putting, writing = held_request(coming, at=1, filled=True)
        get, job = store.submit_get(getting), store.submit_put(putting)
        try:
            until(lambda: reading.began.is_set() or writing.began.is_set())
            closing = Call(lambda: store.close(timeout=waits.patience_s))
            assert ended(get)[0] is MissReason.CLOSED
            assert not job.done, "a put that had begun was not finished"
            reading.go_on.set()
            assert closing.is_blocked(0.1), "it did not wait for a put that had begun"
        finally:
            reading.go_on.set()
            writing.go_on.set()
        assert ended(job) == [None] * 3
        closing.result()
        if end == "other":
            got(first, coming)

    @law("ALL-1", "ALL-4")
    @at_both_ends
    def test_closing_waits_no_longer_than_its_timeout(self, end: str) -> None:
        first, store = self.ends(end)
        putting, memory = held_request(self.batch(first, 2), filled=True)
        job = store.submit_put(putting)
        try:
            assert memory.began.wait(waits.patience_s)
            begun = time.monotonic()
            closing = Call(lambda: store.close(timeout=SOON_S))
            assert PutReason.CLOSED in ended(job)
            assert time.monotonic() - begun < SOON_S + SLACK_S
        finally:
            memory.go_on.set()
        assert closing.end().error is None, f"close raised {closing.error!r}"

    @law("ALL-1", "ALL-5")
    @at_both_ends
    def test_aborting_ends_every_job_at_once(self, end: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 3)
        kept(first, pages)
        held_up: list[HeldMemory] = []
        jobs: list[Any] = []
        try:
            for _ in range(3):
                for submit, filled, of in (
                    (store.submit_get, False, pages),
                    (store.submit_put, True, self.batch(first, 3)),
                ):
                    request, memory = held_request(of, filled=filled)
                    held_up.append(memory)
                    jobs.append(submit(request))
            until(lambda: any(memory.began.is_set() for memory in held_up), what="that a copy begins")
            aborting = Call(store.abort)
            begun = time.monotonic()
            for job in jobs:
                for result in ended(job):
                    assert result in (None, MissReason.CLOSED, PutReason.CLOSED), str(result)
            assert time.monotonic() - begun < SLACK_S
        finally:
            for memory in held_up:
                memory.go_on.set()
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
            ending = Call(partial(store.close, SOON_S) if verb == "close" else store.abort)
            for job in jobs:
                ended(job)
            assert jobs[0].results() == [MissReason.CLOSED] * 3
        ending.result()

    @law("ALL-1")
    @at_once_and_politely
    def test_the_end_of_one_end_disturbs_no_other(self, verb: str) -> None:
        place = self.place()
        first = self.open(place)
        one, other = self.other(place), self.other(place)
        pages = self.batch(first, 3)
        kept(one, pages)
        Call(getattr(one, verb)).result()
        for store in (other, first):
            got(store, pages)
        more = self.batch(first, 3)
        kept(other, more)
        got(first, more)

    @law("ALL-1", "STORE-7")
    @at_once_and_politely
    def test_when_the_first_end_ends_others_get_misses_or_their_pages(self, verb: str) -> None:
        place = self.place()
        first = self.open(place)
        store = self.other(place)
        pages = self.batch(first, 3)
        kept(first, pages)
        Call(getattr(first, verb)).result()
        got_or_missed(store, pages)
        put(store, self.batch(store, 1))
        Call(store.close).result()

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

    # -- forks -----------------------------------------------------------------------------------

    @law("ALL-6", needs="forked_processes")
    @at_both_ends
    def test_in_a_forked_child_every_call_raises_closed_and_the_parents_end_goes_on(self, end: str) -> None:
        first, store = self.ends(end)
        pages = self.batch(first, 2)
        kept(store, pages)
        request, memory = held_request(pages)
        job = store.submit_get(request)
        try:
            assert memory.began.wait(waits.patience_s)

            def look() -> str:
                wrong = [not_closed(store, pages, partial(self.can, store))]
                results = job.results()
                if results is None or not job.settled:
                    wrong.append("a job of the parent's is under way in the child")
                elif results[0] is not MissReason.CLOSED:
                    wrong.append(f"a job of the parent's says {results} in the child")
                store.close()
                store.abort()
                return "; ".join(each for each in wrong if each)

            for _ in range(3):
                assert not (wrong := in_forked_child(look)), wrong
            assert not job.done
        finally:
            memory.go_on.set()
        assert ended(job) == [None] * 2
        got(store, pages)
        more = self.batch(first, 2)
        kept(store, more)
        got(first, more)

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_none_of_the_descriptors(self) -> None:
        before = set(in_forked_child(descriptors_held).splitlines())
        place = self.place()
        store = self.open(place)
        pages = self.batch(store, 4, sized_format(100_000))
        kept(store, pages)
        got(store, pages)
        after = {line for line in in_forked_child(descriptors_held).splitlines() if " -> pipe:" not in line}
        assert not (more := after - before), f"a forked child holds {', '.join(sorted(more))}"
        got(store, pages)

    # -- what is left ----------------------------------------------------------------------------

    @law("ALL-7")
    def test_ends_that_come_and_go_leave_nothing(self) -> None:
        self._come_and_go(20)

    @law("ALL-7", level="long", timeout_s=900)
    def test_five_hundred_ends_that_come_and_go_leave_nothing(self) -> None:
        self._come_and_go(500)

    def _come_and_go(self, rounds: int) -> None:
        form = sized_format(50_000)

        def one(number: int) -> None:
            with self.scope():
                place = self.place(64 << 20)
                store = self.open(place)
                pages = self.batch(store, 4, form)
                kept(store, pages)
                got(store, pages)
                store.submit_get(pages.empty())
                if number % 2:
                    store.close()
                else:
                    store.abort()

        self._leaves_nothing(one, rounds, 4 * form.nbytes)

    def _leaves_nothing(
        self, one: Callable[[int], None], rounds: int, nbytes: int, warm_up: int = 10
    ) -> None:
        """A leak grows each time. What is imported or cached by then is held once."""
        for number in range(warm_up):
            one(number)
        for _ in range(2):
            before = Footprint.taken()
            for number in range(rounds):
                one(number)
            if not (more := self._growth(before, rounds, nbytes)):
                return
        raise AssertionError(f"this process holds {more}")

    def _growth(self, before: Footprint, rounds: int, nbytes: int) -> str:
        """What is held beyond ``before``. Resources get some time to be released."""
        limit = time.monotonic() + waits.patience_s / 4
        while more := Footprint.taken().growth(before, rounds, nbytes):
            if time.monotonic() > limit:
                break
            time.sleep(0.1)
        return more

    @law("ALL-7")
    def test_other_ends_that_come_and_go_leave_nothing_at_the_first(self) -> None:
        place = self.place(64 << 20)
        first = self.open(place)
        pages = self.batch(first, 4, sized_format(50_000))
        kept(first, pages)
        self.make_reachable(place)

        def one(number: int) -> None:
            with self.scope():
                store = self.other(place)
                got(store, pages)
                if number % 2:
                    store.close()
                else:
                    store.abort()

        self._leaves_nothing(one, 20, 4 * pages.form.nbytes)
        got(first, pages)

    @law("ALL-7", "ALL-2", needs="other_and_forked_processes", timeout_s=120)
    def test_ends_whose_processes_are_killed_leave_nothing_at_the_first(self) -> None:
        place = self.place(64 << 20)
        first = self.open(place)
        kept(first, self.batch(first, 4))
        self.make_reachable(place)

        def one(_: int) -> None:
            with self.scope():
                child = self.remote(place, put_without_end, b"killed")
                assert child.recv(waits.patience_s) == "ready"
                child.kill()

        self._leaves_nothing(one, 5, 1 << 20, warm_up=5)

    @law("STORE-2", "STORE-3", "ALL-5")
    @at_both_ends
    def test_many_threads_use_one_end(self, end: str) -> None:
        first, store = self.ends(end)
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
