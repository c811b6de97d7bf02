"""Waiting and ending: cancellation, and readers that a writer waits for, that leave or that die."""

from __future__ import annotations

import logging
import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest

from kvplug import PeerGoneError, TimeoutError
from kvplug.kit import CancelledError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import in_time, law
from kvplug_testing.contract.ends import RemoteHandle
from kvplug_testing.contract.general import HOW
from kvplug_testing.contract.queue.ends import QueueGeneral
from kvplug_testing.contract.queue.suite import (
    CHUNKS,
    all_received,
    fill,
    passes,
    read,
    received,
    sent,
    write,
)
from kvplug_testing.waits import Call, raises, until

_VALUES: Final = 60


class Readers(QueueGeneral):
    """Ends that calls wait for, and that end, also in another process and on another host."""

    @law("ALL-4")
    def test_a_waiting_call_can_be_cancelled(self) -> None:
        writer, (reader,) = self.queue()
        for verb in (reader.dequeue, partial(read, reader)):
            cancel = threading.Event()
            call = Call(partial(verb, timeout=None, cancel=cancel))
            assert call.is_blocked()
            cancel.set()
            call.raised(CancelledError)
            raises(CancelledError, partial(verb, timeout=None, cancel=cancel))
        passes(writer, [reader], "after")

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
        for text in (str(error), *warnings):
            _check_named(text, 1, f"pid {os.getpid()}", CHUNKS)
            assert not re.search(r"\brank [02]\b", text), f"it names readers that are not waited for: {text}"

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
    def test_an_indefinite_wait_logs_no_warning_and_has_no_timeout(
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
        with caplog.at_level(logging.WARNING):
            _is_not_waited_for(writer, [one, other], getattr(leaves, how))
            if how == "abort":
                until(lambda: "rank 1" in caplog.text, what="a warning that names reader rank 1")
        assert bool(caplog.records) == (how == "abort"), f"a reader left, and this was logged: {caplog.text}"
        first, gone, _ = writer.readers
        assert (first.gone, first.died) == ("", False)
        assert gone.gone and gone.died == (how == "abort"), f"of a reader after {how}: {gone}"
        assert how == "close" or gone.lag >= CHUNKS, "its lag is not reported"

    # -- in other processes --------------------------------------------------------------------

    def _with_one_elsewhere(self, n_reader: int) -> tuple[MessageQueue, list[MessageQueue], RemoteHandle]:
        """A writer, all readers but that of rank 1, and the reader of rank 1 in another process."""
        ends: list[Any] = self._joined([role == 2 for role in range(n_reader + 1)], {"n_reader": n_reader})
        there = ends.pop(2)
        writer, *readers = (each.end.thing for each in ends)
        return writer, readers, there

    @law("QUEUE-2", "ALL-2", needs="other_processes")
    def test_a_reader_that_is_killed_with_a_chunk_in_use_is_evicted_and_the_others_go_on(self) -> None:
        writer, others, victim = self._with_one_elsewhere(3)
        in_time(write, writer, b"in place")
        victim.run("hold")
        assert [in_time(read, reader) for reader in others] == [b"in place"] * 2
        _is_not_waited_for(writer, others, victim.child.kill)
        dead = writer.readers[1]
        assert dead.gone and dead.died, f"reader rank 1 was killed, and is reported as {dead}"
        assert f"pid {victim.child.pid}" in str(dead), f"the dead reader's process is not named: {dead}"

    @law("ALL-2", "ALL-5", "QUEUE-1", needs="other_processes")
    def test_all_that_a_killed_writer_had_sent_is_received_and_half_a_chunk_never_is(self) -> None:
        ends: list[Any] = self._joined([True, False, False], {"n_reader": 2})
        writer, readers = ends[0], [each.end.thing for each in ends[1:]]
        handle = readers[0].export_handle()
        writer.run("write_half")
        with readers[0].acquire_read(timeout=waits.patience_s) as view:
            writer.child.kill()
            assert bytes(view) == bytes(1000), "what is being read went away with its writer"
        assert in_time(read, readers[1]) == bytes(1000)
        for reader in readers:
            assert [received(reader) for _ in range(CHUNKS - 2)] == [*range(1, CHUNKS - 1)]
            for call in (partial(in_time, read), received, partial(in_time, read)):
                raises(PeerGoneError, partial(call, reader))
        raises(PeerGoneError, lambda: self.attach(handle))

    @law("ALL-3", "QUEUE-3", needs="other_processes")
    def test_a_reader_that_is_stopped_is_named_with_its_process_and_not_evicted(self) -> None:
        writer, (local,), stops = self._with_one_elsewhere(2)
        stops.child.stop()
        held = fill(writer)
        assert [received(local) for _ in range(held)] == [*range(held)]
        error = raises(TimeoutError, lambda: writer.enqueue("x", timeout=0.5))
        _check_named(str(error), 1, f"pid {stops.child.pid}", held)
        assert not writer.readers[1].gone, "a reader that is only stopped was evicted"
        stops.child.cont()
        stops.run("drain", held)

    @law("QUEUE-2", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_a_reader_is_killed_the_others_get_everything(self) -> None:
        rng = random.Random(5)
        for _ in range(24):
            with self.scope():
                writer, (one, other), victim = self._with_one_elsewhere(3)
                victim.begin("drain", _VALUES)
                threading.Timer(0.0005 * 2 ** rng.uniform(0, 6), victim.child.kill).start()
                passes(writer, [one, other], *([at, bytes(at * 2000)] for at in range(_VALUES)))

    # -- on two hosts, which share no memory (capability ``cross_host``) -----------------------------------

    @law("QUEUE-1", "QUEUE-2", "ALL-2", needs="another_host")
    def test_readers_on_both_hosts_get_each_message_once_and_in_order_also_when_one_is_killed(self) -> None:
        """The writer and the reader of rank 0 are on host 0, the reader of rank 1 is on host 1."""
        ends: list[Any] = self.between_hosts((0, 0, 1), n_reader=2, local_reader_ranks=[0])
        for number in range(50):
            self.exchange(ends, number)
        ends.pop().child.kill()
        for number in range(20):
            self.exchange(ends, number)


def _is_not_waited_for(writer: MessageQueue, others: Sequence[MessageQueue], end: Callable[[], Any]) -> None:
    """The reader of rank 1 ends while the writer waits for it; the others get everything."""
    held = fill(writer)
    assert_same([*range(held)], all_received(others[0], held).result())
    waiting = Call(lambda: writer.enqueue("more", timeout=waits.patience_s))
    assert waiting.is_blocked()
    Call(end).result()
    until(lambda: writer.readers[1].gone, what="that the reader that ended is gone")
    assert_same([*range(held)], all_received(others[1], held).result())
    waiting.result(waits.patience_s + 1)
    assert [received(reader) for reader in others] == ["more"] * 2
    passes(writer, others, *range(3 * CHUNKS))


def _check_named(text: str, rank: int, process: str, lag: int) -> None:
    """Check that a text names a reader with its rank, its process and its lag."""
    for pattern in (rf"\brank {rank}\b", rf"{process}\b", rf"\b{lag} messages? behind\b"):
        assert re.search(pattern, text), f"{pattern} is not in what names a reader: {text}"
