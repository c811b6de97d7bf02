"""The kit as an author meets it: levels, waivers, a failure that names its law, the scorecard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvplug.testing.scorecard import from_json

SUITE = """
from kvplug import Kind
from kvplug.testing import law
from kvplug.testing.contract.base import Contract

class TestMine(Contract):
    kind = Kind.PIPE
    transport = "memory"
    across_processes = False
    settle_s = 0.2

    @law("PIPE-1")
    def test_that_is_kept(self):
        pass

    @law("PIPE-5", "PIPE-6")
    def test_that_is_broken(self):
        assert 1 + 1 == 3, "two and a half came"

    @law("PIPE-7", needs="other_processes")
    def test_of_what_is_not_claimed(self):
        raise AssertionError("it ran")

    @law("ALL-1", level="full")
    def test_that_takes_longer(self):
        pass

    @law("ALL-4", level="soak")
    def test_that_takes_for_ever(self):
        pass

    @law("ALL-7")
    def test_that_leaves_something(self):
        import os
        self.left = os.dup(0)
"""


class Package:
    """A plugin author's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tests").mkdir()
        self.waive()
        (folder / "tests" / "test_mine.py").write_text(SUITE)

    def waive(self, text: str = "") -> None:
        head = (
            '[project]\nname = "mine"\nversion = "1"\n\n[tool.pytest.ini_options]\n\n[tool.kvplug.waivers]\n'
        )
        (self.folder / "pyproject.toml").write_text(head + textwrap.dedent(text))

    def judge(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "COLUMNS": "120"},
        )

    def outcomes(self, *arguments: str) -> dict[str, Any]:
        report = self.folder / "report.json"
        self.judge("--kvplug-report", str(report), *arguments)
        return {result.test: result for result in from_json(report.read_text()).results}


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_a_failure_names_the_law_what_was_observed_and_the_page(package: Package) -> None:
    done = package.judge("-q")
    assert done.returncode == 1
    summary = done.stdout[done.stdout.index("short test summary") :]
    assert "law PIPE-5 (receiving into memory)" in summary
    assert "two and a half came" in done.stdout
    assert "law PIPE-5 (receiving into memory): see docs/reference/laws.md#pipe-5" in done.stdout
    assert "law PIPE-6 (a receive that runs out of time): see docs/reference/laws.md#pipe-6" in done.stdout


def test_each_outcome_has_its_reason_in_the_scorecard(package: Package) -> None:
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


@pytest.mark.parametrize(("level", "number"), [("quick", 4), ("full", 5), ("soak", 6)])
def test_a_level_runs_what_is_of_it_and_of_those_below(package: Package, level: str, number: int) -> None:
    assert len(package.outcomes("--kvplug-level", level)) == number


def test_what_is_waived_is_told_and_the_run_is_green(package: Package) -> None:
    package.waive("""
        test_that_is_broken = "the ring cannot; see issue 12"
        "TestMine::test_that_leaves_something" = "the driver keeps a descriptor"
    """)
    done = package.judge()
    assert done.returncode == 0, done.stdout
    assert "waived: PIPE-5, PIPE-6 test_that_is_broken: the ring cannot; see issue 12" in done.stdout
    found = package.outcomes()
    assert found["test_that_is_broken"].outcome == "waived"
    assert found["test_that_leaves_something"].reason == "the driver keeps a descriptor"


def test_a_waiver_of_another_class_waives_nothing(package: Package) -> None:
    package.waive("""
        "TestOther::test_that_is_broken" = "not mine"
    """)
    assert package.outcomes()["test_that_is_broken"].outcome == "failed"


def test_of_a_test_with_parameters_those_that_fail_can_be_waived(package: Package) -> None:
    (package.folder / "tests" / "test_mine.py").write_text("""
from pytest import mark
from kvplug import Kind
from kvplug.testing import law
from kvplug.testing.contract.base import Contract

class TestMine(Contract):
    kind = Kind.PIPE
    transport = "memory"

    @law("PIPE-1")
    @mark.parametrize("dtype", ["bool", "complex32"])
    def test_a_dtype(self, dtype):
        assert dtype == "bool"
""")
    package.waive('"test_a_dtype[complex32]" = "the device has none"')
    assert package.judge().returncode == 0
    package.waive('test_a_dtype = "the device has none"')
    found = package.outcomes()
    assert found["test_a_dtype[complex32]"].outcome == "waived"
    assert "must go" in found["test_a_dtype[bool]"].reason


