"""Waivers: what is waived is told, and one that waives nothing is refused."""

from __future__ import annotations

import re
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing import PipeContract, waivers


def test_what_is_waived_is_told_and_the_run_is_green(package: Any) -> None:
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


OTHER = """
from kvplug.transport import Kind
from kvplug_testing import law
from kvplug_testing.contract.base import Contract

class TestOther(Contract):
    kind = Kind.PIPE

    @law("PIPE-1")
    def test_that_is_broken(self):
        assert False

    @law("PIPE-1")
    def test_of_its_own(self):
        pass
"""


def test_a_waiver_of_another_class_waives_nothing(package: Any) -> None:
    (package.folder / "tests" / "test_other.py").write_text(OTHER)
    package.waive("""
        "TestOther::test_that_is_broken" = "not mine"
    """)
    assert package.outcomes("tests/test_mine.py")["test_that_is_broken"].outcome == "failed"
    assert package.outcomes("tests/test_other.py")["test_that_is_broken"].outcome == "waived"


QUEUE = """
from kvplug_testing import MessageQueueContract, law

class TestQueue(MessageQueueContract):
    transport = "memory"
    across_processes = False

    @law("ALL-1")
    def test_ending_wakes_a_call_that_is_blocked(self):
        pass
"""

NARROWER = """
class TestNarrower(Contract):
    kind = Kind.PIPE

    @law("PIPE-1")
    @mark.parametrize("dtype", ["bool"])
    def test_of_a_dtype(self, dtype):
        pass
"""

pytestmark = pytest.mark.full

PARAMETERS = """
from pytest import mark
from kvplug.transport import Kind
from kvplug_testing import law
from kvplug_testing.contract.base import Contract

class TestMine(Contract):
    kind = Kind.PIPE
    transport = "memory"

    @law("PIPE-1")
    @mark.parametrize("dtype", ["bool", "complex32"])
    def test_a_dtype(self, dtype):
        assert dtype == "bool"

    @law("PIPE-1", level="long")
    @mark.parametrize("way", ["a::b", "there"])
    def test_that_takes_for_ever(self, way):
        assert False
"""


def test_of_a_test_with_parameters_those_that_fail_can_be_waived(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(PARAMETERS)
    package.waive('"test_a_dtype[complex32]" = "the device has none"')
    assert package.judge().returncode == 0
    package.waive('test_a_dtype = "the device has none"')
    found = package.outcomes()
    assert found["test_a_dtype[complex32]"].outcome == "waived"
    assert "must go" in found["test_a_dtype[bool]"].reason


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "pyproject.toml").write_text(text)
    return folder


WAIVER = '[tool.kvplug.waivers]\ntest_a_dtype = "because"\n'


@pytest.mark.parametrize("head", ["", '[project]\nname = "mine"\n', "[tool.ruff]\n"])
def test_waivers_are_read_from_the_nearest_file_that_is_a_packages_or_says_something_to_kvplug(
    tmp_path: Path, head: str
) -> None:
    outer = write(tmp_path / "outer", head + WAIVER)
    inner = write(outer / "inner", "[tool.ruff]\n")
    found = waivers.waivers_for(inner)
    assert found.path == outer / "pyproject.toml"
    assert found.reason("TestMine", "test_a_dtype") == "because"
    for nearer in ('[project]\nname = "other"\n', "[tool.kvplug]\n"):
        write(inner, nearer)
        assert waivers.waivers_for(inner) == waivers.Waivers(inner / "pyproject.toml")


def test_a_waiver_of_a_law_that_is_kept_is_an_error(package: Any) -> None:
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
def test_a_waiver_that_says_nothing_is_refused(package: Any, text: str, said: str) -> None:
    package.waive(text)
    done = package.judge()
    assert done.returncode == 4
    assert said in done.stderr
    assert "pyproject.toml" in done.stderr


