"""The counters. Recording costs less than a microsecond; snapshots are computed only on request.

A *snapshot* is plain, so that any engine can carry it between processes in any way::

    {"ops": {"send": {"count": 3, "bytes": 4096, "tokens": 0, "seconds": 0.02, "buckets": [0, …]}},
     "failures": {"load": {"timeout": 1}},
     "routes": {"nixl rma(rc_mlx5/mlx5_0:1)": 1},
     "slow_paths": {"cpu": 1},
     "slow_gets": {"redis": 1},
     "not_held": {"peer 10.0.0.5:29555": 12}}

``buckets[i]`` counts what took no longer than ``BOUNDS_S[i]`` (and longer than the bound before); the
last one, what took longer than every bound. ``routes`` counts the pipes that were opened, by what carries
their bytes; it is absent without pipes whose transport says so. ``slow_paths`` counts the peers to which a
transport carries far less than it should; ``slow_gets`` and ``slow_puts`` the stores that give, or take, far
less than before. ``not_held`` counts the pages of prompts that a source was asked for and does not hold, by
source. Each is absent without. Only what was counted is in a snapshot.
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
"""More routes, or transports or stores that are slow, are counted as "other": each is a series of its own."""
_NAME_CHARS: Final = 200
_OPS: Final = frozenset(Op)
_REASONS: Final = frozenset(Reason)
_BUCKETS: Final = len(BOUNDS_S) + 1

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Counts = dict[str, _Count]
_Named = Literal["routes", "slow_paths", "slow_gets", "slow_puts", "not_held"]
"""Counts by a name that is not of a closed set."""


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
    """What a snapshot has."""

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
    """Counts, bytes, tokens and durations by operation, failures by operation and reason.

    Thread-safe: any thread may record and read. The counters only grow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._figured = _Figured({}, {})
        self._changes = 0
        """Grows with everything that is counted."""
        self._reader = StatsReader(self)

    # -- counting ------------------------------------------------------------------------------

    def record(
        self, op: str, nbytes: int = 0, seconds: float = 0.0, *, tokens: int = 0, count: int = 1
    ) -> None:
        """One more ``op`` (see :class:`~kvplug.metrics.reasons.Op`) has succeeded, or ``count`` of them, with
        these figures each.

        What this core does not know is counted as "other": a plugin never adds a series.
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
        """One more ``op`` has failed, or ``count`` of them, for a reason of
        :class:`~kvplug.metrics.reasons.Reason`."""
        with self._lock:
            self._changes += 1
            self._figured.fail(op, reason, count)

    def opened(self, route: str) -> None:
        """One more pipe was opened, and this carries its bytes (see ``Pipe.route``)."""
        self._count("routes", route, 1)

    def slow_path(self, transport: str) -> None:
        """To one more peer ``transport`` carries far less than it claims, or than it did before."""
        self._count("slow_paths", transport, 1)

    def slow_store(self, op: Literal["get", "put"], store: str) -> None:
        """Out of one more opened ``store`` (or into it) far less comes than before."""
        self._count("slow_gets" if op == "get" else "slow_puts", store, 1)

    def not_held(self, source: str, *, count: int = 1) -> None:
        """A source of KV (a store, or a peer engine) does not hold one more page that it was asked for, or
        ``count`` of them."""
        self._count("not_held", source, count)

    def _count(self, kind: _Named, name: str, count: int) -> None:
        with self._lock:
            self._changes += 1
            self._figured.name(kind, name, count)

    def merge(self, other: TransferStats | StatsSnapshot) -> None:
        """Add everything another one counted.

        Raises:
            ValueError: it is not a snapshot.
        """
        figured = _parse(other.snapshot() if isinstance(other, TransferStats) else other)
        with self._lock:
            self._changes += 1
            self._figured.add(figured)

    # -- looking -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything so far, as new plain values."""
        with self._lock:
            plain: dict[str, Any] = msgspec.to_builtins(self._figured)
        return plain

    def take(self) -> dict[str, Any] | None:
        """What is new since the last ``take``; ``None`` if nothing is. Leaves the figures as they are.

        For one caller. Other callers use a :class:`StatsReader` each.
        """
        return self._reader.take()

    @classmethod
    def from_snapshot(cls, snapshot: StatsSnapshot) -> TransferStats:
        """The stats a snapshot was taken of.

        Raises:
            ValueError: it is not a snapshot.
        """
        made = cls()
        made.merge(snapshot)
        return made


class StatsReader:
    """One reader's position in the counters: each :meth:`take` returns what is new. One thread at a time."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._before = _Figured({}, {})
        self._changes = 0

    def take(self) -> dict[str, Any] | None:
        """What was counted since the last call, as a snapshot; ``None`` if nothing was."""
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
    """A copy of a snapshot, with what is not known here under "other".

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
