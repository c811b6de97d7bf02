"""The kit as an author meets it: which tests run, a failure that names its law, the scorecard."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplug_testing.scorecard import Outcome, Result, Scorecard, from_json

pytestmark = pytest.mark.full


SUITE = """
from kvplug.transport.spec import Kind
from kvplug_testing import law
from kvplug_testing.contract.base import Contract

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

    @law("PIPE-1")
    def test_that_is_waived(self):
        raise AssertionError("not yet")

    @law("PIPE-1")
    def test_that_is_kept_but_waived(self):
        pass

    @law("ALL-4", level="long")
    def test_that_takes_longer(self):
        pass

    @law("ALL-7")
    def test_that_leaves_something(self):
        import os
        self.left = os.dup(0)

    @law("ALL-7")
    def test_that_fails_and_leaves_something(self):
        self.test_that_leaves_something()
        raise AssertionError("a call is still blocked")

    waivers = {"test_that_is_waived": "see issue 12", "test_that_is_kept_but_waived": "nothing keeps it"}
"""


class Package:
    """A plugin author's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tests").mkdir()
        (folder / "tests" / "test_mine.py").write_text(SUITE)

    def judge(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run pytest in it."""
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        given = {
            "capture_output": True,
            "text": True,
            "timeout": 100,
            "env": {**os.environ, "COLUMNS": "120"},
        }
        return subprocess.run(command, cwd=self.folder, check=False, **given)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_a_run_quotes_the_broken_laws_and_reports_each_outcome_with_its_reason(package: Package) -> None:
    done = package.judge("--kvplug-report", "card.md", "--kvplug-report", "card.json")
    assert done.returncode == 1
    assert "law PIPE-5 (receiving into memory)" in done.stdout.partition("short test summary")[2]
    for message in (
        "two and a half came",
        "law PIPE-5 (receiving into memory):\n",
        "law PIPE-6 (a receive that runs out of time):\n",
        "    `recv_tensor(out=...)` fills `out`, contiguous or not.",  # the text of the law
        "# Conformance, level quick",
        "## pipe memory (TestMine)",
        "- skipped: PIPE-7 test_of_what_is_not_claimed: ",
        "- waived: PIPE-1 test_that_is_waived: see issue 12",
        "- failed: PIPE-5, PIPE-6 test_that_is_broken: ",
    ):
        assert message in done.stdout
    page, text = ((package.folder / name).read_text() for name in ("card.md", "card.json"))
    assert page.strip() in done.stdout
    found = {result.test: result for result in from_json(text).results}
    assert {test: result.outcome for test, result in found.items()} == {
        "test_that_is_kept": "passed",
        "test_that_is_waived": "waived",
        "test_that_is_kept_but_waived": "failed",
        "test_that_is_broken": "failed",
        "test_of_what_is_not_claimed": "skipped",
        "test_that_leaves_something": "failed",
        "test_that_fails_and_leaves_something": "failed",
    }
    assert "in one process (across_processes)" in found["test_of_what_is_not_claimed"].reason
    assert found["test_that_fails_and_leaves_something"].reason == "AssertionError: a call is still blocked"
    assert "left behind: descriptors" in found["test_that_leaves_something"].reason
    assert {result.subject for result in found.values()} == {"pipe memory"}
    assert f", kvplug-testing {from_json(text).versions['kvplug']}" in page


def test_one_law_is_judged_alone(package: Package) -> None:
    more = "def test_of_no_suite():\n    raise AssertionError('it ran')\n"
    (package.folder / "tests" / "test_more.py").write_text(more)
    done = package.judge("--kvplug-law", "pipe-5", "--kvplug-law", "END", "--kvplug-report", "card.json")
    assert "1 failed, " in done.stdout
    card = from_json((package.folder / "card.json").read_text())
    assert [result.test for result in card.results] == ["test_that_is_broken"]
    assert card.only == ("END-1", "END-2", "PIPE-5")
    assert "level quick, only END-1, END-2, PIPE-5\n" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kvplug-law", "ALL-4"], "no test here judges ALL-4 at level quick"),
        (["--kvplug-law", "PIPE-44"], "there is no law 'PIPE-44'; did you mean 'PIPE-4'"),
        (["--kvplug-transport", "memmory"], "did you mean 'memory'"),
        (["alone"], "test_alone.py::test_alone names a law and stands in no class"),
    ],
)
def test_wrong_options_are_reported_before_anything_runs(
    package: Package, arguments: list[str], message: str
) -> None:
    if arguments == ["alone"]:
        alone = 'from kvplug_testing import law\n\n@law("PIPE-1")\ndef test_alone(): ...\n'
        (package.folder / "tests" / "test_alone.py").write_text(alone)
        arguments = []
    done = package.judge(*arguments)
    assert done.returncode == 4
    assert message in done.stderr


@pytest.mark.parametrize("named", [[], ["tests"]], ids=["no file", "a file"])
def test_an_installed_transport_is_judged_with_the_test_files_that_are_named(
    package: Package, named: list[str]
) -> None:
    done = package.judge("--kvplug-transport", "pipe:memory", "--collect-only", "-q", *named)
    assert done.returncode == 0, done.stdout + done.stderr
    judged = done.stdout.partition("TestMemoryPipeContract::")[2]
    assert judged.startswith("test_a_tensor_of_each_dtype_arrives_with_its_bits"), "simple laws come first"
    assert ("TestMine::" in done.stdout) is bool(named)


def test_a_reason_for_several_tests_is_one_line() -> None:
    given = {"subject": "store x", "suite": "TestX", "reason": "so"}
    tests = [f"test_{n}{part}" for n in range(28) for part in ("[first]", "[other]")]
    skipped, failed = (
        [Result(**given, test=test, laws=(law,), outcome=outcome) for test in tests]
        for law, outcome in (("STORE-2", Outcome.SKIPPED), ("STORE-1", Outcome.FAILED))
    )
    card = Scorecard(level="quick", results=(*skipped, *failed))
    assert [line for line in card.as_markdown().splitlines() if line.startswith("- ")] == [
        "- failed: STORE-1 test_0[first] and 27 more: so",
        "- skipped: STORE-2 test_0[first] and 27 more: so",
    ]
    assert from_json(card.as_json()) == card
