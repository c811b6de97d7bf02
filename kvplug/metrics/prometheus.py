"""Metrics for Prometheus. Needs ``prometheus_client`` (``pip install kvplug[prometheus]``).

Only counters and histograms: both work in prometheus_client's multi-process mode, and custom collectors do
not. A histogram takes one observation at a time, so only requests have histograms. Messages and pages, of
which there are many more, are counters.
"""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Sink
from kvplug.metrics.stats import StatsSnapshot, parts_of

COUNTERS: Final[Mapping[str, tuple[str, tuple[str, ...], str]]] = {
    "kvplug_operations_total": ("ops", ("op",), "Operations that succeeded."),
    "kvplug_operation_bytes_total": ("ops", ("op",), "Bytes of tensors that these operations moved."),
    "kvplug_operation_tokens_total": ("ops", ("op",), "Tokens that these operations were about."),
    "kvplug_operation_seconds_total": ("ops", ("op",), "Seconds that these operations took, summed."),
    "kvplug_failures_total": ("failures", ("op", "reason"), "Operations that failed, by reason."),
    "kvplug_pipes_opened_total": (
        "routes",
        ("route",),
        "Pipes that were opened, by what carries their bytes. Only transports that name a route are counted.",
    ),
    "kvplug_slow_paths_total": (
        "slow",
        ("op", "name"),
        "Paths far slower than expected, each counted once: peers by transport (send), stores by name.",
    ),
    "kvplug_not_held_pages_total": (
        "not_held",
        ("source",),
        "Pages of prompts that a store or a peer engine was asked for and does not hold.",
    ),
}
"""Maps each counter's name to its part of a snapshot, kvplug's labels and the help. The counters of one part
are in the order of the numbers there. An engine's labels come before kvplug's."""

_COUNTERS_OF: Final = {
    part: [name for name, (of, _, _) in COUNTERS.items() if of == part] for part, _, _ in COUNTERS.values()
}

HISTOGRAMS: Final[Mapping[str, tuple[str, str]]] = {
    "kvplug_load_duration_seconds": ("load", "Time until a request's KV was loaded."),
    "kvplug_save_duration_seconds": ("save", "Time until KV of a request was stored or sent."),
    "kvplug_match_duration_seconds": (
        "match",
        "Time to find how many tokens of a request are held elsewhere.",
    ),
    "kvplug_wait_duration_seconds": ("wait", "Time that a request waited before its match was known."),
}
"""Maps each histogram's name to its operation and the help. Its only labels are the engine's."""

BOUNDS_S: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histograms' buckets, in seconds: two to a decade, from 10 µs (a match) to 30 s."""

_OURS: Final = frozenset(itertools.chain(("le",), *(labels for _, labels, _ in COUNTERS.values())))
_TRACE_CHARS: Final = 32
"""Length of a trace id. Prometheus refuses an exemplar of more than 128 characters."""

