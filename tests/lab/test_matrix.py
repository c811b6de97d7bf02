"""The program that writes which tests catch which mutant."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import matrix
from kvplug_testing.scorecard import Outcome, Result, Scorecard
from made_up import made_up
from matrix import (
    UNRUN,
    InputError,
    Matrix,
    NoResultError,
    WorkFile,
    caught_of,
    differences,
    main,
    read_matrix,
    short_names,
)

WRONG, MISSPELT = "made_up.TestIsWrong", "made_up.TestIsMisspelt"
OLD = Matrix(
    "quick",
    {
        ("stores.TestA", "STORE-1"): frozenset({"test_a", "test_b"}),
        ("stores.TestB", "STORE-1"): frozenset({"test_a", UNRUN}),
        ("stores.TestB", "STORE-2"): frozenset({"test_c"}),
    },
)
SLEEPS = """

class TestSleeps(Made):
    breaks = ("PIPE-1",)

    def prepare(self):
        import time
        time.sleep(300)
"""
MORE_TESTS = """
    @law("PIPE-1")
    @pytest.mark.parametrize("time", [1, 2])
    def test_that_works_again(self, ready, time):
        Call(self.work).result()

    @law("PIPE-1", level="full")
    def test_that_takes_long(self, ready):
        Call(self.work).result()

