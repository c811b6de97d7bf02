"""Waiting: deadlines, the readers that a writer waits for, warnings, cancellation, and CPU time."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug.transport import BusyError, CancelledError, MessageQueue
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.suite import CHUNKS, QueueSuite, received, sent
from kvplug_testing.waits import Call, raises, until


def acquire_write(queue: MessageQueue, **given: Any) -> None:
    with queue.acquire_write(8, **given):
        pass


def acquire_read(queue: MessageQueue, **given: Any) -> None:
    with queue.acquire_read(**given):
        pass


class Waiting(QueueSuite):
    """Calls that block."""

    @law("ALL-4")
    def test_a_timeout_of_nothing_looks_and_does_not_wait(self) -> None:
        writer, (reader,) = self.queue()
        raises(TimeoutError, lambda: reader.dequeue(timeout=0))
        sent(writer, 1)
        until(lambda: _polled(reader) == 1, what="a message that was enqueued")

    @law("ALL-4")
    def test_who_cancels_is_heard(self) -> None:
        writer, (reader,) = self.queue()
        for verb in (reader.dequeue, lambda **given: acquire_read(reader, **given)):
            cancel = threading.Event()
            call = Call(lambda verb=verb, cancel=cancel: verb(timeout=None, cancel=cancel))  # type: ignore[misc]
            assert call.is_blocked()
            cancel.set()
            call.raised(CancelledError)
        sent(writer, "after")
        assert received(reader) == "after"

    @law("ALL-4")
    def test_a_call_that_is_cancelled_before_it_begins_takes_no_long_wait(self) -> None:
        _, (reader,) = self.queue()
        cancel = threading.Event()
        cancel.set()
        raises(CancelledError, lambda: reader.dequeue(timeout=None, cancel=cancel))

    @law("ALL-4")
    def test_a_second_thread_is_refused_and_nothing_gets_mixed(self) -> None:
        writer, (reader,) = self.queue()
        first = Call(lambda: reader.dequeue(timeout=waits.patience_s))
        assert first.is_blocked()
        raises(BusyError, lambda: reader.dequeue(timeout=0.1))
        sent(writer, "for the first")
        assert first.result() == "for the first"

    # -- readers to wait for -----------------------------------------------------------------------

    @law("QUEUE-3")
    def test_a_writers_timeout_names_the_reader_its_process_and_its_lag(self) -> None:
        writer, readers = self.queue(3)
        for number in range(CHUNKS):
            sent(writer, number)
            received(readers[0])
            received(readers[2])
        error = raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.2))
        check_named(error, 1, f"pid {os.getpid()}", CHUNKS)
        assert not re.search(r"\brank [02]\b", str(error)), (
            f"it names readers that are not waited for: {error}"
        )

    @law("QUEUE-3")
    def test_a_reader_that_has_not_come_is_named(self) -> None:
        writer = self.writer(2)
        self.reader(writer, 0)
        error = raises(TimeoutError, lambda: writer.wait_until_ready(0.2))
        assert re.search(r"\brank 1\b.*not come", str(error)), f"it does not name the missing reader: {error}"

    @law("QUEUE-3")
    def test_how_far_each_reader_has_come_can_be_asked(self) -> None:
        writer, readers = self.queue(2)
        for number in range(3):
            sent(writer, number)
        received(readers[1])
        until(lambda: [each.lag for each in writer.readers] == [3, 2], what="lags of 3 and 2 messages")
        assert [each.rank for each in writer.readers] == [0, 1]
        assert not any(each.gone or each.died for each in writer.readers)

    @law("QUEUE-3")
    def test_a_long_wait_is_warned_of_again_and_again_and_says_whom_for(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, readers = self.queue(2, warning_interval_s=0.1)
        for number in range(CHUNKS):
            sent(writer, number)
            received(readers[0])
        with caplog.at_level(logging.WARNING):
            raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.55))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert 2 <= len(warnings) <= 6, f"0.55 s at an interval of 0.1 s, and these warnings: {warnings}"
        for warning in warnings:
            check_named(warning, 1, f"pid {os.getpid()}", CHUNKS)

    @law("QUEUE-3")
    def test_a_reader_warns_that_it_waits_for_the_writer(self, caplog: pytest.LogCaptureFixture) -> None:
        _, (reader,) = self.queue(warning_interval_s=0.1)
        with caplog.at_level(logging.WARNING):
            raises(TimeoutError, lambda: reader.dequeue(timeout=0.35))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert warnings, "0.35 s at an interval of 0.1 s, and nothing was logged"
        assert all("writer" in warning for warning in warnings), f"they do not name the writer: {warnings}"

    @law("QUEUE-3")
    def test_who_waits_indefinitely_is_not_warned_and_waits_without_end(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, (reader,) = self.queue(warning_interval_s=0.1, timeout_s=0.2)
        with caplog.at_level(logging.WARNING):
            call = Call(lambda: reader.dequeue(indefinite=True))
            assert call.is_blocked(0.6), f"it ended: {call.error!r}"
            sent(writer, "at last")
            assert call.result() == "at last"
            raises(TimeoutError, lambda: reader.dequeue(timeout=0.3, indefinite=True))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert not warnings, f"an indefinite wait was warned of: {warnings}"

    # -- CPU time ----------------------------------------------------------------------------------

    @law("QUEUE-4")
    def test_readers_that_wait_cost_next_to_no_processor_time(self) -> None:
        writer, readers = self.queue(2)
        calls = [Call(lambda end=end: end.dequeue(timeout=waits.patience_s)) for end in readers]  # type: ignore[misc]
        assert all(call.is_blocked() for call in calls)
        began, used = time.monotonic(), time.process_time()
        time.sleep(1.0)
        took, used = time.monotonic() - began, time.process_time() - used
        sent(writer, "wake up")
        assert [call.result() for call in calls] == ["wake up", "wake up"]
        assert used < 0.1 * took, f"two readers waited {took:.2f} s and used {used:.2f} s of processor time"


def _polled(reader: MessageQueue) -> Any:
    with contextlib.suppress(TimeoutError):
        return reader.dequeue(timeout=0)


def check_named(said: object, rank: int, process: str, lag: int) -> None:
    """Check that a text names a reader with its rank, its process and its lag."""
    text = str(said)
    missing = [
        what
        for what, pattern in (
            (f"its rank, {rank}", rf"\brank {rank}\b"),
            (f"its process, {process}", rf"{re.escape(process)}\b"),
            (f"its lag, {lag} messages", rf"\b{lag} messages? behind\b"),
        )
        if not re.search(pattern, text)
    ]
    assert not missing, (
        f"a reader that is waited for is to be named, and {', '.join(missing)} is not in: {text}"
    )
