"""The program that writes which tests catch which mutant."""

from __future__ import annotations

from pathlib import Path

import pytest

import matrix
from kvplug_testing.scorecard import Outcome, Result, Scorecard
from made_up import made_up
from matrix import UNRUN, InputError, NoResultError, Results, caught_of, differences, main

WRONG, MISSPELT = "made_up.TestIsWrong", "made_up.TestIsMisspelt"
OLD = {
    ("stores.TestA", "STORE-1"): frozenset({"test_a", "test_b"}),
    ("stores.TestB", "STORE-1"): frozenset({"test_a", UNRUN}),
    ("stores.TestB", "STORE-2"): frozenset({"test_c"}),
}
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

    @law("PIPE-1", level="long")
    def test_that_takes_long(self, ready):
        Call(self.work).result()

"""


def written(path: Path, rows: matrix.Rows) -> str:
    results = Results(path)
    for mutant in dict.fromkeys(mutant for mutant, _ in rows):
        caught = {law: sorted(tests) for (each, law), tests in rows.items() if each == mutant}
        results.add(mutant=mutant, level="quick", stamp="1", caught=caught)
    return str(path)


# -- results ---------------------------------------------------------------------------------------


def test_the_last_result_of_a_mutant_with_the_same_sources_and_level_counts(tmp_path: Path) -> None:
    results = Results(tmp_path / "results")
    results.add(mutant="m", level="quick", stamp="1", caught={"ALL-1": ["test_a"]})
    results.add(mutant="m", level="quick", stamp="2", caught={"ALL-1": ["test_b"]})
    for each in (results, Results(results.path)):
        assert each.rows("quick") == {("m", "ALL-1"): {"test_b"}}
        assert not each.rows("long")
        found = [each.has("m", "2", "quick"), each.has("m", "1", "quick"), each.has("m", "2", "long")]
        assert found == [True, False, False]


@pytest.mark.parametrize("left", [1, 5, 40])
def test_a_line_that_was_cut_off_is_judged_again(tmp_path: Path, left: int) -> None:
    path = tmp_path / "results"
    results = Results(path)
    for name in ("m", "n"):
        results.add(mutant=name, level="quick", stamp="1", caught={})
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second[:left]}")
    results = Results(path)
    assert [results.has(name, "1", "quick") for name in ("m", "n")] == [True, False]
    results.add(mutant="n", level="quick", stamp="1", caught={})
    assert Results(path).has("n", "1", "quick")


@pytest.mark.parametrize("text", ["some words", "some words\n", "[1]\n", '{"other": 1}\n', "\x00\n"])
def test_another_file_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "results"
    path.write_text(text)
    with pytest.raises(InputError, match=r"line 1 is not a result of this program"):
        Results(path)
    assert path.read_text() == text


def test_mutants_that_fewer_tests_or_none_catch_are_listed() -> None:
    new = {
        ("stores.TestA", "STORE-1"): frozenset({"test_b", "test_new"}),
        ("stores.TestB", "STORE-1"): frozenset[str](),
        ("stores.TestNew", "STORE-2"): frozenset({"test_c"}),
    }
    assert list(differences(OLD, new)) == [
        (
            "stores.TestB is caught by no test of STORE-1. Before: ..., test_a."
            " Other mutants of its file that tests of STORE-1 catch: 1"
        ),
        "stores.TestA is caught by 2 tests of STORE-1, no longer by test_a",
        "stores.TestB no longer exists, or no longer breaks STORE-2",
    ]
    assert list(differences(OLD, OLD)) == []


@pytest.mark.parametrize(("caught", "code"), [({"test_b"}, 0), (set[str](), 1)])
def test_a_mutant_that_no_test_catches_fails_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caught: set[str], code: int
) -> None:
    new = written(tmp_path / "new", {**OLD, ("stores.TestA", "STORE-1"): frozenset(caught)})
    assert main(["--compare", written(tmp_path / "old", OLD), new]) == code
    assert "stores.TestA is caught by " in capsys.readouterr().out


# -- wrong arguments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{folder}/new", "nonsense"], "no mutant is called nonsense: name a file (made_up) or one such as"),
        (["{folder}", WRONG], "Is a directory"),
        (["{folder}/nowhere/results", WRONG], "No such file"),
        (["--compare", "{folder}/conftest.py", "{folder}/new"], "is not a result of this program"),
    ],
)
def test_a_wrong_argument_is_an_error_before_anything_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    path = made_up(tmp_path)
    assert main([each.format(folder=tmp_path) for each in arguments], [path]) == 2
    assert said in capsys.readouterr().err


# -- a whole run -----------------------------------------------------------------------------------


@pytest.mark.full
def test_a_run_stores_each_result_and_a_second_one_repeats_only_what_has_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = made_up(tmp_path), tmp_path / "results"
    assert main([str(results), WRONG, MISSPELT, "--jobs", "2"], [path]) == 1
    assert Results(results).rows("quick") == {
        (WRONG, "PIPE-1"): {"test_that_works"},
        (WRONG, "ALL-7"): {"test_that_leaves_nothing"},
        (MISSPELT, "PIPE-1"): frozenset(),
        (MISSPELT, "ALL-7"): frozenset(),
    }
    said = capsys.readouterr()
    assert "2 mutants, 2 to judge" in said.err
    assert f"{MISSPELT} is caught by no test of PIPE-1" in said.out

    assert main([str(results), WRONG], [path]) == 0
    assert "1 mutants, 0 to judge" in capsys.readouterr().err

    path.write_text(path.read_text().replace("def test_that_works", "def not_a_test"))
    assert main([str(results), WRONG], [path]) == 1
    said = capsys.readouterr()
    assert "1 mutants, 1 to judge" in said.err
    assert f"{WRONG} is caught by no test of PIPE-1" in said.out


@pytest.mark.full
@pytest.mark.parametrize(("level", "more"), [("quick", set()), ("long", {"test_that_takes_long"})])
def test_all_tests_up_to_the_level_run_also_on_a_mutant_that_is_caught(
    tmp_path: Path, level: str, more: set[str]
) -> None:
    path, results = made_up(tmp_path), tmp_path / "results"
    path.write_text(path.read_text().replace("class TestIsWrong(", f"{MORE_TESTS}\nclass TestIsWrong("))
    assert main([str(results), WRONG, "--level", level], [path]) == 0
    assert Results(results).rows(level)[WRONG, "PIPE-1"] == {
        "test_that_works",
        "test_that_works_again",
        *more,
    }


@pytest.mark.full
def test_a_control_that_fails_leaves_its_mutants_without_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = made_up(tmp_path, "\n    def work(self):\n        assert 1 + 1 == 3\n")
    assert main([str(tmp_path / "results"), WRONG], [path]) == 1
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
        caught_of(made_up(tmp_path), "TestIsWrong", Scorecard(level="long", results=(late,)))


@pytest.mark.full
def test_a_mutant_that_is_not_judged_in_time_is_named_and_has_no_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, results = made_up(tmp_path, SLEEPS), tmp_path / "results"
    assert main([str(results), "made_up.TestSleeps", "--deadline", "4"], [path]) == 1
    said = capsys.readouterr().err
    assert "NO RESULT: it was not judged in time (--deadline)" in said
    assert "1 mutants have no result: made_up.TestSleeps" in said
    assert results.read_text() == ""
