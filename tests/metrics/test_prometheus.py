"""Counters and histograms for Prometheus."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvplug.engine.connector.scheduler import SchedulerConnector
from kvplug.errors import ConfigError
from kvplug.metrics.prometheus import BOUNDS_S, COUNTERS, HISTOGRAMS, PrometheusSink, prometheus_sinks
from kvplug.metrics.reasons import Op, Reason
from kvplug.metrics.stats import MAX_SAMPLES, SAMPLED, TransferStats

prometheus_client = pytest.importorskip("prometheus_client")
openmetrics = pytest.importorskip("prometheus_client.openmetrics.exposition")

PROMTOOL = shutil.which("promtool")
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def registry() -> Any:
    return prometheus_client.CollectorRegistry()


def sink_in(registry: Any, **labels: str) -> PrometheusSink:
    counter, histogram = (
        functools.partial(kind, registry=registry)
        for kind in (prometheus_client.Counter, prometheus_client.Histogram)
    )
    return prometheus_sinks([*labels], {0: [*labels.values()]}, counter, histogram)[0]


def snapshot() -> dict[str, Any]:
    stats = TransferStats()
    stats.record("load", 1000, 0.5, tokens=16, trace_id=TRACE)
    stats.record("load", 1000, 100.0, tokens=16)
    stats.record("get", 500, 0.25)
    stats.fail("load", "corrupt")
    stats.opened("nixl rma(cma/memory)")
    stats.slow("get", "redis")
    stats.not_held("peer 10.0.0.5:29555", count=12)
    return stats.snapshot()


def test_every_figure_is_exported_with_the_engines_labels(registry: Any) -> None:
    sink_in(registry, model="smol", engine="0").emit(snapshot(), {"side": "worker"})
    for name, value, labels in (
        ("kvplug_operations_total", 2, {"op": "load"}),
        ("kvplug_operation_bytes_total", 2000, {"op": "load"}),
        ("kvplug_operation_tokens_total", 32, {"op": "load"}),
        ("kvplug_operation_seconds_total", 100.5, {"op": "load"}),
        ("kvplug_load_duration_seconds_count", 2, {}),
        ("kvplug_load_duration_seconds_sum", 100.5, {}),
        ("kvplug_save_duration_seconds_count", None, {}),
        ("kvplug_operation_seconds_total", 0.25, {"op": "get"}),
        ("kvplug_failures_total", 1, {"op": "load", "reason": "corrupt"}),
        ("kvplug_pipes_opened_total", 1, {"route": "nixl rma(cma/memory)"}),
        ("kvplug_slow_paths_total", 1, {"op": "get", "name": "redis"}),
        ("kvplug_not_held_pages_total", 12, {"source": "peer 10.0.0.5:29555"}),
    ):
        assert registry.get_sample_value(name, {"model": "smol", "engine": "0", **labels}) == value, name


def test_every_sampled_operation_has_a_histogram(registry: Any) -> None:
    assert [op for op, _ in HISTOGRAMS.values()] == list(SAMPLED)
    sink_in(registry).emit(snapshot(), {})
    for bound in BOUNDS_S:
        found = registry.get_sample_value("kvplug_load_duration_seconds_bucket", {"le": str(bound)})
        assert found == (1 if bound >= 0.5 else 0), bound


def test_more_operations_than_samples_leave_count_and_sum_right(registry: Any) -> None:
    stats = TransferStats()
    for number in range(MAX_SAMPLES + 100):
        stats.record("load", seconds=100.0 if number < 100 else 0.5)
    sink_in(registry).emit(stats.snapshot(), {})
    values = {
        le: registry.get_sample_value("kvplug_load_duration_seconds_bucket", {"le": le})
        for le in ("1.0", "+Inf")
    }
    assert values == {"1.0": MAX_SAMPLES, "+Inf": MAX_SAMPLES + 100}
    total = registry.get_sample_value("kvplug_load_duration_seconds_sum")
    assert total == pytest.approx(MAX_SAMPLES * 0.5 + 100 * 100.0)


def test_an_exemplar_names_the_trace_of_a_slow_request(registry: Any) -> None:
    sink_in(registry, engine="0").emit(snapshot(), {})
    text = openmetrics.generate_latest(registry).decode()
    (line,) = (line for line in text.splitlines() if " # {" in line)
    assert line.startswith(
        'kvplug_load_duration_seconds_bucket{engine="0",le="1.0"} 1.0 # {trace_id="' + TRACE
    )


@pytest.fixture
def wrapped() -> Any:
    """A class of metrics as an engine has it that wraps Prometheus, without exemplars."""

    class Wrapped:
        made: ClassVar[list[Wrapped]] = []

        def __init__(
            self, name: str, documentation: str, labelnames: Sequence[str], buckets: Sequence[float] = ()
        ) -> None:
            self.name, self.labelnames, self.buckets = name, tuple(labelnames), buckets
            self.raised: Counter[tuple[str, ...]] = Counter()
            self.seen: list[float] = []
            self.made.append(self)

        def labels(self, *values: str) -> Any:
            assert len(values) == len(self.labelnames)
            return SimpleNamespace(
                inc=lambda amount: self.raised.update({values: amount}), observe=self.observe
            )

        def observe(self, value: float) -> None:
            self.seen.append(value)

    return Wrapped


def test_an_engines_own_classes_make_the_metrics_once_and_prometheus_client_is_not_needed(
    wrapped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    prometheus_sinks(["engine"], {0: ["0"]}, wrapped, wrapped)[0].emit(snapshot(), {})
    SchedulerConnector.build_prom_metrics(["engine"], {1: ["1"]}, wrapped, wrapped)[1].emit(snapshot(), {})
    made = {metric.name: metric for metric in wrapped.made}
    assert len(made) == len(wrapped.made)
    assert {name: metric.labelnames for name, metric in made.items()} == {
        **{name: ("engine", *ours) for name, (_, ours, _) in COUNTERS.items()},
        **dict.fromkeys(HISTOGRAMS, ("engine",)),
    }
    assert made["kvplug_operations_total"].raised[("1", "load")] == 2
    loads = made["kvplug_load_duration_seconds"]
    assert loads.seen == [0.5, 100.0] * 2 and loads.buckets == BOUNDS_S
    with pytest.raises(ConfigError, match="labels engine, and model were asked for"):
        prometheus_sinks(["model"], {0: ["0"]}, wrapped, wrapped)
    with pytest.raises(ConfigError, match="only one was given"):
        prometheus_sinks([], {}, wrapped)
    with pytest.raises(ImportError, match=r"pip install kvplug\[prometheus\]"):
        prometheus_sinks([], {})


def test_the_number_of_series_of_an_engine_is_bounded(registry: Any) -> None:
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
    sink_in(registry).emit(stats.snapshot(), {})
    found = {
        (sample.name, *sample.labels.values())
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith("_created")
    }
    histograms = len(HISTOGRAMS) * (len(BOUNDS_S) + 3)
    assert len(found) == len(Op) * (4 + len(Reason)) + 3 * (64 + 1) + histograms


def check_metrics(exposition: bytes) -> str:
    """What promtool finds wrong in names, types and texts."""
    if PROMTOOL is None:
        pytest.skip("promtool is not installed (Debian: the package prometheus)")
    done = subprocess.run([PROMTOOL, "check", "metrics"], input=exposition, capture_output=True, timeout=60)
    return (done.stdout + done.stderr).decode()


def test_promtool_finds_nothing_wrong(registry: Any) -> None:
    sink_in(registry, model="smol").emit(snapshot(), {})
    wrong = b"# TYPE kvplug_loads counter\nkvplug_loads 1\n"
    assert "counter metrics should have" in check_metrics(wrong), "promtool sees what is wrong"
    assert check_metrics(prometheus_client.generate_latest(registry)) == ""


def test_the_processes_of_an_engine_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prometheus_client's multi-process mode, which it chooses when it is imported."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))

    def run(program: str) -> bytes:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    for _ in range(2):
        run(f"""
            from kvplug.metrics.prometheus import prometheus_sinks
            prometheus_sinks(["engine"], {{0: ["0"]}})[0].emit({snapshot()!r}, {{}})
        """)
    exposition = run("""
        import prometheus_client
        from prometheus_client.multiprocess import MultiProcessCollector
        registry = prometheus_client.CollectorRegistry()
        MultiProcessCollector(registry)
        print(prometheus_client.generate_latest(registry).decode())
    """)
    lines = exposition.decode().splitlines()
    assert 'kvplug_operations_total{engine="0",op="load"} 4.0' in lines
    assert 'kvplug_load_duration_seconds_bucket{engine="0",le="1.0"} 2.0' in lines
    assert 'kvplug_load_duration_seconds_sum{engine="0"} 201.0' in lines
    assert check_metrics(exposition) == ""
