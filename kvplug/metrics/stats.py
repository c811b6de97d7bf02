"""The counters. Recording costs less than a microsecond; snapshots are computed only on request.

A *snapshot* has only plain values, so that any engine can carry it between processes in any way::

    {"ops": {"load": {"count": 3, "bytes": 4096, "tokens": 32, "seconds": 0.5,
                      "samples": [[0.1, "0af7651916cd43dd8448eb211c80319c"], [0.2, ""], [0.2, ""]]}},
     "failures": {"load": {"timeout": 1}},
     "routes": {"nixl rma(rc_mlx5/mlx5_0:1)": 1},
     "slow": {"send": {"cpu": 1}, "get": {"redis": 1}},
     "not_held": {"peer 10.0.0.5:29555": 12}}

``samples`` are the duration and the trace id ("" if there is none) of the latest operations, for the few
operations that are requests (``SAMPLED``). There are at most ``MAX_SAMPLES``, so ``count`` may be larger.
``routes`` counts the opened pipes by the route of
their bytes, if their transport states one. ``slow`` counts paths that are far slower than expected: under
``send``, peers by transport; under ``get`` and ``put``, stores by name. ``not_held`` counts, by source, the
prompt pages that the source was asked for and does not hold. A snapshot leaves out every part without counts,
except ``ops`` and ``failures``.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, NotRequired, TypedDict

import msgspec

from kvplug.metrics.reasons import Op, Reason

_log = logging.getLogger(__name__)

StatsSnapshot = Mapping[str, Any]

SAMPLED: Final = (Op.LOAD, Op.SAVE, Op.MATCH, Op.WAIT)
"""The operations whose single durations are kept. They count requests, and their tails matter."""
MAX_SAMPLES: Final = 1024
"""The most samples of one operation in a snapshot."""

_MAX_NAMES: Final = 64
"""The most names at the last level of a part such as ``routes`` or ``slow``. Others count as "other", because
each name is a separate series."""
_NAME_CHARS: Final = 200
_FIGURES: Final = ("count", "bytes", "tokens", "seconds")
"""The numbers of an operation. One more counts its samples."""
_CLOSED_SETS: Final[Mapping[str, tuple[frozenset[str], ...]]] = {
    "ops": (frozenset(Op),),
    "failures": (frozenset(Op), frozenset(Reason)),
    "slow": (frozenset(Op),),
}
"""The allowed names at each level of a part of a snapshot. A level that is not listed, such as the last one
of "slow", allows any text."""

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]
Counts = dict[tuple[str, ...], list[Any]]
"""The numbers of each series, by the part of the snapshot and the names in it."""
_Samples = dict[str, list[tuple[float, str]]]


class _Figures(TypedDict):
    count: _Count
    bytes: _Count
    tokens: _Count
    seconds: _Seconds
    samples: NotRequired[Annotated[list[tuple[_Seconds, str]], msgspec.Meta(max_length=MAX_SAMPLES)]]


class _Snapshot(TypedDict):
    ops: dict[str, _Figures]
    failures: dict[str, dict[str, _Count]]
    routes: NotRequired[dict[str, _Count]]
    slow: NotRequired[dict[str, dict[str, _Count]]]
    not_held: NotRequired[dict[str, _Count]]


class TransferStats:
    """Holds counts, bytes, tokens and durations by operation, and failures by operation and reason.

    Thread-safe: any thread may record and read. The counters only grow.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ops: dict[str, list[Any]] = {str(op): [0] * (len(_FIGURES) + 1) for op in Op}
        self._counts: Counts = {("ops", op): numbers for op, numbers in self._ops.items()}
        self._samples = {str(op): deque[tuple[float, str]](maxlen=MAX_SAMPLES) for op in SAMPLED}
        self._changes = 0
        """Grows with every count."""
        self._reader = StatsReader(self)

    # -- counting ------------------------------------------------------------------------------

    def record(
        self,
        op: str,
        nbytes: int = 0,
        seconds: float = 0.0,
        *,
        tokens: int = 0,
        count: int = 1,
        trace_id: str = "",
    ) -> None:
        """Count ``count`` more successes of ``op`` (see :class:`~kvplug.metrics.reasons.Op`), each with these
        figures.

        ``trace_id`` is the id of the request's trace, in hexadecimal. An unknown operation is counted as
        "other", so a plugin never adds a series.
        """
        with self._lock:
            self._changes += 1
            try:
                numbers = self._ops[op]
            except KeyError:
                numbers = self._ops["other"]
            numbers[0] += count
            numbers[1] += count * nbytes
            numbers[2] += count * tokens
            numbers[3] += count * seconds
            samples = self._samples.get(op)
            if samples is not None:
                numbers[4] += count
                samples.extend(itertools.repeat((seconds, trace_id), count))

    def fail(self, op: str, reason: str, *, count: int = 1) -> None:
        """Count ``count`` more failures of ``op`` for a reason of :class:`~kvplug.metrics.reasons.Reason`."""
        self._count(("failures", op, reason), count)

    def opened(self, route: str) -> None:
        """Count one more opened pipe, whose bytes take this route (see ``Pipe.route``)."""
        self._count(("routes", route), 1)

    def slow(self, op: Literal["send", "get", "put"], name: str) -> None:
        """Count one more slow path: a peer to which the transport ``name`` is far slower than it claims or
        than before, or an opened store ``name`` whose gets or puts are far slower than before."""
        self._count(("slow", op, name), 1)

    def not_held(self, source: str, *, count: int = 1) -> None:
        """Count ``count`` more pages that a source of KV (a store or a peer engine) was asked for and does
        not hold."""
        self._count(("not_held", source), count)

    def _count(self, key: tuple[str, ...], count: int) -> None:
        with self._lock:
            self._changes += 1
            (self._counts.get(key) or self._series(key))[0] += count

    def merge(self, other: TransferStats | StatsSnapshot) -> None:
        """Add all counts of other stats or of a snapshot.

        Raises:
            ValueError: ``other`` is not a snapshot.
        """
        counts, samples = other._since({}) if isinstance(other, TransferStats) else parts_of(other)
        with self._lock:
            self._changes += 1
            for key, numbers in counts.items():
                ours = self._counts.get(key) or self._series(key)
                ours[:] = [mine + more for mine, more in zip(ours, numbers, strict=True)]
            for op, fresh in samples.items():
                if op in self._samples:
                    self._samples[op].extend(fresh)

    def _series(self, key: tuple[str, ...]) -> list[Any]:
        """Return the numbers of a series. A name outside its closed set, or one too many, becomes "other"."""
        part, *names = key
        for at, known in enumerate(_CLOSED_SETS.get(part, ())):
            if names[at] not in known:
                _log.debug("operation or reason %r is not known here and is counted as 'other'", names[at])
                names[at] = "other"
        if part not in ("ops", "failures"):
            names[-1] = names[-1][:_NAME_CHARS]
            alike = [other[-1] for other in self._counts if other[:-1] == (part, *names[:-1])]
            if names[-1] not in alike and len(alike) >= _MAX_NAMES:
                names[-1] = "other"
        return self._counts.setdefault((part, *map(str, names)), [0])

    # -- reading -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Return all counts so far, as new plain values."""
        return _nested(*self._since({}))

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

    def _since(self, before: Counts) -> tuple[Counts, _Samples]:
        """Return all counts, and the samples since the counts ``before``."""
        with self._lock:
            counts = {key: numbers.copy() for key, numbers in self._counts.items()}
            samples = {}
            for op, kept in self._samples.items():
                num_new = self._ops[op][-1] - before.get(("ops", op), [0])[-1]
                if num_new:
                    samples[op] = list(itertools.islice(reversed(kept), num_new))[::-1]
            return counts, samples


