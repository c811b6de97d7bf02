"""The counters. Recording costs less than a microsecond; snapshots are computed only on request.

A *snapshot* is plain, so that any engine can carry it between processes in any way::

    {"ops": {"send": {"count": 3, "bytes": 4096, "tokens": 0, "seconds": 0.02, "buckets": [0, …]}},
     "failures": {"load": {"timeout": 1}},
     "routes": {"nixl rma(rc_mlx5/mlx5_0:1)": 1},
     "slow_paths": {"cpu": 1},
     "slow_gets": {"redis": 1},
     "not_held": {"peer 10.0.0.5:29555": 12}}

``buckets[i]`` counts the operations that took at most ``BOUNDS_S[i]`` and longer than the bound before; the
last bucket counts those that took longer than every bound. ``routes`` counts the opened pipes by the route of
their bytes, if their transport states one. ``slow_paths`` counts, by transport, the peers to which it is far
slower than it should be. ``slow_gets`` and ``slow_puts`` count the stores whose gets or puts are far slower
than before. ``not_held`` counts, by source, the prompt pages that the source was asked for and does not hold.
A snapshot leaves out every part without counts, except ``ops`` and ``failures``.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Container, Mapping
from typing import Annotated, Any, Final, Literal, get_args

import attrs
import msgspec

from kvplug.metrics.reasons import Op, Reason

_log = logging.getLogger(__name__)

StatsSnapshot = Mapping[str, Any]

BOUNDS_S: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the duration buckets, in seconds: two to a decade, from 10 µs (a match) to 30 s."""

_MAX_NAMES: Final = 64
"""Further routes and slow transports or stores are counted as "other", because each name is a separate
series."""
_NAME_CHARS: Final = 200
_OPS: Final = frozenset(Op)
_REASONS: Final = frozenset(Reason)
_BUCKETS: Final = len(BOUNDS_S) + 1

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Counts = dict[str, _Count]
_Named = Literal["routes", "slow_paths", "slow_gets", "slow_puts", "not_held"]
"""Counts by names that are not from a closed set."""


@attrs.define(eq=False)
class _Figures:
    count: _Count
    bytes: _Count
    tokens: _Count
    seconds: Annotated[float, msgspec.Meta(ge=0)]
    buckets: Annotated[list[_Count], msgspec.Meta(min_length=_BUCKETS, max_length=_BUCKETS)]

    def add(self, other: _Figures, sign: int) -> None:
        self.count += sign * other.count
        self.bytes += sign * other.bytes
        self.tokens += sign * other.tokens
        self.seconds += sign * other.seconds
        for index, count in enumerate(other.buckets):
            self.buckets[index] += sign * count


class _Figured(msgspec.Struct, eq=False, omit_defaults=True):
    """The content of a snapshot."""

    ops: dict[str, _Figures]
    failures: dict[str, _Counts]
    routes: _Counts = {}
    slow_paths: _Counts = {}
    slow_gets: _Counts = {}
    slow_puts: _Counts = {}
    not_held: _Counts = {}

    def op(self, op: str) -> _Figures:
        return self.ops.setdefault(_known(op, _OPS), _Figures(0, 0, 0, 0.0, [0] * _BUCKETS))

    def fail(self, op: str, reason: str, count: int) -> None:
        reasons, reason = self.failures.setdefault(_known(op, _OPS), {}), _known(reason, _REASONS)
        reasons[reason] = reasons.get(reason, 0) + count

    def name(self, kind: _Named, name: str, count: int) -> None:
        counts: _Counts = getattr(self, kind)
        name = name[:_NAME_CHARS]
        if name not in counts and len(counts) >= _MAX_NAMES:
            name = "other"
        counts[name] = counts.get(name, 0) + count

    def add(self, other: _Figured, sign: int = 1) -> None:
        for op, figures in other.ops.items():
            self.op(op).add(figures, sign)
        for op, reasons in other.failures.items():
            for reason, count in reasons.items():
                self.fail(op, reason, sign * count)
        for kind in get_args(_Named):
            for name, count in getattr(other, kind).items():
                self.name(kind, name, sign * count)

    def without_zeros(self) -> _Figured:
        failures = {op: _positive(reasons) for op, reasons in self.failures.items()}
        return _Figured(
            {op: figures for op, figures in self.ops.items() if figures.count},
            {op: reasons for op, reasons in failures.items() if reasons},
            *(_positive(getattr(self, kind)) for kind in get_args(_Named)),
        )


def _positive(counts: _Counts) -> _Counts:
    return {name: count for name, count in counts.items() if count}


