"""The results: medians over the rounds, and ratios between candidates."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvplug_bench.candidate import ALONE, COPY, INTO, KEPT, LATENCY, LOOKED, WAKE
from kvplug_bench.rounds import Figures, Outcome

_COMPARED = {LOOKED: KEPT}
"""The op to compare "looked" with if no baseline supports it."""


@attrs.frozen(kw_only=True)
class Row:
    """One line of ``kvplug bench --json``. A figure that its op does not have is ``None``."""

    name: str
    kind: str
    op: str | None
    bytes: int | None
    gb_per_s: float | None = None
    latency_us_p50: float | None = None
    latency_us_p99: float | None = None
    cpu_s_per_gb: float | None = None
    idle_cpu_percent: float | None = None
    skipped_because: str = ""


@attrs.frozen(kw_only=True)
class Comparison:
    """A row, compared with the others. Ratios are medians of the ratios within each round."""

    row: Row
    of_memcpy: float | None = None
    best_baseline: str = ""
    over_best: float | None = None
    """How many times faster than the best baseline of its kind, except memcpy; shorter, for a latency."""


def compare(outcome: Outcome, others: Sequence[Outcome]) -> Iterator[Comparison]:
    """Every op and size of a candidate, compared with all candidates; one row if it was not measured."""
    candidate = outcome.candidate
    if not outcome.rounds:
        reason = outcome.skipped_because
        row = Row(name=candidate.name, kind=candidate.kind, op=None, bytes=None, skipped_because=reason)
        yield Comparison(row=row)
        return
    idle = next((each.idle_cpu_percent for each in medians(outcome) if each.op == WAKE), None)
    for each in medians(outcome):
        row = Row(
            name=candidate.name,
            kind=candidate.kind,
            op=each.op,
            bytes=each.nbytes,
            gb_per_s=each.gb_per_s,
            latency_us_p50=each.latency_us_p50,
            latency_us_p99=each.latency_us_p99,
            cpu_s_per_gb=each.cpu_s_per_gb,
            idle_cpu_percent=idle if each.op in (LATENCY, WAKE) else None,
        )
        best, over = _best(outcome, each, others)
        yield Comparison(
            row=row, of_memcpy=_of_memcpy(outcome, each, others), best_baseline=best, over_best=over
        )


def refused(outcome: Outcome, sizes: Iterable[int]) -> list[Comparison]:
    """Rows of the sizes that a measured candidate does not support."""
    candidate = outcome.candidate
    return [
        Comparison(
            row=Row(name=candidate.name, kind=candidate.kind, op=op, bytes=nbytes, skipped_because=reason)
        )
        for op in candidate.ops
        for nbytes in sizes
        if outcome.rounds and (reason := candidate.refuses(op, nbytes))
    ]


def medians(outcome: Outcome) -> list[Figures]:
    """The medians over the rounds, for each op and size."""
    return [
        Figures(op=op, nbytes=nbytes, **{name: _median(values) for name, values in columns.items()})
        for (op, nbytes), columns in _columns(outcome).items()
    ]


def _columns(outcome: Outcome) -> dict[tuple[str, int], dict[str, list[float | None]]]:
    """Op and size -> the name of a figure -> its value in each round."""
    names = [field.name for field in attrs.fields(Figures) if field.name not in ("op", "nbytes")]
    columns: dict[tuple[str, int], dict[str, list[float | None]]] = {}
    for figures in (each for done in outcome.rounds for each in done):
        column = columns.setdefault((figures.op, figures.nbytes), {name: [] for name in names})
        for name in names:
            column[name].append(getattr(figures, name))
    return columns


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _speeds(outcome: Outcome, op: str, nbytes: int) -> list[float]:
    """The speed in each round, larger is faster: GB/s, or messages per microsecond."""
    column = _columns(outcome).get((op, nbytes), {})
    bulk = [value for value in column.get("gb_per_s", []) if value]
    return bulk or [1 / value for value in column.get("latency_us_p50", []) if value]


def _of_memcpy(outcome: Outcome, figures: Figures, others: Sequence[Outcome]) -> float | None:
    if outcome.candidate.kind == COPY or figures.gb_per_s is None:
        return None
    op = ALONE if figures.op == ALONE else INTO
    copies = [_speeds(each, op, figures.nbytes) for each in others if each.candidate.kind == COPY]
    ours = _speeds(outcome, figures.op, figures.nbytes)
    return _ratio(ours, copies[0]) if copies else None


def _best(outcome: Outcome, figures: Figures, others: Sequence[Outcome]) -> tuple[str, float | None]:
    """The fastest baseline in this op, and how many times faster the candidate is."""
    if outcome.candidate.baseline:
        return "", None
    theirs = _of_baselines(outcome, figures.op, figures.nbytes, others)
    if not theirs and figures.op in _COMPARED:
        theirs = _of_baselines(outcome, _COMPARED[figures.op], figures.nbytes, others)
    if not theirs:
        return "", None
    best = max(theirs, key=lambda name: statistics.median(theirs[name]))
    return best, _ratio(_speeds(outcome, figures.op, figures.nbytes), theirs[best])


def _of_baselines(
    outcome: Outcome, op: str, nbytes: int, others: Sequence[Outcome]
) -> dict[str, list[float]]:
    """The speeds of each baseline of the same kind that supports the op."""
    alike = [each for each in others if each.candidate.baseline]
    return {
        each.candidate.name: speeds
        for each in alike
        if each.candidate.kind == outcome.candidate.kind and (speeds := _speeds(each, op, nbytes))
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    return statistics.median(a / b for a, b in zip(ours, theirs)) if ours and theirs else None


COLUMNS = (
    *("NAME", "KIND", "OP", "SIZE", "GB/S", "OF MEMCPY", "OVER THE BEST BASELINE"),
    *("CPU S/GB", "P50 US", "P99 US", "IDLE CPU %", ""),
)


def cells(comparison: Comparison, size: str) -> tuple[str, ...]:
    """The cells of its row in the table."""
    row = comparison.row
    over = comparison.over_best
    return (
        row.name,
        row.kind,
        row.op or "",
        size,
        _number(row.gb_per_s),
        "" if comparison.of_memcpy is None else f"{comparison.of_memcpy:.2f}",
        "" if over is None else f"{over:.2f}x {comparison.best_baseline}",
        _number(row.cpu_s_per_gb),
        _number(row.latency_us_p50),
        _number(row.latency_us_p99),
        _number(row.idle_cpu_percent),
        f"skipped: {row.skipped_because}" if row.skipped_because else "",
    )


def _number(value: float | None) -> str:
    """A number with three significant digits."""
    if value is None:
        return ""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