"""


def written(path: Path, given: Matrix) -> Path:
    path.write_text(given.as_text())
    return path


# -- the file --------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    assert read_matrix(written(tmp_path / "matrix.txt", OLD)) == OLD


def test_a_line_is_a_mutant_and_a_law_with_the_names_of_tests() -> None:
    names = {test: short for short, test in short_names(["test_a", "test_b", "test_c"]).items()}
    head, first, second, third, middle, *tests = OLD.as_text().splitlines()
    assert head.startswith("# level quick;")
    assert first == f"stores.TestA STORE-1 {' '.join(sorted([names['test_a'], names['test_b']]))}"
    assert second == f"stores.TestB STORE-1 {names['test_a']} ..."
    assert third == f"stores.TestB STORE-2 {names['test_c']}"
    assert middle == "# tests"
    assert tests == sorted(f"{short} {test}" for test, short in names.items())


def test_a_new_test_does_not_rename_the_others() -> None:
    few = short_names(f"test_{i}" for i in range(20))
    more = short_names(f"test_{i}" for i in range(40))
    assert few.items() <= more.items()


def test_short_names_are_unique() -> None:
    assert len(short_names(f"test_{i}" for i in range(3000))) == 3000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: "", "part is missing"),
        (lambda text: "some other file\n", "part is missing"),
        (lambda text: text[: text.index("# tests")], "part is missing"),
        (lambda text: text[:-15], "part is missing"),
        (lambda text: text.replace("level quick", "level high"), "it begins with '# level high"),
    ],
)
def test_what_is_no_whole_matrix_is_refused(tmp_path: Path, change: object, said: str) -> None:
    path = tmp_path / "matrix.txt"
    path.write_text(change(OLD.as_text()))  # type: ignore[operator]
    with pytest.raises(InputError, match=said):
        read_matrix(path)


# -- differences -----------------------------------------------------------------------------------


def test_what_is_caught_by_fewer_tests_or_by_none_is_listed() -> None:
    new = Matrix(
        "quick",
        {
            ("stores.TestA", "STORE-1"): frozenset({"test_b", "test_new"}),
            ("stores.TestB", "STORE-1"): frozenset(),
            ("stores.TestNew", "STORE-2"): frozenset({"test_c"}),
        },
    )
    assert list(differences(OLD, new)) == [
        (
            "stores.TestB is caught by no test of STORE-1. Before: ..., test_a."
            " Other mutants of its file that tests of STORE-1 catch: 1"
        ),
        "stores.TestA is caught by 2 tests of STORE-1, no longer by test_a",
        "stores.TestB no longer exists, or no longer breaks STORE-2",
    ]
    assert list(differences(OLD, OLD)) == []


def test_a_mutant_that_no_test_catches_fails_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = {**OLD.rows, ("stores.TestA", "STORE-1"): frozenset({"test_b"})}
    none = {**OLD.rows, ("stores.TestB", "STORE-2"): frozenset[str]()}
    old = str(written(tmp_path / "old", OLD))
    assert main(["--compare", old, str(written(tmp_path / "fewer", Matrix("quick", fewer)))]) == 0
    assert "stores.TestA is caught by 1 tests of STORE-1, no longer by test_a" in capsys.readouterr().out
    assert main(["--compare", old, str(written(tmp_path / "none", Matrix("quick", none)))]) == 1
    assert "stores.TestB is caught by no test of STORE-2" in capsys.readouterr().out


def test_matrices_of_two_levels_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = written(tmp_path / "old", OLD), written(tmp_path / "new", Matrix("full", OLD.rows))
    assert main(["--compare", str(old), str(new)]) == 2
    assert "one matrix is of level quick, the other of level full" in capsys.readouterr().err


# -- the work file ---------------------------------------------------------------------------------


def test_the_last_result_of_a_mutant_with_the_same_sources_and_level_counts(tmp_path: Path) -> None:
    work = WorkFile(tmp_path / "new" / "work")
    work.add(mutant="m", level="quick", stamp="1", caught={"ALL-1": ["test_a"]})
    work.add(mutant="m", level="quick", stamp="2", caught={"ALL-1": ["test_b"]})
    for each in (work, WorkFile(work.path)):
        assert each.caught("m", "2", "quick") == {"ALL-1": ["test_b"]}
        assert each.caught("m", "1", "quick") is None
        assert each.caught("m", "2", "full") is None
        assert each.caught("other", "2", "quick") is None


@pytest.mark.parametrize("left", [1, 5, 40])
def test_a_line_that_was_cut_off_is_judged_again(tmp_path: Path, left: int) -> None:
    path = tmp_path / "work"
    work = WorkFile(path)
    work.add(mutant="m", level="quick", stamp="1", caught={})
    work.add(mutant="n", level="quick", stamp="1", caught={})
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:left]}")
    work = WorkFile(path)
    assert work.caught("m", "1", "quick") == {}
    assert work.caught("n", "1", "quick") is None
    work.add(mutant="n", level="quick", stamp="1", caught={})
    assert WorkFile(path).caught("n", "1", "quick") == {}


@pytest.mark.parametrize("text", ["some words", "some words\n", "[1]\n", '{"other": 1}\n', "\x00\n"])
def test_another_file_is_refused_as_work_file_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "work"
    path.write_text(text)
    with pytest.raises(InputError, match=r"line 1 is not a result of this program"):
        WorkFile(path)
    assert path.read_text() == text


# -- wrong arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nonsense"], "no mutant is called nonsense: name a file (made_up) or one such as made_up."),
        (["--output", "{folder}/conftest.py", "made_up"], "conftest.py is not a matrix of this program"),
        (["--output", "{folder}/old", "--level", "full", WRONG], "old is of level quick: add --level quick"),
        (["--compare", "{folder}/nothing", "{folder}/old"], "nothing: No such file"),
        (["--work", "{folder}"], "Is a directory"),
        (["--output", "{folder}/nowhere/matrix.txt"], "nowhere/matrix.txt: its folder does not exist"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    path = made_up(tmp_path)
    written(tmp_path / "old", OLD)
    assert main([each.format(folder=tmp_path) for each in arguments], [path]) == 2
    assert said in capsys.readouterr().err
    assert (tmp_path / "old").read_text() == OLD.as_text()


@pytest.mark.parametrize(
    "arguments", [["--compare", "one"], ["stores", "--compare", "a", "b"], ["--jobs", "0"]]
)
def test_arguments_that_do_not_fit_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


# -- a whole run -----------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_stores_each_result_and_a_second_one_repeats_only_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = made_up(tmp_path), tmp_path / "matrix.txt"
    here = ["--work", str(tmp_path / "work"), "--output", str(output)]

    assert main([WRONG, MISSPELT, "--jobs", "2", *here], [path]) == 1
    both = Matrix(
        "quick",
        {
            (WRONG, "PIPE-1"): frozenset({"test_that_works"}),
            (WRONG, "ALL-7"): frozenset({"test_that_leaves_nothing"}),
            (MISSPELT, "PIPE-1"): frozenset(),
            (MISSPELT, "ALL-7"): frozenset(),
        },
    )
    assert read_matrix(output) == both
    said = capsys.readouterr()
    assert "2 mutants, 2 to judge" in said.err
    assert f"{MISSPELT} is caught by no test of PIPE-1" in said.out

    assert main([WRONG, *here, "--compare"], [path]) == 0
    assert "1 mutants, 0 to judge" in capsys.readouterr().err

    path.write_text(path.read_text().replace("def test_that_works", "def not_a_test"))
    assert main([WRONG, *here, "--compare"], [path]) == 1
    said = capsys.readouterr()
    assert "1 mutants, 1 to judge" in said.err
    assert said.out == (
        f"{WRONG} is caught by no test of PIPE-1. Before: test_that_works."
        " Other mutants of its file that tests of PIPE-1 catch: 0\n"
    )
    assert read_matrix(output) == both


@pytest.mark.full
@pytest.mark.parametrize(("level", "more"), [("quick", set()), ("full", {"test_that_takes_long"})])
def test_all_tests_up_to_the_level_run_also_on_a_mutant_that_is_caught(
    tmp_path: Path, level: str, more: set[str]
) -> None:
    path, output = made_up(tmp_path), tmp_path / "matrix.txt"
    path.write_text(path.read_text().replace("class TestIsWrong(", f"{MORE_TESTS}\nclass TestIsWrong("))
    where = ["--work", str(tmp_path / "work"), "--output", str(output)]
    assert main([WRONG, "--level", level, *where], [path]) == 0
    found = read_matrix(output)
    assert found.level == level
    assert found.rows[WRONG, "PIPE-1"] == {"test_that_works", "test_that_works_again", *more}


@pytest.mark.full
def test_a_control_that_fails_leaves_its_mutants_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_up(tmp_path, "\n    def work(self):\n        assert 1 + 1 == 3\n")
    where = ["--work", str(tmp_path / "work"), "--output", str(tmp_path / "matrix.txt")]
    assert main([WRONG, *where], [path]) == 1
    assert "NO RESULT: TestHasNoFault has no fault and fails test_that" in capsys.readouterr().err


def test_a_mutant_whose_test_was_not_prepared_in_time_has_no_result(tmp_path: Path) -> None:
    late = Result(
        subject="pipe TestIsWrong",
        suite="TestIsWrong",
        test="test_that_works",
        laws=("PIPE-1",),
        outcome=Outcome.SKIPPED,
        reason="no breach: in setup: Failed: Timeout (>60.0s) from pytest-timeout.",
    )
    with pytest.raises(NoResultError, match="test_that_works was not prepared in time"):
        caught_of(made_up(tmp_path), "TestIsWrong", Scorecard(level="full", results=(late,)))


@pytest.mark.full
def test_a_mutant_that_is_not_judged_in_time_is_named_and_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, work, output = made_up(tmp_path, SLEEPS), tmp_path / "work", tmp_path / "matrix.txt"
    names = ["made_up.TestSleeps", "--deadline", "4", "--work", str(work), "--output", str(output)]
    assert main(names, [path]) == 1
    said = capsys.readouterr().err
    assert "NO RESULT: it was not judged within 4 s (--deadline)" in said
    assert "no matrix: 1 mutants have no result: made_up.TestSleeps" in said
    assert not output.exists()
    assert work.read_text() == ""


@pytest.mark.full
def test_an_ended_program_ends_its_processes_and_keeps_the_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, work = made_up(tmp_path, SLEEPS), tmp_path / "work"
    started: list[matrix.Judging] = []

    class Noted(matrix.Judging):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            started.append(self)

    monkeypatch.setattr(matrix, "Judging", Noted)

    def end() -> None:
        while len(started) < 2:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end).start()
    output = ["--output", str(tmp_path / "matrix.txt")]
    assert main([WRONG, "made_up.TestSleeps", "--work", str(work), *output], [path]) == 130
    assert "interrupted; the same command resumes" in capsys.readouterr().err
    assert [each.process.returncode for each in started] == [1, -signal.SIGKILL]
    assert [json.loads(line)["mutant"] for line in work.read_text().splitlines()] == [WRONG]
