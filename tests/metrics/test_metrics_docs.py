"""``docs/reference/metrics.md`` says what the code counts, no more and no less."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvplug.metrics.prometheus import COUNTERS
from kvplug.metrics.reasons import Op, Reason
from kvplug.metrics.stats import BOUNDS_S

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


@pytest.fixture(scope="module")
def page() -> str:
    if not PAGE.exists():
        pytest.skip("the docs are not beside the tests here")
    return PAGE.read_text(encoding="utf-8")


def table_under(page: str, heading: str) -> dict[str, list[str]]:
    """First column, without its backticks, to the other columns."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_every_operation_is_documented_and_no_other(page: str) -> None:
    assert table_under(page, "Operations").keys() == set(Op)


def test_every_reason_is_documented_and_no_other(page: str) -> None:
    assert table_under(page, "Reasons").keys() == set(Reason)


def test_every_counter_is_documented_with_its_labels(page: str) -> None:
    documented = table_under(page, "Prometheus")
    assert documented.keys() == set(COUNTERS)
    for name, (labels, _) in COUNTERS.items():
        assert re.findall(r"`(\w+)`", documented[name][0]) == list(labels), name


def test_the_bounds_of_the_buckets_are_documented(page: str) -> None:
    section = page.partition("\n## Durations\n")[2].partition("\n## ")[0]
    found = re.search(r"^    ([\d., e-]+)$", section, re.MULTILINE)
    assert found is not None
    assert tuple(float(bound) for bound in found[1].split(",")) == BOUNDS_S


def test_every_figure_of_a_snapshot_is_documented(page: str) -> None:
    assert table_under(page, "A snapshot").keys() == {"count", "bytes", "tokens", "seconds", "buckets"}
