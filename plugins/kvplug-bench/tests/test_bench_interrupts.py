"""SIGINT while ``kvplug bench`` measures: it ends wherever that comes, and no process is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from kvplug_bench import rounds
from kvplug_bench.candidate import Candidate
from kvplug_bench.command import bench
from kvplug_bench.interrupts import deferred_interrupts
from kvplug_bench.processes import MeasuringProcess
from kvplug_bench.rounds import Plan, measure_once
from kvplug_testing import peers

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PLAN = Plan(sizes=(64,))
LIMIT_S = 280.0
LOCKS = 4
"""A turn takes more of them than that: those of its threads and of their futures."""

MEASURE_NOTHING = 'def measure(parent, task):\n    parent.send(["figures", {}])\n'


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """SIGINT is not ignored, as it is in what a shell without job control starts in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def interrupted(nth: int) -> Iterator[SimpleNamespace]:
    """SIGINT as soon as this thread has taken the ``nth`` lock of a condition."""
    before, thread, seen = threading.Condition.__enter__, threading.get_ident(), SimpleNamespace(taken=0)

    def enter(condition: threading.Condition) -> bool:
        got = before(condition)
        if threading.get_ident() == thread:
            seen.taken += 1
            if seen.taken == nth:
                signal.raise_signal(signal.SIGINT)
        return got

    threading.Condition.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        threading.Condition.__enter__ = before  # type: ignore[method-assign]


def pipe(folder: str) -> Candidate:
    """A pipe whose ends measure nothing: their program is the module ``nothing`` in that folder."""
    return Candidate(name="cat", kind="pipe", ops=(), env={"PYTHONPATH": folder})


def interrupt_each_lock(parent: peers.Parent, folder: str) -> int:
    """One turn for each lock that a turn takes. Returns how many turns were ended."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "take_part", SimpleNamespace(__module__="nothing", __name__="measure"))
        for nth in itertools.count(1):
            with interrupted(nth) as seen:
                try:
                    measure_once(pipe(folder), PLAN)
                except KeyboardInterrupt:
                    continue
            assert seen.taken < nth
            return nth - 1
    raise AssertionError


def test_no_lock_stays_taken_wherever_an_interrupt_comes(tmp_path):
    (tmp_path / "nothing.py").write_text(MEASURE_NOTHING)
    with peers.start(interrupt_each_lock, str(tmp_path), timeout_s=LIMIT_S) as child:
        assert child.result(LIMIT_S) > LOCKS


def test_a_process_that_has_just_been_started_is_ended(monkeypatch):
    started = []

    def start_and_interrupt(*args: Any, **more: Any) -> MeasuringProcess:
        started.append(MeasuringProcess(*args, **more))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(rounds, "MeasuringProcess", start_and_interrupt)
    with peers.nothing_left(), pytest.raises(KeyboardInterrupt):
        measure_once(pipe(""), PLAN)
    (only,) = started
    assert only.exit_code == -signal.SIGKILL


def test_a_process_that_cannot_be_started_leaves_nothing():
    with peers.nothing_left(), pytest.raises(FileNotFoundError):
        MeasuringProcess("nothing:measure", {}, life_s=9, wait_s=9, env={}, python="/nowhere/python")


def test_it_says_so_and_its_exit_code_is_that_of_a_shell(monkeypatch):
    def interrupt(*_: Any, **__: Any) -> list[Candidate]:
        raise KeyboardInterrupt

    monkeypatch.setattr("kvplug_bench.command.transports", interrupt)
    ended = CliRunner().invoke(bench, [])
    assert (ended.exit_code, ended.output) == (130, "stopped\n")


def test_a_thread_that_waits_is_woken():
    waits, began = threading.Event(), time.monotonic()

    class Queue(SimpleQueue[None]):
        def get(self, *_: Any, **__: Any) -> None:
            waits.set()
            return super().get()

    def interrupt() -> None:
        waits.wait()
        time.sleep(0.1)  # it is inside get() by now
        os.kill(os.getpid(), signal.SIGINT)

    queue, thread = Queue(), threading.Thread(target=interrupt)
    too_late = threading.Timer(20, queue.put, [None])
    too_late.start()
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as interrupts:
        thread.start()
        interrupts.get(queue)
    too_late.cancel()
    thread.join()
    assert time.monotonic() - began < 10


def test_it_is_raised_where_it_is_asked_for_and_at_the_end():
    reached = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupts() as interrupts:
        interrupts.check()
        signal.raise_signal(signal.SIGINT)
        reached.append("after it")
        with pytest.raises(KeyboardInterrupt):
            interrupts.check()
        with pytest.raises(KeyboardInterrupt), deferred_interrupts():
            reached.append("a block that begins later")
        reached.append("the end")
    assert reached == ["after it", "the end"]


def test_it_takes_the_place_of_what_it_caused():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        raise EOFError("the end is gone, since its terminal has interrupted it, too")


def test_a_second_one_does_not_wait():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_block_in_a_block_is_the_same_one():
    with deferred_interrupts() as outer:
        with deferred_interrupts() as inner:
            assert inner is outer
        assert signal.getsignal(signal.SIGINT) is outer
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_handler_than_pythons_own_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_another_thread_than_the_main_one_holds_nothing_back():
    found: list[Any] = []

    def look() -> None:
        with deferred_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]