class StatsReader:
    """One reader's position in the counters: each :meth:`take` returns the new counts. One thread at a
    time."""

    def __init__(self, stats: TransferStats) -> None:
        self._stats = stats
        self._before: Counts = {}
        self._changes = 0

    def take(self) -> dict[str, Any] | None:
        """Return the counts since the last call as a snapshot, or ``None`` if there are none."""
        if (changes := self._stats._changes) == self._changes:
            return None
        self._changes = changes
        before = self._before
        self._before, samples = self._stats._since(before)
        fresh = {
            key: [now - then for now, then in zip(numbers, before.get(key, [0] * len(numbers)), strict=True)]
            for key, numbers in self._before.items()
        }
        return _nested(fresh, samples) if any(numbers[0] for numbers in fresh.values()) else None


def _nested(counts: Counts, samples: _Samples) -> dict[str, Any]:
    """Return the snapshot of these counts and samples."""
    found: dict[str, Any] = {"ops": {}, "failures": {}}
    for (part, *names, last), numbers in counts.items():
        if not numbers[0]:
            continue
        place = found.setdefault(part, {})
        for name in names:
            place = place.setdefault(name, {})
        place[last] = dict(zip(_FIGURES, numbers)) if part == "ops" else numbers[0]
    for op, fresh in samples.items():
        found["ops"][op]["samples"] = [list(sample) for sample in fresh]
    return found


def parts_of(snapshot: StatsSnapshot) -> tuple[Counts, _Samples]:
    """Return the counts and the samples of a snapshot: by its part and the names in it, such as
    ``("failures", "load", "timeout")``, the numbers there; those of an operation are its count, bytes,
    tokens, seconds and number of samples.

    Raises:
        ValueError: it is not a snapshot.
    """
    try:
        parts: dict[str, Any] = dict(msgspec.convert(snapshot, _Snapshot))
    except msgspec.ValidationError as e:
        raise ValueError(f"not a snapshot of transfer stats: {e}") from e
    found: Counts = {}
    samples: _Samples = {}
    for op, figures in parts.pop("ops").items():
        samples[op] = figures.get("samples", [])
        found["ops", op] = [*(figures[name] for name in _FIGURES), len(samples[op])]
    for part, counts in parts.items():
        for name, count in counts.items():
            if isinstance(count, dict):
                found |= {(part, name, last): [number] for last, number in count.items()}
            else:
                found[part, name] = [count]
    return found, samples
