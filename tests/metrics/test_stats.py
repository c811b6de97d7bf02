"""Counting, merging, and each reader's own place in the figures."""

from __future__ import annotations

import builtins
import threading
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kvplug import errors
from kvplug.metrics.reasons import Op, Reason, reason_of
from kvplug.metrics.stats import MAX_SAMPLES, StatsReader, TransferStats
from kvplug_testing.waits import Call

FIGURES = {"count": 1, "bytes": 1, "tokens": 0, "seconds": 0.0}

CALLS = st.lists(
    st.tuples(
        st.sampled_from([*Op]),
        st.integers(0, 2**40),
        st.integers(0, 400).map(lambda eighths: eighths / 8),  # binary fractions add up exactly
        st.integers(0, 5000),
    )
    | st.tuples(st.sampled_from([*Op]), st.sampled_from([*Reason])),
    max_size=20,
)


def counted(calls: list[Any], stats: TransferStats | None = None) -> TransferStats:
    stats = stats or TransferStats()
    for call in calls:
        if len(call) == 2:
            stats.fail(*call)
        else:
            op, nbytes, seconds, tokens = call
            stats.record(op, nbytes, seconds, tokens=tokens)
    return stats


def test_what_is_recorded_is_added_up_by_operation_and_failures_by_reason() -> None:
    stats = TransferStats()
    assert stats.snapshot() == {"ops": {}, "failures": {}}
    assert stats.take() is None
    stats.record("load", 1000, 0.25, tokens=16)
    stats.record("load", 500, 0.5, tokens=8, count=2)
    stats.record("match")
    for reason in ("expired", "refused", "transport"):
        stats.fail("load", reason)
    stats.fail("load", "corrupt", count=2)
    stats.fail("save", "no_room")
    stats.merge(stats)  # also with itself
    found = stats.snapshot()
    assert found["ops"].keys() == {"load", "match"}
    figures = [found["ops"]["load"][name] for name in ("count", "bytes", "tokens", "seconds")]
    assert figures == [6, 4000, 64, 2.5]
    assert found["failures"] == {
        "load": {"expired": 2, "refused": 2, "corrupt": 4, "transport": 2},
        "save": {"no_room": 2},
    }


def test_names_that_are_not_known_never_make_a_new_series() -> None:
    stats = TransferStats()
    for number in range(100):
        stats.record(f"op {number}", 1)
        stats.fail("load", f"reason {number}")
        stats.fail(f"op {number}", "timeout")
    found = stats.snapshot()
    assert found["ops"].keys() == {"other"} and found["ops"]["other"]["count"] == 100
    assert found["failures"] == {"load": {"other": 100}, "other": {"timeout": 100}}


@given(batches=st.lists(CALLS, max_size=5))
def test_what_is_taken_piece_by_piece_adds_up_to_the_whole(batches: list[list[Any]]) -> None:
    stats, sum_ = TransferStats(), TransferStats()
    for batch in batches:
        counted(batch, stats)
        taken = stats.take()
        assert (taken is None) == (not batch)
        if taken is not None:
            assert taken == counted(batch).snapshot()
            sum_.merge(taken)
    assert sum_.snapshot() == stats.snapshot()


def test_readers_do_not_take_from_each_other() -> None:
    stats = TransferStats()
    early = StatsReader(stats)
    stats.record("send", 1)
    first = stats.take()
    assert first is not None and first == early.take()
    stats.record("send", 2)
    late = StatsReader(stats)
    for reader, nbytes in ((early, 2), (late, 3)):
        taken = reader.take()
        assert taken is not None and taken["ops"]["send"]["bytes"] == nbytes
        assert reader.take() is None


