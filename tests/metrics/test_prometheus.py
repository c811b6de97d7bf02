"""Counters for Prometheus."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvplug.engine.connector.scheduler import SchedulerConnector
from kvplug.errors import ConfigError
from kvplug.metrics.prometheus import COUNTERS, prometheus_sinks
from kvplug.metrics.reasons import Op, Reason
from kvplug.metrics.stats import BOUNDS_S, TransferStats

prometheus_client = pytest.importorskip("prometheus_client")


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def in_registry(registry: Any) -> Any:
    return functools.partial(prometheus_client.Counter, registry=registry)


def snapshot() -> dict[str, Any]:
    stats = TransferStats()
    stats.record("load", 1000, 0.5, tokens=16)
    stats.record("load", 1000, 100.0, tokens=16)
    stats.fail("load", "corrupt")
    stats.opened("nixl rma(cma/memory)")
    stats.not_held("peer 10.0.0.5:29555", count=12)
    return stats.snapshot()


def test_every_figure_is_exported_with_the_engines_labels(registry: Any) -> None:
    prometheus_sinks(["model", "engine"], {0: ["smol", "0"]}, in_registry(registry))[0].emit(
        snapshot(), {"side": "worker"}
    )
    for name, value, labels in (
        ("kvplug_transfers_total", 2, {"op": "load"}),
        ("kvplug_transfer_bytes_total", 2000, {"op": "load"}),
        ("kvplug_transfer_tokens_total", 32, {"op": "load"}),
        ("kvplug_transfer_seconds_total", 100.5, {"op": "load"}),
        ("kvplug_transfer_failures_total", 1, {"op": "load", "reason": "corrupt"}),
        ("kvplug_pipes_total", 1, {"route": "nixl rma(cma/memory)"}),
        ("kvplug_not_held_pages_total", 12, {"source": "peer 10.0.0.5:29555"}),
    ):
        assert registry.get_sample_value(name, {"model": "smol", "engine": "0", **labels}) == value, name


def test_buckets_are_cumulative_and_end_with_everything(registry: Any) -> None:
    prometheus_sinks([], {0: []}, in_registry(registry))[0].emit(snapshot(), {})
    name = "kvplug_transfer_duration_bucket_total"
    for bound in BOUNDS_S:
        found = registry.get_sample_value(name, {"op": "load", "le": f"{bound:g}"})
        assert found == (1 if bound >= 0.5 else 0), bound
    assert registry.get_sample_value(name, {"op": "load", "le": "+Inf"}) == 2


@pytest.fixture
def wrapped() -> Any:
    """A class of counters as an engine has it that wraps Prometheus, and keeps its counters itself."""

    class Wrapped:
        made: ClassVar[list[Wrapped]] = []

        def __init__(self, name: str, documentation: str, labelnames: Sequence[str]) -> None:
            self.name, self.labelnames = name, tuple(labelnames)
            self.raised: Counter[tuple[str, ...]] = Counter()
            self.made.append(self)

        def labels(self, *values: str) -> Any:
            assert len(values) == len(self.labelnames)
            return SimpleNamespace(inc=lambda amount: self.raised.update({values: amount}))

    return Wrapped


def test_an_engines_own_class_makes_the_counters_once_and_prometheus_client_is_not_needed(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    prometheus_sinks(["engine"], {0: ["0"]}, counter=wrapped)[0].emit(snapshot(), {})
    SchedulerConnector.build_prom_metrics(["engine"], {1: ["1"]}, counter=wrapped)[1].emit(snapshot(), {})
    assert {counter.name: counter.labelnames for counter in wrapped.made} == {
        name: ("engine", *ours) for name, (ours, _) in COUNTERS.items()
    }
    assert len(wrapped.made) == len(COUNTERS)
    (transfers,) = (counter for counter in wrapped.made if counter.name == "kvplug_transfers_total")
    assert transfers.raised == {("0", "load"): 2, ("1", "load"): 2}
    with pytest.raises(ConfigError, match="labels engine, and model were asked for"):
        prometheus_sinks(["model"], {0: ["0"]}, counter=wrapped)
    with pytest.raises(ImportError, match=r"pip install kvplug\[prometheus\]"):
        prometheus_sinks([], {})


def test_the_number_of_series_of_an_engine_is_bounded(registry: Any) -> None:
    sink = prometheus_sinks([], {0: []}, in_registry(registry))[0]
    stats = TransferStats()
    for number in range(500):
        stats.record(f"op {number}")
        stats.fail(f"op {number}", f"reason {number}")
        stats.opened(f"route {number}")
        stats.slow("send", f"transport {number}")
        stats.not_held(f"source {number}")
    for op in Op:
        stats.record(op)
        for reason in Reason:
            stats.fail(op, reason)
    sink.emit(stats.snapshot(), {})
    found = {
        (sample.name, *sample.labels.values())
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    assert len(found) == len(Op) * (4 + len(BOUNDS_S) + 1 + len(Reason)) + 3 * (64 + 1)
    assert {name for name, *_ in found} == set(COUNTERS)
