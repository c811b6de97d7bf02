"""The scorecard: its table on a narrow terminal, several suites of one subject, and reports of before."""

from __future__ import annotations

import io
import json
from typing import Any

from kvplug_testing.scorecard import Outcome, Result, Scorecard, from_json


def result(**given: Any) -> Result:
    usual = {"subject": "pipe sample", "suite": "TestSample", "test": "test_it", "laws": ("PIPE-6",)}
    return Result(**{**usual, "outcome": Outcome.PASSED, **given})


def printed(card: Scorecard) -> str:
    file = io.StringIO()
    card.print(file)
    return file.getvalue()


def test_tests_that_are_skipped_or_fail_for_one_reason_are_one_line_and_waivers_one_each() -> None:
    skipped = [
        result(
            test=f"test_{number}{part}",
            laws=(f"STORE-{1 + number % 3}",),
            outcome=Outcome.SKIPPED,
            reason="it is no BlockingStore",
        )
        for number in range(28)
        for part in ("[first]", "[other]")
    ]
    waived = [result(test=f"test_w{n}", outcome=Outcome.WAIVED, reason="issue 12") for n in range(2)]
    failed = [result(test=f"test_f{n}", outcome=Outcome.FAILED, reason="it is late") for n in range(2)]
    other = result(test="test_alone", outcome=Outcome.SKIPPED, reason="it is late")
    card = Scorecard(level="quick", results=(*skipped, *waived, *failed, other))
    told = [line.strip() for line in printed(card).splitlines() if ": " in line]
    assert told == [
        "skipped: STORE-1, STORE-2, STORE-3 test_0[first] and 27 more: it is no BlockingStore",
        "waived: PIPE-6 test_w0: issue 12",
        "waived: PIPE-6 test_w1: issue 12",
        "failed: PIPE-6 test_f0 and 1 more: it is late",
        "skipped: PIPE-6 test_alone: it is late",
    ]


def test_a_page_says_what_was_judged_where_and_when() -> None:
    card = Scorecard(
        level="quick",
        results=(result(distribution="kvplug-sample 0.3"), result(subject="pipe mine", suite="TestMine")),
        versions={"python": "3.11.9", "kvplug": "0.1.0"},
        platform="Linux-6.1",
        date="2026-01-02T03:04:05+00:00",
        above={"pipe sample": {"long": 15}},
    )
    page = card.as_markdown()
    assert "python 3.11.9, kvplug 0.1.0; Linux-6.1; 2026-01-02T03:04:05+00:00" in page
    assert "## pipe sample\n\nkvplug-sample 0.3; 0.0 s\n\n| law |" in page
    assert "## pipe mine\n\n0.0 s\n\n| law |" in page
    assert "15 more with --kvplug-level long" in page
    assert from_json(card.as_json()) == card


def test_a_report_of_before_can_be_read_and_one_that_says_more() -> None:
    plain = json.loads(Scorecard(level="quick", results=(result(reason="so"),)).as_json())
    for key in ("platform", "date", "above"):
        del plain[key]
    del plain["results"][0]["distribution"]
    assert from_json(json.dumps(plain)).results == (result(reason="so"),)
    plain["results"][0]["weather"] = plain["weather"] = "fog"
    assert from_json(json.dumps(plain)).results == (result(reason="so"),)
