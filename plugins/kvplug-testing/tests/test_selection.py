"""Which tests run, and in which order: simple laws first, one law alone, and no more after three hangs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvplug_testing.hangs import MOST
from kvplug_testing.laws import selected
from kvplug_testing.scorecard import from_json

# -- names of laws -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["PIPE-4"], ["PIPE-4"]),
        (["pipe-4", "END-1", "PIPE-4"], ["END-1", "PIPE-4"]),
        (["end"], ["END-1", "END-2"]),
        ([], []),
    ],
)
def test_a_law_is_named_by_its_id_and_several_by_their_kind(names: list[str], ids: list[str]) -> None:
    assert selected(names) == tuple(ids)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("PIPE-44", r"no law 'PIPE-44'; did you mean PIPE-4\b"),
        ("lokup-3", r"no law 'lokup-3'; did you mean LOOKUP-3\b"),
        ("PIP", r"did you mean PIPE\b"),
        ("xyz", r"no law 'xyz'\. Kinds of laws are ALL, END, PIPE,"),
    ],
)
def test_a_name_that_is_no_laws_is_told_with_those_that_are_near(name: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        selected(["PIPE-4", name])


# -- in a run ----------------------------------------------------------------------------------------

CORRUPT = """
import os
from kvplug.transport import Kind
from kvplug_testing import law
from kvplug_testing.contract import base

class Leaks(base.Contract):
    @law("ALL-7")
    def test_that_nothing_is_left(self):
        self.left = os.dup(0)
        assert 1 + 1 == 3

class Tensors(base.Contract):
    @law("PIPE-1")
    def test_that_bits_arrive(self):
        assert 1 + 1 == 3

Leaks.__module__ = Tensors.__module__ = "kvplug_testing.contract.made_up"

class TestMine(Tensors, Leaks):
    kind = Kind.PIPE
    settle_s = 0.2
"""


@pytest.mark.full
def test_corruption_is_reported_before_what_it_leaves_behind(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(CORRUPT)
    done = package.judge("--kvplug-report", "card.json")
    assert done.returncode == 1
    results = from_json((package.folder / "card.json").read_text()).results
    assert [result.test for result in results] == ["test_that_bits_arrive", "test_that_nothing_is_left"]
    assert done.stdout.index("failed: PIPE-1") < done.stdout.index("failed: ALL-7")


@pytest.mark.full
def test_one_law_is_judged_alone(package: Any) -> None:
    more = "def test_of_no_suite():\n    raise AssertionError('it ran')\n"
    (package.folder / "tests" / "test_more.py").write_text(more)
    done = package.judge("--kvplug-law", "pipe-5", "--kvplug-law", "END", "--kvplug-report", "card.json")
    assert "1 failed, " in done.stdout
    card = from_json((package.folder / "card.json").read_text())
    assert [result.test for result in card.results] == ["test_that_is_broken"]
    assert card.only == ("END-1", "END-2", "PIPE-5")
    assert "level quick, only END-1, END-2, PIPE-5\n" in done.stdout
    assert "`python -m kvplug_testing.laws ID` prints the law with this id" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kvplug-law", "ALL-4"], "ALL-4: level quick has no test of it, --kvplug-level long has"),
        (["--kvplug-law", "PIPE-44"], "--kvplug-law: there is no law 'PIPE-44'; did you mean PIPE-4"),
        (
            ["--kvplug-law", "QUEUE"],
            "QUEUE-5: no test here judges it; judged are ALL-1, ALL-4, ALL-7, PIPE-1",
        ),
        (["--kvplug-law", "PIPE", "-k", "nothing"], "no test here judges it; judged are none"),
        (["--kvplug-report", "card.html"], "card.html: the name of a report ends in .json or .md"),
        (["--kvplug-report", "cards/card.json"], "cards/card.json: there is no folder"),
        (["--kvplug-transport", "memmory"], "did you mean 'memory'"),
        (["alone"], "test_alone.py::test_alone names a law and stands in no suite"),
    ],
)
def test_what_cannot_be_judged_or_reported_is_told_before_anything_runs(
    package: Any, arguments: list[str], said: str
) -> None:
    if arguments == ["alone"]:
        alone = 'from kvplug_testing import law\n\n@law("PIPE-1")\ndef test_alone(): ...\n'
        (package.folder / "tests" / "test_alone.py").write_text(alone)
        arguments = []
    done = package.judge(*arguments)
    assert done.returncode == 4
    assert said in done.stderr


HANGING = """
import pytest
from kvplug.transport import Kind
from kvplug_testing import law, waits
from kvplug_testing.contract.base import Contract

waits.patience_s = 0.1

class TestMine(Contract):
    kind = Kind.PIPE

    @law("PIPE-1")
    def test_that_passes(self): pass

    @law("PIPE-1")
    @pytest.mark.parametrize("n", range(20))
    def test_that_hangs(self, n):
        waits.until(lambda: False, what="a message")

    @law("PIPE-2")
    def test_after_that(self): pass

class TestOther(Contract):
    kind = Kind.PIPE

    @law("PIPE-1")
    def test_of_another(self): pass

    @law("PIPE-1", timeout_s=0.5)
    @pytest.mark.parametrize("n", range(5))
    def test_that_never_ends(self, n):
        import time
        time.sleep(30)
"""


@pytest.mark.full
def test_after_three_hangs_no_more_of_a_suite_is_run_and_the_report_says_so(package: Any) -> None:
    (package.folder / "tests" / "test_mine.py").write_text(HANGING)
    done = package.judge("--kvplug-report", "card.json", "-rfE")
    results = json.loads((package.folder / "card.json").read_text())["results"]
    outcomes = {result["test"]: (result["outcome"], result["reason"]) for result in results}
    assert outcomes["test_that_passes"][0] == outcomes["test_of_another"][0] == "passed"
    for n in range(MOST):
        assert "a message did not come in 0.1 s" in outcomes[f"test_that_hangs[{n}]"][1]
        assert "Timeout" in outcomes[f"test_that_never_ends[{n}]"][1]
    given_up = (
        "not run: 3 tests of TestMine ran into a deadline: test_that_hangs[0], test_that_hangs[1],"
        " test_that_hangs[2]"
    )
    not_run = [test for test, outcome in outcomes.items() if outcome == ("failed", given_up)]
    assert not_run == [*(f"test_that_hangs[{n}]" for n in range(MOST, 20)), "test_after_that"]
    assert outcomes["test_that_never_ends[3]"][1].startswith("not run: 3 tests of TestOther")
    assert f"- failed: 18 more tests were {given_up}\n" in done.stdout
    assert done.stdout.count("law PIPE-1 (what arrives):\n") == 2 * MOST, "the law is quoted for what ran"
    assert Path(package.folder, "card.json").exists()