_made: weakref.WeakKeyDictionary[Any, tuple[tuple[str, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The engine's labels and the metrics, by the function that made the counters."""
_making = threading.Lock()


class PrometheusSink(Sink):
    """Adds to the metrics of one engine, under its fixed labels. Ignores the labels of ``emit``."""

    def __init__(self, metrics: Mapping[str, Any], label_values: Sequence[str]) -> None:
        self._metrics = metrics
        self._values = tuple(label_values)
        observe = metrics["kvplug_load_duration_seconds"].observe
        self._takes_exemplars = "exemplar" in inspect.signature(observe).parameters

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        counts, samples = parts_of(snapshot)
        for (part, *ours), numbers in counts.items():
            for name, number in zip(_COUNTERS_OF[part], numbers, strict=False):  # one more counts the samples
                self._metrics[name].labels(*self._values, *ours).inc(number)
        for name, (op, _) in HISTOGRAMS.items():
            if ("ops", op) in counts:
                count, _, _, seconds, _ = counts["ops", op]
                self._observe(name, count, seconds, samples[op])

    def _observe(self, name: str, count: int, total_s: float, samples: Sequence[tuple[float, str]]) -> None:
        """Observe each sample. Operations without a sample count with their mean, so that the histogram's
        count and sum are right."""
        histogram = self._metrics[name]
        if self._values:
            histogram = histogram.labels(*self._values)
        for seconds, trace_id in samples:
            if trace_id and self._takes_exemplars:
                histogram.observe(seconds, exemplar={"trace_id": trace_id[:_TRACE_CHARS]})
            else:
                histogram.observe(seconds)
        num_left = count - len(samples)
        seconds_left = total_s - sum(seconds for seconds, _ in samples)
        for _ in range(num_left):
            histogram.observe(max(0.0, seconds_left / num_left))


def prometheus_sinks(
    label_names: Sequence[str],
    label_values: Mapping[int, Sequence[str]],
    counter: Callable[..., Any] | None = None,
    histogram: Callable[..., Any] | None = None,
) -> dict[int, PrometheusSink]:
    """Return one sink for each engine, by the engine's index.

    Args:
        label_names: the engine's own labels; kvplug's (``op``, ``reason``, …) come after them.
        label_values: maps each engine's index to its label values.
        counter: makes a counter, as ``counter(name, documentation, labelnames)``: the class of an engine that
            wraps Prometheus (under Ray, for example), or ``functools.partial(Counter, registry=...)``.
            ``None``: ``prometheus_client.Counter``, in the global registry. Later calls with the same
            function use the same metrics.
        histogram: makes a histogram, as ``histogram(name, documentation, labelnames, buckets=...)``. Given if
            ``counter`` is.

    Raises:
        ConfigError: a label is one of kvplug's, an engine's number of values is wrong, only one of
            ``counter`` and ``histogram`` was given, or ``counter`` has made kvplug's counters with other
            labels. Lists every fault.
        ImportError: prometheus_client is not installed, and no ``counter`` was given.
    """
    names = tuple(label_names)
    faults = [f"the label {name!r} is one of kvplug's own" for name in names if name in _OURS]
    faults += [
        f"engine {index} has {len(values)} label values for the {len(names)} labels {', '.join(names)}"
        for index, values in label_values.items()
        if len(values) != len(names)
    ]
    if (counter is None) != (histogram is None):
        faults.append("of counter and histogram, only one was given")
    if faults:
        raise ConfigError(*faults, source="Prometheus labels")
    if counter is None or histogram is None:
        try:
            import prometheus_client
        except ImportError as e:
            raise ImportError(
                "metrics for Prometheus need prometheus_client: pip install kvplug[prometheus]"
            ) from e
        counter, histogram = prometheus_client.Counter, prometheus_client.Histogram
    with _making:
        labels, metrics = _made.get(counter, (names, {}))
        if labels != names:
            raise ConfigError(
                f"kvplug's counters have the labels {', '.join(labels) or 'none'}, and"
                f" {', '.join(names) or 'none'} were asked for",
                source="Prometheus labels",
            )
        if not metrics:
            metrics = {
                name: counter(name, text, (*names, *ours)) for name, (_, ours, text) in COUNTERS.items()
            }
            for name, (_, text) in HISTOGRAMS.items():
                metrics[name] = histogram(name, text, names, buckets=BOUNDS_S)
            _made[counter] = names, metrics
    return {index: PrometheusSink(metrics, values) for index, values in label_values.items()}


def sink_fault() -> str:
    """Return why a config's sink "prometheus" cannot be used, or nothing if it can."""
    if importlib.util.find_spec("prometheus_client") is not None:
        return ""
    return "sinks: prometheus needs the package prometheus_client: pip install 'kvplug[prometheus]'"


class ConfiguredPrometheusSink(Sink):
    """The sink of ``sinks = ["prometheus"]`` in a config: it uses the global registry and the labels of
    ``emit``.

    An exporter of that registry, such as an engine's own or ``prometheus_client.start_http_server``, exports
    these metrics too.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, options: object) -> None:
        if fault := sink_fault():
            raise ConfigError(fault)

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        prometheus_sinks(tuple(labels), {0: tuple(labels.values())})[0].emit(snapshot, labels)
