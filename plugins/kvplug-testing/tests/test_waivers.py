"""Waivers: a waived test does not fail the run, and its reason is in the scorecard."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_waived_test_fails_no_run_and_its_reason_is_in_the_scorecard(package: Any) -> None:
    package.waive(
        test_that_is_broken="the ring cannot; see issue 12",
        test_that_leaves_something="the driver keeps a descriptor",
    )
    done = package.judge()
    assert done.returncode == 0, done.stdout
    assert "waived: PIPE-5, PIPE-6 test_that_is_broken: the ring cannot; see issue 12" in done.stdout
    found = package.outcomes()
    assert found["test_that_is_broken"].outcome == "waived"
    assert found["test_that_leaves_something"].reason == "the driver keeps a descriptor"


def test_a_waiver_whose_test_passes_fails(package: Any) -> None:
    package.waive(test_that_is_kept="nothing keeps it")
    assert package.outcomes()["test_that_is_kept"].outcome == "failed"
    assert "it is kept, so the waiver (nothing keeps it) must go" in package.judge().stdout


@pytest.mark.parametrize(
    ("waiver", "said"),
    [
        ({"test_that_is_brocken": "no such test"}, "there is no test test_that_is_brocken; did you mean"),
        ({"test_that_is_broken": " "}, "test_that_is_broken needs a reason in words"),
    ],
)
def test_a_waiver_that_names_no_test_or_no_reason_is_refused_at_once(
    package: Any, waiver: dict[str, str], said: str
) -> None:
    package.waive(**waiver)
    done = package.judge()
    assert done.returncode == 4
    assert f"TestMine.waivers: {said}" in done.stderr
