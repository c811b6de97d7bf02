"""The kit as an author meets it: levels, a failure that names its law, the scorecard."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

pytestmark = pytest.mark.full


def test_a_failure_names_the_law_and_what_was_observed_and_quotes_the_law(package: Any) -> None:
    done = package.judge("-q")
    assert done.returncode == 1
    summary = done.stdout[done.stdout.index("short test summary") :]
    assert "law PIPE-5 (receiving into memory)" in summary
    assert "two and a half came" in done.stdout
    assert "law PIPE-5 (receiving into memory):\n" in done.stdout
    assert "law PIPE-6 (a receive that runs out of time):\n" in done.stdout
    assert "    `recv_tensor(out=...)` fills `out`, contiguous or not." in done.stdout, "what the law says"


def test_a_failure_on_a_busy_host_names_it(package: Any) -> None:
    mine = package.folder / "tests" / "test_mine.py"
    suite = mine.read_text()
    for load, named in ((0.5, False), (4.0, True)):
        before = f"from kvplug_testing import waits\nwaits.host_load = lambda: {load}\n"
        mine.write_text(before + suite)
        done = package.judge("-q")
        assert ("this host is busy: 4.0 runnable threads for each processor; if" in done.stdout) is named


def test_each_outcome_has_its_reason_in_the_scorecard(package: Any) -> None:
    found = package.outcomes()
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


@pytest.mark.parametrize(("level", "number"), [("quick", 4), ("long", 6)])
def test_a_level_runs_what_is_of_it_and_of_those_below(package: Any, level: str, number: int) -> None:
    assert len(package.outcomes("--kvplug-level", level)) == number


def test_a_law_on_a_test_outside_of_any_suite_is_refused_by_name(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text("""
from kvplug_testing import law

@law("PIPE-1")
def test_alone():
    pass
""")
    done = package.judge()
    assert done.returncode == 4
    assert "test_mine.py::test_alone names a law and stands in no suite" in done.stderr


def test_the_terminal_shows_a_table_of_laws(package: Any) -> None:
    done = package.judge()
    assert "kvplug conformance" in done.stdout
    assert "pipe memory, level quick" in done.stdout
    assert "skipped: PIPE-7 test_of_what_is_not_claimed: " in done.stdout
    assert "  2 more with --kvplug-level long" in done.stdout


def test_what_is_deselected_is_not_counted_as_of_another_level(package: Any) -> None:
    done = package.judge("-k", "kept or longer")
    assert "  1 more with --kvplug-level long\n" in done.stdout


def test_a_report_is_written_as_its_name_ends(package: Any) -> None:
    package.judge("--kvplug-report", "card.md", "--kvplug-report", "card.json")
    page = (package.folder / "card.md").read_text()
    assert "| PIPE-1 (what arrives) | 1 |  |  |  |" in page
    assert "- failed: PIPE-5, PIPE-6 test_that_is_broken: " in page
    plain = json.loads((package.folder / "card.json").read_text())
    assert Counter(each["outcome"] for each in plain["results"]) == {"passed": 1, "failed": 2, "skipped": 1}
    assert "kvplug" in plain["versions"]
    assert plain["platform"] in page
    assert plain["date"] in page
    assert plain["above"] == {"pipe memory": {"long": 2}}
    brought = f"kvplug-testing {plain['versions']['kvplug']}"
    assert {each["distribution"] for each in plain["results"]} == {brought}
    assert f"\n{brought}; " in page


def test_a_report_of_another_name_is_refused_at_once(package: Any) -> None:
    done = package.judge("--kvplug-report", "card.html")
    assert done.returncode == 4
    assert "card.html: the name of a report ends in .json or .md" in done.stderr


def test_a_report_into_no_folder_is_refused_before_anything_has_run(package: Any) -> None:
    done = package.judge("--kvplug-report", "cards/card.json")
    assert done.returncode == 4
    assert "cards/card.json: there is no folder" in done.stderr


def test_an_installed_transport_is_judged_without_a_test_file(package: Any) -> None:
    done = package.judge("--kvplug-transport", "pipe:memory", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TestMemoryPipeContract::test_a_tensor_of_each_dtype_arrives_with_its_bits[bool]" in done.stdout
    assert "TestMine::" not in done.stdout, "the folder's own tests were not asked for"


def test_test_files_that_are_named_are_judged_as_well(package: Any) -> None:
    done = package.judge("--kvplug-transport", "pipe:memory", "--collect-only", "-q", "tests")
    assert "TestMemoryPipeContract::" in done.stdout
    assert "TestMine::" in done.stdout


def test_a_name_that_is_not_installed_is_told_with_those_that_are(package: Any) -> None:
    done = package.judge("--kvplug-transport", "memmory")
    assert done.returncode == 4
    assert "memmory" in done.stderr
    assert "memory" in done.stderr


def test_a_run_without_any_suite_says_nothing_of_the_kit(package: Any) -> None:
    (package.folder / "test_plain.py").write_text("def test_nothing(): pass\n")
    done = package.judge("test_plain.py")
    assert done.returncode == 0
    assert "conformance" not in done.stdout