def test_waivers_that_name_no_test_are_told_at_once_with_what_is_near(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(PARAMETERS)
    package.waive("""
        "TestNope::test_a_dtype" = "no such class"
        "TestMin::test_a_dtype" = "nearly a class"
        "TestMine::test_a_type" = "nearly a test"
        "TestMine::test_that_never_was" = "no test at all"
        "TestMine::test_in_which_nobody_takes_part" = "no test of this class"
        "test_a_dtype[complex33]" = "nearly a parameter"
        "TestMine::test_a_dtype[q]" = "no parameter at all"
        "test_that_takes_for_ever[a::c]" = "nor one above the level"
    """)
    done = package.judge("-k", "nothing")
    assert done.returncode == 4
    for said in (
        "TestNope::test_a_dtype (there is no class TestNope",
        "TestMin::test_a_dtype (there is no class TestMin; did you mean 'TestMine'?)",
        "TestMine::test_a_type (there is no test test_a_type; did you mean 'test_a_dtype'?)",
        "TestMine::test_that_never_was (there is no test test_that_never_was",
        "TestMine::test_in_which_nobody_takes_part (there is no test",
        "test_a_dtype[complex33] (it has no such parameters; did you mean 'test_a_dtype[complex32]'?)",
        "TestMine::test_a_dtype[q] (it has no such parameters",
        (
            "test_that_takes_for_ever[a::c] (it has no such parameters; did you mean"
            " 'test_that_takes_for_ever[a::b]'?)"
        ),
    ):
        assert said in done.stderr


GOOD = """
    "TestMine::test_that_takes_for_ever[a::b]" = "of another level"
    "test_a_dtype[complex32]" = "deselected, or not asked for"
    "TestOther::test_of_its_own" = "the file is not named"
    test_of_its_own = "nor is its class"
    "TestMemoryPipeContract::test_pipes_live_on_when_their_listener_is_closed" = "of --kvplug-transport"
    "test_a_tensor_of_each_dtype_arrives_with_its_bits[complex32]" = "of a suite that is not judged"
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("tests/test_mine.py",),
        ("tests/test_mine.py", "-k", "bool"),
        ("tests/test_mine.py::TestMine::test_a_dtype[bool]",),
        ("--kvplug-transport", "queue:memory"),
    ],
    ids=["a file", "-k", "one test", "by name"],
)
def test_a_waiver_of_what_this_run_leaves_out_is_no_error(package: Any, arguments: tuple[str, ...]) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(PARAMETERS)
    (package.folder / "tests" / "test_other.py").write_text(OTHER)
    package.waive(GOOD)
    done = package.judge("--collect-only", "-q", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_name_that_suites_share_is_judged_by_all_of_them(package: Any) -> None:
    """``[abort]`` is a pipe's, and this queue has the test without parameters."""
    (package.folder / "tests" / "test_queue.py").write_text(QUEUE)
    package.waive("""
        "test_ending_wakes_a_call_that_is_blocked[abort]" = "of the pipes in another file"
    """)
    done = package.judge("tests/test_queue.py", "-k", "ending_wakes")
    assert done.returncode == 0, done.stdout + done.stderr


def test_parameters_of_another_class_are_not_this_ones(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(PARAMETERS + NARROWER)
    package.waive("""
        "TestNarrower::test_of_a_dtype[complex32]" = "it has bool only"
    """)
    done = package.judge()
    assert (done.returncode, "it has no such parameters" in done.stderr) == (4, True), done.stderr


def test_a_refused_run_leaves_an_earlier_report_alone(package: Any) -> None:
    report = package.folder / "report.json"
    package.judge("--kvplug-report", str(report))
    before = report.read_text()
    package.waive("""
        test_that_was_never_written = "a slip"
    """)
    assert package.judge("--kvplug-report", str(report)).returncode == 4
    assert report.read_text() == before


def test_one_test_that_is_asked_for_does_not_hide_a_parameter_that_is_not_there(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(PARAMETERS)
    package.waive('"test_a_dtype[complex33]" = "because"')
    done = package.judge("--collect-only", "tests/test_mine.py::TestMine::test_a_dtype[bool]")
    assert "test_a_dtype[complex33] (it has no such parameters" in done.stderr


def test_the_waivers_that_the_docstring_shows_are_of_real_tests() -> None:
    shown = re.search(r"^    \[tool[^\0]+", waivers.__doc__ or "", re.MULTILINE)
    assert shown is not None
    table = tomllib.loads(textwrap.dedent(shown[0]))
    names = table["tool"]["kvplug"]["waivers"]
    assert names
    assert not [name for name in names if not hasattr(PipeContract, waivers.WaiverName.parsed(name).function)]
