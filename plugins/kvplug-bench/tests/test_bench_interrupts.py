"""SIGINT while ``kvplug bench`` measures: it ends wherever that comes, and no process is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from kvplug_bench import rounds
from kvplug_bench.candidate import Candidate
from kvplug_bench.interrupts import deferred_interrupts
from kvplug_bench.processes import MeasuringProcess
from kvplug_bench.rounds import Plan, measure_once
from kvplug_testing import peers

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """SIGINT is not ignored, as it is in what a shell without job control starts in its background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_process_that_has_just_been_started_is_ended(monkeypatch):
    started = []

    def start_and_interrupt(*args: Any, **more: Any) -> MeasuringProcess:
        started.append(MeasuringProcess(*args, **more))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(rounds, "MeasuringProcess", start_and_interrupt)
    with peers.nothing_left(), pytest.raises(KeyboardInterrupt):
        measure_once(Candidate(name="cat", kind="pipe", ops=()), Plan(sizes=(64,)))
    (only,) = started
    assert only.exit_code == -signal.SIGKILL


def test_a_process_that_cannot_be_started_leaves_nothing():
    with peers.nothing_left(), pytest.raises(FileNotFoundError):
        MeasuringProcess("nothing:measure", {}, life_s=9, wait_s=9, env={}, python="/nowhere/python")


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


def test_a_second_one_does_not_wait():
    with pytest.raises(KeyboardInterrupt), deferred_interrupts():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_another_handler_than_pythons_own_stays():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with deferred_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
