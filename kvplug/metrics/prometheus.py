"""Metrics for Prometheus. Needs ``prometheus_client`` (``pip install kvplug[prometheus]``).

Every series, duration buckets included, is a plain counter: a counter can be increased by the amounts in a
snapshot, and also works in prometheus_client's multi-process mode. The library's ``Histogram`` takes one
observation at a time, and its custom collectors do not work in that mode. ``histogram_quantile`` needs only
the label ``le``.
"""

from __future__ import annotations

import importlib.util
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from kvplug.errors import ConfigError
from kvplug.metrics.sinks import Sink
from kvplug.metrics.stats import BOUNDS_S, StatsSnapshot

COUNTERS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "kvplug_transfers_total": (("op",), "Operations that succeeded."),
    "kvplug_transfer_bytes_total": (("op",), "Bytes of tensors that operations moved."),
    "kvplug_transfer_tokens_total": (("op",), "Tokens that operations were about."),
    "kvplug_transfer_seconds_total": (("op",), "Seconds that operations took, summed."),
    "kvplug_transfer_duration_bucket_total": (
        ("op", "le"),
        "Operations that took at most le seconds (cumulative, as in a histogram).",
    ),
    "kvplug_transfer_failures_total": (("op", "reason"), "Operations that failed, by reason."),
    "kvplug_pipes_total": (("route",), "Pipes that were opened, by what carries their bytes."),
    "kvplug_slow_paths_total": (
        ("transport", "op"),
        "Peers to which a transport carries far less than it should (send); slow stores (get, put).",
    ),
    "kvplug_not_held_pages_total": (
        ("source",),
        "Pages of prompts that a store or a peer engine was asked for and does not hold.",
    ),
}
"""Maps each counter's name to kvplug's labels and the help. An engine's labels come before kvplug's."""

_LE: Final = (*(f"{bound:g}" for bound in BOUNDS_S), "+Inf")
_OURS: Final = frozenset(itertools.chain.from_iterable(labels for labels, _ in COUNTERS.values()))


_made: weakref.WeakKeyDictionary[Any, tuple[tuple[str, ...], dict[str, Any]]] = weakref.WeakKeyDictionary()
"""The engine's labels and the counters, by the function that made the counters."""
_making = threading.Lock()


class PrometheusSink(Sink):
    """Increases the counters of one engine, under its fixed labels. Ignores the labels of ``emit``."""

    def __init__(self, counters: Mapping[str, Any], label_values: Sequence[str]) -> None:
        self._counters = counters
        self._values = tuple(label_values)

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        for op, figures in snapshot["ops"].items():
            self._increase("kvplug_transfers_total", figures["count"], op)
            self._increase("kvplug_transfer_bytes_total", figures["bytes"], op)
            self._increase("kvplug_transfer_tokens_total", figures["tokens"], op)
            self._increase("kvplug_transfer_seconds_total", figures["seconds"], op)
            for le, count in zip(_LE, itertools.accumulate(figures["buckets"]), strict=True):
                self._increase("kvplug_transfer_duration_bucket_total", count, op, le)
        for op, reasons in snapshot["failures"].items():
            for reason, count in reasons.items():
                self._increase("kvplug_transfer_failures_total", count, op, reason)
        for route, count in snapshot.get("routes", {}).items():
            self._increase("kvplug_pipes_total", count, route)
        for op, names in snapshot.get("slow", {}).items():
            for name, count in names.items():
                self._increase("kvplug_slow_paths_total", count, name, op)
        for source, count in snapshot.get("not_held", {}).items():
            self._increase("kvplug_not_held_pages_total", count, source)

    def _increase(self, name: str, amount: float, *ours: str) -> None:
        self._counters[name].labels(*self._values, *ours).inc(amount)


def prometheus_sinks(
    label_names: Sequence[str],
    label_values: Mapping[int, Sequence[str]],
    counter: Callable[..., Any] | None = None,
) -> dict[int, PrometheusSink]:
    """Return one sink for each engine, by the engine's index.

    Args:
        label_names: the engine's own labels; kvplug's (``op``, ``le``, ``reason``, …) come after them.
        label_values: maps each engine's index to its label values.
        counter: makes a counter, as ``counter(name, documentation, labelnames)``: the class of an engine that
            wraps Prometheus (under Ray, for example), or ``functools.partial(Counter, registry=...)``.
            ``None``: ``prometheus_client.Counter``, in the global registry. Later calls with the same
            function use the same counters.

    Raises:
        ConfigError: a label is one of kvplug's, an engine's number of values is wrong, or ``counter`` has
            made kvplug's counters with other labels. Lists every fault.
        ImportError: prometheus_client is not installed, and no ``counter`` was given.
    """
    names = tuple(label_names)
    faults = [f"the label {name!r} is one of kvplug's own" for name in names if name in _OURS]
    faults += [
        f"engine {index} has {len(values)} label values for the {len(names)} labels {', '.join(names)}"
        for index, values in label_values.items()
        if len(values) != len(names)
    ]
    if faults:
        raise ConfigError(*faults, source="Prometheus labels")
    if counter is None:
        try:
            import prometheus_client
        except ImportError as e:
            raise ImportError(
                "metrics for Prometheus need prometheus_client: pip install kvplug[prometheus]"
            ) from e
        counter = prometheus_client.Counter
    with _making:
        labels, counters = _made.get(counter, (names, {}))
        if labels != names:
            raise ConfigError(
                f"kvplug's counters have the labels {', '.join(labels) or 'none'}, and"
                f" {', '.join(names) or 'none'} were asked for",
                source="Prometheus labels",
            )
        if not counters:
            counters = {name: counter(name, text, (*names, *ours)) for name, (ours, text) in COUNTERS.items()}
            _made[counter] = names, counters
    return {index: PrometheusSink(counters, values) for index, values in label_values.items()}


class ConfiguredPrometheusSink(Sink):
    """The sink of ``sinks = ["prometheus"]`` in a config: it uses the global registry and the labels of
    ``emit``.

    An exporter of that registry, such as an engine's own or ``prometheus_client.start_http_server``, exports
    these counters too.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, options: object) -> None:
        if importlib.util.find_spec("prometheus_client") is None:
            raise ConfigError(
                "sinks: prometheus needs the package prometheus_client: pip install 'kvplug[prometheus]'"
            )

    def emit(self, snapshot: StatsSnapshot, labels: Mapping[str, str]) -> None:
        prometheus_sinks(tuple(labels), {0: tuple(labels.values())})[0].emit(snapshot, labels)
