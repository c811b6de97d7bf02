"""Waiting and ending: cancellation, and readers that a writer waits for, that leave or that die."""

from __future__ import annotations

import logging
import os
import re
import threading
from functools import partial

import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import BusyError, CancelledError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.general import HOW
from kvplug_testing.contract.queue.suite import (
    CHUNKS,
    QueueSuite,
    all_received,
    fill,
    in_time,
    passes,
    read,
    received,
    sent,
    write,
)
from kvplug_testing.waits import Call, raises, until


class Readers(QueueSuite):
    """Whom calls wait for, and what they do when it ends."""

    @law("ALL-4")
    def test_who_cancels_is_heard(self) -> None:
        writer, (reader,) = self.queue()
        for verb in (reader.dequeue, partial(read, reader)):
            cancel = threading.Event()
            call = Call(partial(verb, timeout=None, cancel=cancel))
            assert call.is_blocked()
            cancel.set()
            call.raised(CancelledError)
            raises(CancelledError, partial(verb, timeout=None, cancel=cancel))
        passes(writer, [reader], "after")

    @law("ALL-4")
    def test_a_second_thread_is_refused_and_nothing_gets_mixed(self) -> None:
        writer, (reader,) = self.queue()
        first = Call(lambda: reader.dequeue(timeout=waits.patience_s))
        assert first.is_blocked()
        raises(BusyError, lambda: reader.dequeue(timeout=0.1))
        sent(writer, "for the first")
        assert first.result() == "for the first"

    @law("QUEUE-3")
    def test_a_long_wait_and_its_timeout_name_the_reader_its_process_and_its_lag(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, readers = self.queue(3, warning_interval_s=0.1)
        passes(writer, [readers[0], readers[2]], *range(CHUNKS))
        until(lambda: [each.lag for each in writer.readers] == [0, CHUNKS, 0], what="the readers' lags")
        with caplog.at_level(logging.WARNING):
            error = raises(TimeoutError, lambda: writer.enqueue("no room", timeout=0.55))
        warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert 2 <= len(warnings) <= 6, f"0.55 s at an interval of 0.1 s, and these warnings: {warnings}"
        for said in (str(error), *warnings):
            check_named(said, 1, f"pid {os.getpid()}", CHUNKS)
            assert not re.search(r"\brank [02]\b", said), f"it names readers that are not waited for: {said}"

    @law("QUEUE-3", "QUEUE-2")
    def test_a_reader_that_has_not_come_is_named_and_one_that_died_is_not_waited_for(self) -> None:
        writer = self.writer(2)
        reader = self.reader(writer, 0)
        error = raises(TimeoutError, lambda: writer.wait_until_ready(0.2))
        assert re.search(r"\brank 1\b.*not come", str(error)), f"it does not name the missing reader: {error}"
        dies = self.reader(writer, 1)
        calls = [Call(end.wait_until_ready) for end in (writer, reader)]
        assert calls[0].is_blocked()
        dies.abort()
        for call in calls:
            call.result()

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
        assert not caplog.records, f"an indefinite wait was warned of: {caplog.text}"

    # -- ends ----------------------------------------------------------------------------------

    @law("ALL-1", "ALL-2")
    @pytest.mark.parametrize("how", HOW)
    def test_a_writer_that_ends_is_gone_after_what_it_had_sent(self, how: str) -> None:
        writer, readers = self.queue(2)
        in_time(write, writer, b"chunk")
        sent(writer, *range(1, CHUNKS))
        Call(getattr(writer, how)).result()
        for reader in readers:
            assert in_time(read, reader) == b"chunk"
            assert_same([*range(1, CHUNKS)], all_received(reader, CHUNKS - 1).result())
            for call in (reader.dequeue, partial(read, reader), reader.wait_until_ready):
                raises(PeerGoneError, call)

    @law("QUEUE-2")
    @pytest.mark.parametrize("how", HOW)
    def test_a_reader_that_ends_is_waited_for_no_longer_and_one_that_died_is_named(
        self, how: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        writer, (one, leaves, other) = self.queue(3)
        held = fill(writer)
        assert_same([*range(held)], all_received(one, held).result())
        waiting = Call(lambda: writer.enqueue("more", timeout=waits.patience_s))
        assert waiting.is_blocked()
        with caplog.at_level(logging.WARNING):
            Call(getattr(leaves, how)).result()
            until(lambda: writer.readers[1].gone, what="that the reader that ended is gone")
            assert_same([*range(held)], all_received(other, held).result())
            waiting.result()
            if how == "abort":
                until(lambda: "rank 1" in caplog.text, what="a warning that names reader rank 1")
        assert bool(caplog.records) == (how == "abort"), f"a reader left, and this was logged: {caplog.text}"
        assert [received(reader) for reader in (one, other)] == ["more"] * 2
        passes(writer, [one, other], *range(3 * CHUNKS))
        first, gone, _ = writer.readers
        assert (first.gone, first.died) == ("", False)
        assert gone.gone and gone.died == (how == "abort"), f"of a reader after {how}: {gone}"
        assert how == "close" or gone.lag >= held, "how far behind it was is not said"


def check_named(said: str, rank: int, process: str, lag: int) -> None:
    """Check that a text names a reader with its rank, its process and its lag."""
    for pattern in (rf"\brank {rank}\b", rf"{process}\b", rf"\b{lag} messages? behind\b"):
        assert re.search(pattern, said), f"{pattern} is not in what names a reader: {said}"
