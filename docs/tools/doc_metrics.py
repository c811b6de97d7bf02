"""Put the tables of operations, reasons and Prometheus metrics into the page of metrics.

Usage: python docs/tools/doc_metrics.py. It writes the table below each marker in docs/reference/metrics.md,
from kvplug/metrics/reasons.py and kvplug/metrics/prometheus.py. A test fails if the page differs.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import doc_strings as source

from kvplug.metrics.prometheus import BOUNDS_S, COUNTERS, HISTOGRAMS
from kvplug.metrics.reasons import Op, Reason

PAGE: Final = Path(__file__).parents[1] / "reference" / "metrics.md"
_TABLE: Final = re.compile(r"^(<!-- Table: ([a-z]+), .* -->)\n(?:\|.*\n)*", re.M)


def refreshed(page: str) -> str:
    """The page with the tables of the code."""
    tables = {
        "operations": _table(("operation", "one is"), _members(Op)),
        "reasons": _table(("reason", "means"), _members(Reason)),
        "counters": _table(
            ("counter", "labels", "counts"),
            ((f"`{name}`", ", ".join(f"`{label}`" for label in labels), text)
             for name, (_, labels, text) in COUNTERS.items()),
        ),
        "histograms": _table(
            ("histogram", "operation", "observes"),
            ((f"`{name}`", f"`{op}`", text) for name, (op, text) in HISTOGRAMS.items()),
        ),
        "bounds": _table(
            ("buckets of every histogram, in seconds",),
            [(", ".join(f"{bound:f}".rstrip("0").rstrip(".") for bound in BOUNDS_S),)],
        ),
    }  # fmt: skip
    written: list[tuple[str, str]] = _TABLE.findall(page)
    assert {name for _, name in written} == tables.keys(), f"the page has tables of {written}"
    return _TABLE.sub(lambda found: f"{found[1]}\n{tables[found[2]]}", page)


def _members(kind: type[enum.StrEnum]) -> Iterable[tuple[str, str]]:
    body: Any = source.node_of(kind)
    texts = source.texts_below(body.body)
    for member in kind:
        yield f"`{member}`", source.in_table(texts[member.name][1], lambda name: None)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    every = (head, ("---",) * len(head), *rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in every)


if __name__ == "__main__":
    PAGE.write_text(refreshed(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
