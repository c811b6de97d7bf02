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
from collections.abc import Mapping
from typing import Any, Final, Literal

import attrs

from kvplug.metrics.reasons import Op, Reason

_log = logging.getLogger(__name__)

StatsSnapshot = Mapping[str, Any]

BOUNDS_S: Final = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the duration buckets, in seconds: two to a decade, from 10 µs (a match) to 30 s."""

_MAX_NAMES: Final = 64
"""More routes, or transports or stores that are slow, are counted as "other": each is a series of its own."""
_NAME_CHARS: Final = 200
_NAMED: Final = ("routes", "slow_paths", "slow_gets", "slow_puts", "not_held")
"""Counts by a name that is not of a closed set."""
_OPS: Final = frozenset(Op)
_REASONS: Final = frozenset(Reason)


@attrs.define(eq=False)
class _Figures:
    count: int = 0
    nbytes: int = 0
    tokens: int = 0
    seconds: float = 0.0
    buckets: list[int] = attrs.field(factory=lambda: [0] * (len(BOUNDS_S) + 1))

    def add(self, other: _Figures, sign: int = 1) -> None:
        self.count += sign * other.count
        self.nbytes += sign * other.nbytes
        self.tokens += sign * other.tokens
        self.seconds += sign * other.seconds
        for index, count in enumerate(other.buckets):
            self.buckets[index] += sign * count

    def to_plain(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "bytes": self.nbytes,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "buckets": list(self.buckets),
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> _Figures:
        found = cls(plain["count"], plain["bytes"], plain["tokens"], plain["seconds"], list(plain["buckets"]))
        if len(found.buckets) != len(BOUNDS_S) + 1:
            raise ValueError(f"{len(found.buckets)} duration buckets, this version has {len(BOUNDS_S) + 1}")
        counts = (found.count, found.nbytes, found.tokens, *found.buckets)
        if not all(map(_is_count, counts)) or not found.seconds >= 0:
            raise ValueError("a figure is negative or no number")
        return found


class TransferStats:
    """Counts, bytes, tokens and durations by operation, failures by operation and reason.

    Thread-safe: any thread may record and read. The counters only grow, until :meth:`reset`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ops: dict[str, _Figures] = {}
        self._failures: dict[tuple[str, str], int] = {}
        self._named: dict[str, dict[str, int]] = {kind: {} for kind in _NAMED}
        self._resets = 0
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
            figures = self._ops.get(op) or self._new(op)
            figures.count += count
            figures.nbytes += count * nbytes
            figures.tokens += count * tokens
            figures.seconds += count * seconds
            figures.buckets[bisect_left(BOUNDS_S, seconds)] += count

    def fail(self, op: str, reason: str, *, count: int = 1) -> None:
        """One more ``op`` has failed, or ``count`` of them, for a reason of
        :class:`~kvplug.metrics.reasons.Reason`."""
        key = (_known_op(op), _known_reason(reason))
        with self._lock:
            self._changes += 1
            self._failures[key] = self._failures.get(key, 0) + count

    def opened(self, route: str, *, count: int = 1) -> None:
        """One more pipe was opened, and this carries its bytes (see ``Pipe.route``)."""
        self._count("routes", route, count)

    def slow_path(self, transport: str, *, count: int = 1) -> None:
        """To one more peer ``transport`` carries far less than it claims, or than it did before."""
        self._count("slow_paths", transport, count)

    def slow_store(self, op: Literal["get", "put"], store: str, *, count: int = 1) -> None:
        """Out of one more opened ``store`` (or into it) far less comes than before."""
        self._count("slow_gets" if op == "get" else "slow_puts", store, count)

    def not_held(self, source: str, *, count: int = 1) -> None:
        """A source of KV (a store, or a peer engine) does not hold one more page that it was asked for, or
        ``count`` of them."""
        self._count("not_held", source, count)

    def _count(self, kind: str, name: str, count: int) -> None:
        name = name[:_NAME_CHARS]
        counts = self._named[kind]
        with self._lock:
            self._changes += 1
            if name not in counts and len(counts) >= _MAX_NAMES:
                name = "other"
            counts[name] = counts.get(name, 0) + count

    def _new(self, op: str) -> _Figures:
        return self._ops.setdefault(_known_op(op), _Figures())

    def merge(self, other: TransferStats | StatsSnapshot) -> None:
        """Add everything another one counted.

        Raises:
            ValueError: it is no snapshot.
        """
        snapshot = other.snapshot() if isinstance(other, TransferStats) else other
        ops, failures, named = _parse(snapshot)
        for kind, counts in named.items():
            for name, count in counts.items():
                self._count(kind, name, count)
        with self._lock:
            self._changes += 1
            for op, figures in ops.items():
                self._ops.setdefault(op, _Figures()).add(figures)
            for key, count in failures.items():
                self._failures[key] = self._failures.get(key, 0) + count

    def reset(self) -> None:
        """Forget everything."""
        with self._lock:
            self._ops, self._failures = {}, {}
            for counts in self._named.values():
                counts.clear()
            self._resets += 1
            self._changes += 1

    # -- looking -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything so far, as new plain values."""
        return self._snapshot()[0]

    def take(self) -> dict[str, Any] | None:
        """What is new since the last ``take``; ``None`` if nothing is. Leaves the figures as they are.

        For one caller. Other callers use a :class:`StatsReader` each.
        """
        return self._reader.take()

    @classmethod
    def from_snapshot(cls, snapshot: StatsSnapshot) -> TransferStats:
        """The stats a snapshot was taken of.

        Raises:
            ValueError: it is no snapshot.
        """
        made = cls()
        made.merge(snapshot)
        return made

    def _snapshot(self) -> tuple[dict[str, Any], int]:
        with self._lock:
            failures: dict[str, dict[str, int]] = {}
            for (op, reason), count in self._failures.items():
                failures.setdefault(op, {})[reason] = count
            # str(): plain text, not the enum's members
            ops = {str(op): figures.to_plain() for op, figures in self._ops.items()}
            named = {kind: dict(counts) for kind, counts in self._named.items() if counts}
            return {"ops": ops, "failures": failures, **named}, self._resets


