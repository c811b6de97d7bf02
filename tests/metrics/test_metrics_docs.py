"""``docs/reference/metrics.md`` says what the code counts, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplug.metrics.prometheus import COUNTERS
from kvplug.metrics.reasons import Op, Reason
from kvplug.metrics.stats import BOUNDS_S

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def table_under(page: str, heading: str) -> dict[str, list[str]]:
    """First column, without its backticks, to the other columns."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_everything_that_is_counted_is_documented_and_nothing_else() -> None:
    if not PAGE.exists():
        pytest.skip("the docs are not beside the tests here")
    page = PAGE.read_text(encoding="utf-8")
    assert table_under(page, "Operations").keys() == set(Op)
    assert table_under(page, "Reasons").keys() == set(Reason)
    assert table_under(page, "A snapshot").keys() == {"count", "bytes", "tokens", "seconds", "buckets"}
    documented = table_under(page, "Prometheus")
    labels = {name: re.findall(r"`(\w+)`", cells[0]) for name, cells in documented.items()}
    assert labels == {name: list(labels) for name, (labels, _) in COUNTERS.items()}
    section = page.partition("\n## Durations\n")[2].partition("\n## ")[0]
    (bounds,) = re.findall(r"^    ([\d., e-]+)$", section, re.MULTILINE)
    assert tuple(float(bound) for bound in bounds.split(",")) == BOUNDS_S
