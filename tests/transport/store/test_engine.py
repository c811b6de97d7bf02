"""The engine of jobs by itself. The conformance kit judges it in every store that runs on it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import pytest

from kvplug.errors import ClosedError
from kvplug.net.deadline import Deadline
from kvplug.transport.store.engine import JobEngine, JobTask
from kvplug.transport.store.job import Job
from kvplug.transport.store.results import MissReason
from kvplug_testing.waits import patience_s, until


class Copies(JobTask):
    """Each step copies for as long as :attr:`gate` is closed."""

    def __init__(self, num_steps: int, timeout: float = patience_s) -> None:
        super().__init__(Job(num_steps, Deadline.after(timeout)), num_steps)
        self.gate = threading.Event()
        self.begun = threading.Event()

    def do(self, step: int) -> None:
        with self.copying():
            self.begun.set()
            self.gate.wait(patience_s)
        self.note(step, None)


class PutOf(Copies):
    is_put = True


@pytest.fixture
def engine() -> Iterator[JobEngine]:
    made = JobEngine("test", 2)
    yield made
    made.give_up()
    made.join(Deadline.after(patience_s))


def test_a_job_is_done_at_its_deadline_and_settles_when_the_copy_has_ended(engine: JobEngine) -> None:
    task = Copies(2, timeout=1.0)
    engine.submit(task)
    assert task.begun.wait(patience_s)
    assert task.job.wait(patience_s) == [MissReason.TIMEOUT] * 2
    assert not task.job.settled
    task.gate.set()
    assert task.job.wait_settled(patience_s)
    until(lambda: not engine.tasks())


def test_closing_ends_all_but_puts_and_waits_for_them(engine: JobEngine) -> None:
    get, put = Copies(1), PutOf(1)
    for task in (get, put):
        engine.submit(task)
        assert task.begun.wait(patience_s)
    threading.Timer(0.1, put.gate.set).start()
    engine.close(Deadline.after(patience_s))
    assert put.job.results() == [None]
    assert get.job.results() == [MissReason.CLOSED]
    get.gate.set()
    with pytest.raises(ClosedError):
        engine.check_open()
    late = Copies(1)
    engine.submit(late)
    assert late.job.results() == [MissReason.CLOSED]


def test_a_task_that_was_ended_before_is_forgotten(engine: JobEngine) -> None:
    task = Copies(1)
    task.end(MissReason.CANCELLED)
    engine.submit(task)
    assert task.job.results() == [MissReason.CANCELLED]
    assert not engine.tasks() and not task.begun.wait(0.05)


def test_a_step_that_is_stuck_holds_up_no_other_task() -> None:
    engine = JobEngine("test", 1, stuck_s=0.05)
    stuck, other = Copies(1), Copies(1)
    other.gate.set()
    engine.submit(stuck)
    assert stuck.begun.wait(patience_s)
    time.sleep(0.1)
    engine.submit(other)
    assert other.job.wait(patience_s) == [None]
    stuck.gate.set()
    assert engine.give_up() and not engine.give_up()
    engine.join(Deadline.after(patience_s))


def test_alarms_come_in_their_order_and_not_when_cancelled(engine: JobEngine) -> None:
    called: list[str] = []
    now = time.monotonic()
    engine.at(now + 0.6, lambda: called.append("last"))
    engine.at(now + 0.1, lambda: called.append("first"))
    engine.at(now + 0.5, lambda: called.append("cancelled")).cancel()
    engine.at(math.inf, lambda: called.append("never"))
    until(lambda: called == ["first", "last"])
    engine.give_up()
    engine.at(0.0, lambda: called.append("late"))
    engine.join(Deadline.after(patience_s))
    assert called == ["first", "last"]
