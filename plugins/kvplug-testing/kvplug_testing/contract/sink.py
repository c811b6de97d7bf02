"""The laws of sinks, as tests: every snapshot, increments, the end."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import pytest

from kvplug.engine import Sink
from kvplug.kit import Kind, Op, Reason, StatsSnapshot
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import Contract, law

LABELS: Final[Mapping[str, str]] = {
    "connector": "lookup",
    "side": "worker",
    "role": "both",
    "rank": "0",
    "engine_id": "engine-0",
}
"""The labels of an engine's worker."""
_ODD_LABELS: Final = {**LABELS, "connector": "", "engine_id": "!~|{}[]\\'\"%:@#,=;$"}
_PROMPT_S: Final = 5.0
"""For so long the end of a connector waits for its sinks."""


def snapshot_of(op: str, count: int = 1, nbytes: int = 4096, **more: Any) -> dict[str, Any]:
    """What a reporter hands over after so many operations of 1 ms."""
    figures: dict[str, Any] = {
        "count": count,
        "bytes": nbytes * count,
        "tokens": 16 * count,
        "seconds": 1e-3 * count,
    }
    if op in ("load", "save", "match", "wait"):
        figures["samples"] = [[1e-3, "0af7651916cd43dd8448eb211c80319c"]]
    return {"ops": {op: figures}, "failures": {}, **more}


def _snapshots() -> dict[str, StatsSnapshot]:
    every = {op.value: snapshot_of(op.value)["ops"][op.value] for op in Op}
    failures = {op.value: {reason.value: 1 for reason in Reason} for op in Op}
    return {
        "each operation and reason": {"ops": every, "failures": failures},
        "only failures": {"ops": {}, "failures": {"load": {"timeout": 2}}},
        "only routes": {"ops": {}, "failures": {}, "routes": {"nixl rma(rc_mlx5/mlx5_0:1)": 1}},
        "an operation of a later version": snapshot_of("teleport"),
        "a part of a later version": snapshot_of("load", levels={"a": 1}),
        "large figures": snapshot_of("get", count=2**40, nbytes=2**20),
        "an operation that moves nothing": snapshot_of("match", nbytes=0),
    }


class SinkContract(Contract):
    """The suite of sinks. An author's subclass names the sink::

    class TestMine(SinkContract):
        sink = "mine"
    """

    kind: ClassVar[Kind] = Kind.SINK
    _named_by: ClassVar[str] = "sink"
    sink: ClassVar[str] = ""
    """Name of an installed sink."""

    def warm_up(self) -> None:
        """Sinks have no tensors, so torch, which takes a second to import, makes nothing here."""

    def made(self) -> Sink:
        """A new sink. Override it for one that is not installed."""
        made = self.installed("made").load_factory()(self.made_options())
        assert isinstance(made, Sink), f"the factory made {made!r}, which is not a Sink"
        return made

    def counted(self, op: str) -> float:
        """How many operations of this name have arrived where the sink sends them, in all. Skips the test
        unless it is overridden."""
        pytest.skip(f"{self.called} does not override `counted`: what arrives is not judged")

    def stop(self) -> Callable[[], object]:
        """Stop the service that the sink sends to, as SIGSTOP does; returns what lets it go on. Skips the
        test unless it is overridden."""
        pytest.skip(f"{self.called} does not override `stop`: calls of a stopped service are not judged")

    def open(self) -> Sink:
        sink = self.made()
        self.later(sink.close)
        return sink

    @law("SINK-1")
    @pytest.mark.parametrize("name", _snapshots())
    def test_every_snapshot_is_taken_and_left_as_it_is(self, name: str) -> None:
        sink, snapshot = self.open(), _snapshots()[name]
        given, labels = copy.deepcopy(snapshot), dict(LABELS)
        for _ in range(2):
            try:
                sink.emit(given, labels)
            except Exception as e:
                pytest.fail(f"the sink did not take a snapshot with {name}: {e!r}")
        assert given == snapshot, "the sink has changed the snapshot, which the next sink gets as well"
        assert labels == LABELS, "the sink has changed the labels, which all sinks get"

    @law("SINK-2")
    def test_what_arrives_is_the_sum_of_what_was_emitted(self) -> None:
        """And two sinks do not count for each other."""
        expected = {"load": 117, "save": 5}
        before = {op: self.counted(op) for op in expected}
        first, second = self.open(), self.open()
        for op, count in (("load", 3), ("save", 5), ("load", 4)):
            first.emit(snapshot_of(op, count), LABELS)
        second.emit(snapshot_of("load", 10), _ODD_LABELS)
        first.emit({"ops": {}, "failures": {"load": {"timeout": 1}}}, LABELS)
        first.close()
        second.emit(snapshot_of("load", 100), LABELS)
        second.close()

        def found() -> dict[str, float]:
            return {op: self.counted(op) - before[op] for op in expected}

        waits.until(lambda: found() == expected, self.settle_s, f"{expected} to arrive")

    @law("SINK-3")
    def test_sinks_that_come_and_go_leave_nothing(self) -> None:
        with peers.nothing_left(self.settle_s):
            for _ in range(20):
                sink = self.made()
                sink.emit(snapshot_of("load"), LABELS)
                sink.close()

    @law("SINK-3")
    def test_calls_end_in_time_while_the_service_is_stopped(self) -> None:
        sink = self.open()
        sink.emit(snapshot_of("load"), LABELS)
        with contextlib.ExitStack() as stopped:
            stopped.callback(self.stop())
            for call in (lambda: sink.emit(snapshot_of("load"), LABELS), sink.close):
                took_s = waits.Call(call).end().took_s  # an error is as good: the reporter logs it
                assert took_s < _PROMPT_S, f"a call took {took_s:.1f} s while the service was stopped"