def test_a_law_on_a_test_outside_of_any_suite_is_refused_by_name(package: Package) -> None:
    (package.folder / "tests" / "test_mine.py").write_text("""
from kvplug.testing import law

@law("PIPE-1")
def test_alone():
    pass
""")
    done = package.judge()
    assert done.returncode == 4
    assert "test_mine.py::test_alone names a law and stands in no suite" in done.stderr


def test_a_waiver_of_a_law_that_is_kept_is_an_error(package: Package) -> None:
    package.waive("""
        test_that_is_kept = "it was not, once"
    """)
    done = package.judge()
    assert done.returncode == 1
    assert "law PIPE-1 (what arrives): it is kept, so the waiver (it was not, once) must go" in done.stdout


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('test_that_is_broken = ""', "'test_that_is_broken' needs a reason in words"),
        ("test_that_is_broken = true", "'test_that_is_broken' needs a reason in words"),
        ('test_that_never_was = "because"', "names no test of the kit: test_that_never_was"),
    ],
)
def test_a_waiver_that_says_nothing_is_refused(package: Package, text: str, said: str) -> None:
    package.waive(text)
    done = package.judge()
    assert done.returncode == 4
    assert said in done.stderr
    assert "pyproject.toml" in done.stderr


def test_the_terminal_shows_a_table_of_laws(package: Package) -> None:
    done = package.judge()
    assert "kvplug conformance" in done.stdout
    assert "pipe memory, level quick" in done.stdout
    assert "skipped: PIPE-7 test_of_what_is_not_claimed: " in done.stdout


def test_a_report_is_written_as_its_name_ends(package: Package) -> None:
    package.judge("--kvplug-report", "card.md", "--kvplug-report", "card.json")
    page = (package.folder / "card.md").read_text()
    assert "| PIPE-1 (what arrives) | 1 |  |  |  |" in page
    assert "- failed: PIPE-5, PIPE-6 test_that_is_broken: " in page
    plain = json.loads((package.folder / "card.json").read_text())
    assert Counter(each["outcome"] for each in plain["results"]) == {"passed": 1, "failed": 2, "skipped": 1}
    assert "kvplug" in plain["versions"]


def test_a_report_of_another_name_is_refused_at_once(package: Package) -> None:
    done = package.judge("--kvplug-report", "card.html")
    assert done.returncode == 4
    assert "card.html: the name of a report ends in .json or .md" in done.stderr


def test_a_report_into_no_folder_is_refused_before_anything_has_run(package: Package) -> None:
    done = package.judge("--kvplug-report", "cards/card.json")
    assert done.returncode == 4
    assert "cards/card.json: there is no folder" in done.stderr


def test_an_installed_transport_is_judged_without_a_test_file(tmp_path: Path) -> None:
    package = Package(tmp_path)
    done = package.judge("--kvplug-transport", "pipe:memory", "--collect-only", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "TestMemoryPipeContract::test_a_tensor_of_each_dtype_arrives_with_its_bits[bool]" in done.stdout
    assert "TestMine::" not in done.stdout, "the folder's own tests were not asked for"


def test_test_files_that_are_named_are_judged_as_well(package: Package) -> None:
    done = package.judge("--kvplug-transport", "pipe:memory", "--collect-only", "-q", "tests")
    assert "TestMemoryPipeContract::" in done.stdout
    assert "TestMine::" in done.stdout


def test_a_name_that_is_not_installed_is_told_with_those_that_are(package: Package) -> None:
    done = package.judge("--kvplug-transport", "memmory")
    assert done.returncode == 4
    assert "memmory" in done.stderr
    assert "memory" in done.stderr


def test_a_run_without_any_suite_says_nothing_of_the_kit(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text("def test_nothing(): pass\n")
    package = Package(tmp_path)
    done = package.judge("test_plain.py")
    assert done.returncode == 0
    assert "conformance" not in done.stdout