class StatsReader:
    """One reader's position in the counters: each :meth:`take` returns what is new. One thread at a time."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._before: StatsSnapshot | None = None
        self._resets = 0
        self._changes = 0

    def take(self) -> dict[str, Any] | None:
        """What was counted since the last call, as a snapshot; ``None`` if nothing was."""
        if (changes := self._stats._changes) == self._changes:
            return None
        self._changes = changes
        now, resets = self._stats._snapshot()
        before, self._before = self._before if resets == self._resets else None, now
        self._resets = resets
        return _difference(now, before)


def _difference(now: StatsSnapshot, before: StatsSnapshot | None) -> dict[str, Any] | None:
    ops, failures, named = _parse(now)
    if before is not None:
        old_ops, old_failures, old_named = _parse(before)
        for op, figures in old_ops.items():
            ops[op].add(figures, -1)
        for key, count in old_failures.items():
            failures[key] -= count
        for kind, counts in old_named.items():
            for name, count in counts.items():
                named[kind][name] -= count
    fresh = TransferStats()
    fresh._ops = {op: figures for op, figures in ops.items() if figures.count}
    fresh._failures = {key: count for key, count in failures.items() if count}
    for kind, counts in named.items():
        fresh._named[kind] = {name: count for name, count in counts.items() if count}
    return fresh.snapshot() if fresh._ops or fresh._failures or any(fresh._named.values()) else None


def _parse(
    snapshot: StatsSnapshot,
) -> tuple[dict[str, _Figures], dict[tuple[str, str], int], dict[str, dict[str, int]]]:
    ops: dict[str, _Figures] = {}
    failures: dict[tuple[str, str], int] = {}
    try:
        for op, plain in snapshot["ops"].items():
            ops.setdefault(_known_op(op), _Figures()).add(_Figures.from_plain(plain))
        for op, reasons in snapshot["failures"].items():
            for reason, count in reasons.items():
                if not _is_count(count):
                    raise ValueError(f"a count is {count!r}")
                key = (_known_op(op), _known_reason(reason))
                failures[key] = failures.get(key, 0) + count
        named = {kind: dict(snapshot.get(kind, {})) for kind in _NAMED}
        for kind, counts in named.items():
            if not all(isinstance(name, str) and _is_count(count) for name, count in counts.items()):
                raise ValueError(f"{kind}: a name is no text, or its count no number")
    except (KeyError, TypeError, AttributeError, ValueError) as e:
        raise ValueError(f"no snapshot of transfer stats: {type(e).__name__}: {e}") from e
    return ops, failures, named


def _is_count(given: object) -> bool:
    return isinstance(given, int) and given >= 0


def _known_op(op: str) -> str:
    if op in _OPS:
        return str(op)
    _log.debug("operation %r is not known here and is counted as 'other'", op)
    return "other"


def _known_reason(reason: str) -> str:
    if reason in _REASONS:
        return str(reason)
    _log.debug("reason %r is not known here and is counted as 'other'", reason)
    return "other"
