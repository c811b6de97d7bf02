"""The kit as an author meets it: levels, a failure that names its law, the scorecard."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvplug_testing.scorecard import from_json

pytestmark = pytest.mark.full


def test_a_run_quotes_the_laws_that_are_broken_and_reports_each_outcome_with_its_reason(package: Any) -> None:
    done = package.judge("--kvplug-report", "card.md", "--kvplug-report", "card.json")
    assert done.returncode == 1
    assert "law PIPE-5 (receiving into memory)" in done.stdout.partition("short test summary")[2]
    for said in (
        "two and a half came",
        "law PIPE-5 (receiving into memory):\n",
        "law PIPE-6 (a receive that runs out of time):\n",
        "    `recv_tensor(out=...)` fills `out`, contiguous or not.",  # what the law says
        "kvplug conformance",
        "# Conformance, level quick",
        "## pipe memory",
        "skipped: PIPE-7 test_of_what_is_not_claimed: ",
    ):
        assert said in done.stdout
    page, text = ((package.folder / name).read_text() for name in ("card.md", "card.json"))
    found = {result.test: result for result in from_json(text).results}
    assert {test: result.outcome for test, result in found.items()} == {
        "test_that_is_kept": "passed",
        "test_that_is_broken": "failed",
        "test_of_what_is_not_claimed": "skipped",
        "test_that_leaves_something": "failed",
    }
    assert "two and a half came" in found["test_that_is_broken"].reason
    assert "in one process (across_processes)" in found["test_of_what_is_not_claimed"].reason
    assert "left behind: descriptors" in found["test_that_leaves_something"].reason
    assert {result.subject for result in found.values()} == {"pipe memory"}
    assert page.strip() in done.stdout
    assert "- failed: PIPE-5, PIPE-6 test_that_is_broken: " in page
    plain = json.loads(text)
    assert plain["platform"] in page and plain["date"] in page
    brought = f"kvplug-testing {plain['versions']['kvplug']}"
    assert {each["distribution"] for each in plain["results"]} == {brought}
    assert f"\n{brought}; " in page


def test_a_failure_on_a_busy_host_names_it(package: Any) -> None:
    mine = package.folder / "tests" / "test_mine.py"
    mine.write_text(f"from kvplug_testing import waits\nwaits.host_load = lambda: 4.0\n{mine.read_text()}")
    assert "this host is busy: 4.0 runnable threads for each processor; if" in package.judge("-q").stdout


def test_of_a_test_that_fails_twice_the_first_failure_is_told_first(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text("""
import os
from kvplug.transport import Kind
from kvplug_testing import law
from kvplug_testing.contract.base import Contract

class TestMine(Contract):
    kind = Kind.PIPE
    settle_s = 0.2

    @law("PIPE-1")
    def test_that_hangs(self):
        self.left = os.dup(0)
        raise AssertionError("a call is still blocked")
""")
    (found,) = package.outcomes().values()
    assert found.outcome == "failed"
    first, then = found.reason.split("; then ")
    assert first == "AssertionError: a call is still blocked"
    assert "left behind: descriptors" in then


@pytest.mark.parametrize("named", [[], ["tests"]], ids=["no file", "a file"])
def test_an_installed_transport_is_judged_with_the_test_files_that_are_named(
    package: Any, named: list[str]
) -> None:
    done = package.judge("--kvplug-transport", "pipe:memory", "--collect-only", "-q", *named)
    assert done.returncode == 0, done.stdout + done.stderr
    judged = done.stdout.partition("TestMemoryPipeContract::")[2]
    assert judged.startswith("test_a_tensor_of_each_dtype_arrives_with_its_bits["), "simple laws come first"
    assert ("TestMine::" in done.stdout) is bool(named)