class TransferStats:
    """Holds counts, bytes, tokens and durations by operation, and failures by operation and reason.

    Thread-safe: any thread may record and read. The counters only grow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figured = _Figured({}, {})
        self._changes = 0
        """Grows with every count."""
        self._reader = StatsReader(self)

    # -- counting ------------------------------------------------------------------------------

    def record(
        self, op: str, nbytes: int = 0, seconds: float = 0.0, *, tokens: int = 0, count: int = 1
    ) -> None:
        """Count ``count`` more successes of ``op`` (see :class:`~kvplug.metrics.reasons.Op`), with these
        figures each.

        An unknown operation is counted as "other", so a plugin never adds a series.
        """
        with self._lock:
            self._changes += 1
            figures = self._figured.ops.get(op) or self._figured.op(op)
            figures.count += count
            figures.bytes += count * nbytes
            figures.tokens += count * tokens
            figures.seconds += count * seconds
            figures.buckets[bisect_left(BOUNDS_S, seconds)] += count

    def fail(self, op: str, reason: str, *, count: int = 1) -> None:
        """Count ``count`` more failures of ``op`` for a reason of :class:`~kvplug.metrics.reasons.Reason`."""
        with self._lock:
            self._changes += 1
            self._figured.fail(op, reason, count)

    def opened(self, route: str) -> None:
        """Count one more opened pipe, whose bytes take this route (see ``Pipe.route``)."""
        self._count("routes", route, 1)

    def slow_path(self, transport: str) -> None:
        """Count one more peer to which ``transport`` is far slower than it claims, or than before."""
        self._count("slow_paths", transport, 1)

    def slow_store(self, op: Literal["get", "put"], store: str) -> None:
        """Count one more opened ``store`` whose gets or puts are far slower than before."""
        self._count("slow_gets" if op == "get" else "slow_puts", store, 1)

    def not_held(self, source: str, *, count: int = 1) -> None:
        """Count ``count`` more pages that a source of KV (a store or a peer engine) was asked for and does
        not hold."""
        self._count("not_held", source, count)

    def _count(self, kind: _Named, name: str, count: int) -> None:
        with self._lock:
            self._changes += 1
            self._figured.name(kind, name, count)

    def merge(self, other: TransferStats | StatsSnapshot) -> None:
        """Add all counts of other stats or of a snapshot.

        Raises:
            ValueError: it is not a snapshot.
        """
        figured = _parse(other.snapshot() if isinstance(other, TransferStats) else other)
        with self._lock:
            self._changes += 1
            self._figured.add(figured)

    # -- looking -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return all counts so far, as new plain values."""
        with self._lock:
            plain: dict[str, Any] = msgspec.to_builtins(self._figured)
        return plain

    def take(self) -> dict[str, Any] | None:
        """Return the counts since the last ``take``, or ``None`` if there are none. Does not reset the
        figures.

        For one caller only. Each other caller uses its own :class:`StatsReader`.
        """
        return self._reader.take()

    @classmethod
    def from_snapshot(cls, snapshot: StatsSnapshot) -> TransferStats:
        """Return stats with the counts of a snapshot.

        Raises:
            ValueError: it is not a snapshot.
        """
        made = cls()
        made.merge(snapshot)
        return made


class StatsReader:
    """One reader's position in the counters: each :meth:`take` returns the new counts. One thread at a
    time."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._before = _Figured({}, {})
        self._changes = 0

    def take(self) -> dict[str, Any] | None:
        """Return the counts since the last call as a snapshot, or ``None`` if there are none."""
        if (changes := self._stats._changes) == self._changes:
            return None
        self._changes = changes
        now = self._stats.snapshot()
        fresh = _parse(now)
        fresh.add(self._before, -1)
        self._before = _parse(now)
        plain = msgspec.to_builtins(fresh.without_zeros())
        return plain if any(plain.values()) else None


def _parse(snapshot: StatsSnapshot) -> _Figured:
    """Return a copy of a snapshot, with unknown operations and reasons under "other".

    Raises:
        ValueError: it is not a snapshot.
    """
    try:
        found = msgspec.convert(snapshot, _Figured)
    except msgspec.ValidationError as e:
        raise ValueError(f"not a snapshot of transfer stats: {e}") from e
    known = _Figured({}, {})
    known.add(found)
    return known


def _known(name: str, names: Container[str]) -> str:
    if name in names:
        return str(name)
    _log.debug("operation or reason %r is not known here and is counted as 'other'", name)
    return "other"
