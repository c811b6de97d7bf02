"""Where figures go, and what happens when they cannot."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping

import pytest

from kvplug.metrics.sinks import LogSink, Reporter, Sink
from kvplug.metrics.stats import StatsSnapshot, TransferStats
from kvplug_testing.waits import until


class Kept(Sink):
    def __init__(self) -> None:
        self.seen: list[tuple[StatsSnapshot, Mapping[str, str]]] = []
        self.arrived = threading.Semaphore(0)

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        self.seen.append((snapshot, dict(labels)))
        self.arrived.release()


class Closed(Kept):
    """Notes when it was closed."""

    def close(self) -> None:
        self.seen.append(({"closed": True}, {}))


class Broken(Sink):
    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        raise RuntimeError("the wall is down")


def one_load(stats: TransferStats) -> None:
    stats.record("load", 3_000_000, 0.5, tokens=16)
    stats.fail("load", "timeout")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "kvplug-metrics"]


def test_the_log_gets_a_line_for_each_operation(caplog: pytest.LogCaptureFixture) -> None:
    stats = TransferStats()
    one_load(stats)
    stats.fail("save", "no_room")
    with caplog.at_level(logging.DEBUG):
        LogSink().emit(stats.snapshot(), {"connector": "lookup", "side": "worker"})
    lines = [
        "connector=lookup side=worker load: 1 done, 3.0 MB, 16 tokens, 0.5000 s; failed: timeout 1",
        "connector=lookup side=worker save: 0 done, 0.0 MB, 0 tokens, 0.0000 s; failed: no_room 1",
    ]
    assert caplog.messages == lines
    levels = {(record.name, record.levelno) for record in caplog.records}
    assert levels == {("kvplug.metrics.sinks", logging.INFO)}


def test_a_reporter_hands_over_what_is_new_and_only_that() -> None:
    stats, sink = TransferStats(), Kept()
    reporter = Reporter(stats, [sink], {"side": "worker"}, interval_s=1000)
    idle = Reporter(stats, [])
    assert len(threads()) == 1, "one without sinks has no thread"
    one_load(stats)
    for each in (reporter, idle, reporter):
        each.emit()
    one_load(stats)
    for each in (reporter, idle, reporter):
        each.close()
    assert threads() == [] and len(sink.seen) == 2
    for snapshot, labels in sink.seen:
        assert snapshot["ops"]["load"]["count"] == 1 and labels == {"side": "worker"}


def test_sinks_that_are_owned_are_closed_after_the_last_figures_and_the_others_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Fails(Kept):
        def close(self) -> None:
            raise RuntimeError("no such file")

    stats, fails, ours, theirs = TransferStats(), Fails(), Closed(), Closed()
    reporter = Reporter(stats, [theirs], owned=[fails, ours], interval_s=1000)
    one_load(stats)
    reporter.close()
    reporter.close()
    assert [list(snapshot) for snapshot, _ in ours.seen] == [["ops", "failures"], ["closed"]]
    assert [list(snapshot) for snapshot, _ in theirs.seen] == [["ops", "failures"]]
    assert "no such file" in caplog.text


@pytest.mark.timeout(30)
def test_a_sink_that_hangs_does_not_hang_the_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("kvplug.metrics.sinks._CLOSE_S", 0.05)
    entered, leave = threading.Event(), threading.Event()

    class Hanging(Sink):
        def emit(self, *_: object) -> None:
            entered.set()
            leave.wait(20)

    stats = TransferStats()
    one_load(stats)
    reporter = Reporter(stats, [Hanging()], interval_s=0.01)
    assert entered.wait(20)
    reporter.close()
    assert "hangs" in caplog.text
    leave.set()
    until(lambda: not threads())


def test_a_sink_that_fails_is_reported_once_and_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats, sink = TransferStats(), Kept()
    reporter = Reporter(stats, [Broken(), sink], interval_s=1000)
    for _ in range(3):
        one_load(stats)
        reporter.emit()
    reporter.close()
    assert len(sink.seen) == 3
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "Broken" in warnings[0].getMessage()
    assert "the wall is down" in str(warnings[0].exc_text or warnings[0].exc_info)