def test_single_durations_of_requests_are_kept_for_each_reader_up_to_a_limit() -> None:
    stats = TransferStats()
    late = StatsReader(stats)
    stats.record("get", 1, 0.5, trace_id="of a page")
    stats.record("load", 1, 0.5)
    assert stats.take() == stats.snapshot()
    stats.record("load", 1, 0.25, trace_id="4b", count=2)
    fresh = stats.take()
    assert fresh is not None and "get" not in fresh["ops"]
    assert fresh["ops"]["load"]["samples"] == [[0.25, "4b"], [0.25, "4b"]]
    stats.merge(fresh)
    both = late.take()
    assert both is not None and "samples" not in both["ops"]["get"]
    assert both["ops"]["load"]["samples"] == [[0.5, ""], *[[0.25, "4b"]] * 4]
    for number in range(MAX_SAMPLES + 1):
        stats.record("wait", seconds=number)
    taken = stats.take()
    assert taken is not None and taken["ops"]["wait"]["count"] == MAX_SAMPLES + 1
    assert taken["ops"]["wait"]["samples"] == [[number, ""] for number in range(1, MAX_SAMPLES + 1)]
    assert TransferStats.from_snapshot(taken).snapshot() == taken


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        {},
        {"ops": [], "failures": {}},
        {"ops": {"send": {}}, "failures": {}},
        {"ops": {}, "failures": {"send": {"timeout": -1}}},
        {"ops": {"send": {**FIGURES, "samples": [[-1.0, ""]]}}, "failures": {}},
        {"ops": {"send": {**FIGURES, "count": -1}}, "failures": {}},
        {"ops": {"send": {**FIGURES, "seconds": float("nan")}}, "failures": {}},
    ],
)  # fmt: skip
def test_an_invalid_snapshot_is_refused_and_changes_nothing(wrong: Any) -> None:
    stats = counted([(Op.SEND, 5, 0.0, 0)])
    before = stats.snapshot()
    with pytest.raises(ValueError, match="not a snapshot of transfer stats"):
        stats.merge(wrong)
    assert stats.snapshot() == before


def test_nothing_is_lost_when_many_threads_count_and_one_looks() -> None:
    stats, taken = TransferStats(), TransferStats()
    done = threading.Event()

    def look() -> None:
        while True:
            last = done.is_set()
            found = stats.take()
            if found is not None:
                taken.merge(found)
            if last:
                return

    def count() -> None:
        for _ in range(5000):
            stats.record("send", 3, 0.5, tokens=1)
            stats.fail("recv", "timeout")

    looker, counters = Call(look), [Call(count) for _ in range(4)]
    for counter in counters:
        counter.result(60)
    done.set()
    looker.result(60)
    for found in (stats.snapshot(), taken.snapshot()):
        assert found["ops"]["send"]["count"] == 20_000
        assert found["ops"]["send"]["bytes"] == 60_000
        assert found["failures"] == {"recv": {"timeout": 20_000}}


# -- reasons -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (errors.TimeoutError("x"), "timeout"),
        (builtins.TimeoutError("x"), "timeout"),
        (errors.PeerGoneError("x"), "peer_gone"),
        (ConnectionResetError("x"), "peer_gone"),
        (errors.IntegrityError("x"), "corrupt"),
        (errors.WireError("x"), "corrupt"),
        (errors.EntryGoneError("x"), "gone"),
        (errors.CapacityError("x"), "too_large"),
        (errors.TransportError("x"), "transport"),
        (OSError("x"), "transport"),
        (errors.HandshakeError("x"), "refused"),
        (errors.AuthenticationError("x"), "refused"),
        (errors.InsecureAddressError("x"), "refused"),
        (errors.UnsupportedError("x"), "refused"),
        (errors.LayoutError("x"), "refused"),
        (errors.ClosedError("x"), "closed"),
        (errors.KvplugError("x"), "other"),
        (ValueError("x"), "other"),
        (KeyboardInterrupt(), "other"),
    ],
    ids=lambda given: type(given).__name__ if isinstance(given, BaseException) else given,
)
def test_every_error_has_its_reason(error: BaseException, reason: str) -> None:
    assert reason_of(error) == reason
