"""The scorecard: each reason once, several suites of one subject, and reports of other releases."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplug_testing.scorecard import Outcome, Result, Scorecard, from_json


def result(**given: Any) -> Result:
    usual = {"subject": "pipe sample", "suite": "TestSample", "test": "test_it", "laws": ("PIPE-6",)}
    return Result(**{**usual, "outcome": Outcome.PASSED, **given})


def test_a_reason_for_several_tests_is_one_line_but_for_waivers() -> None:
    skipped = [
        result(test=f"test_{n}{part}", outcome=Outcome.SKIPPED, reason="no BlockingStore")
        for n in range(28)
        for part in ("[first]", "[other]")
    ]
    waived = [result(test=f"test_w{n}", outcome=Outcome.WAIVED, reason="issue 12") for n in range(2)]
    failed = [
        result(test=f"test_f{n}", laws=(f"STORE-{n + 1}",), outcome=Outcome.FAILED, reason="it is late")
        for n in range(2)
    ]
    page = Scorecard(level="quick", results=(*skipped, *waived, *failed)).as_markdown()
    assert [line for line in page.splitlines() if line.startswith("- ")] == [
        "- failed: STORE-1, STORE-2 test_f0 and 1 more: it is late",
        "- waived: PIPE-6 test_w0: issue 12",
        "- waived: PIPE-6 test_w1: issue 12",
        "- skipped: PIPE-6 test_0[first] and 27 more: no BlockingStore",
    ]


def test_a_page_has_a_table_for_each_class_and_what_was_judged_where_and_when() -> None:
    card = Scorecard(
        level="quick",
        results=(
            result(distribution="kvplug-sample 0.3"),
            result(subject="pipe mine"),
            result(suite="TestTcp"),
        ),
        versions={"python": "3.11.9", "kvplug": "0.1.0"},
        platform="Linux-6.1",
        date="2026-01-02T03:04:05+00:00",
    )
    page = card.as_markdown()
    assert "python 3.11.9, kvplug 0.1.0; Linux-6.1; 2026-01-02T03:04:05+00:00" in page
    assert "## pipe sample (TestSample)\n\nkvplug-sample 0.3; 0.0 s\n\n| law " in page
    assert "## pipe sample (TestTcp)\n\n0.0 s\n\n| law " in page
    assert "## pipe mine\n\n0.0 s\n\n| law " in page
    assert from_json(card.as_json()) == card


def test_a_report_of_another_release_is_read_unless_its_format_is_another_one() -> None:
    plain = json.loads(Scorecard(level="quick", results=(result(reason="so"),)).as_json())
    del plain["platform"], plain["results"][0]["distribution"]
    plain["results"][0]["weather"] = plain["weather"] = "fog"
    assert from_json(json.dumps(plain)).results == (result(reason="so"),)
    with pytest.raises(ValueError, match="a scorecard of format 7"):
        from_json('{"format": 7}')
