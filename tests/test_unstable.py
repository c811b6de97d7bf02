"""``unstable.toml`` lists tests that exist, each until a date."""

from __future__ import annotations

import datetime
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_unstable_tests_exist_and_are_repaired_by_their_date() -> None:
    tests = tomllib.loads((ROOT / "tests" / "unstable.toml").read_text()).get("test", [])
    today = datetime.datetime.now(tz=datetime.UTC).date()
    for test in tests:
        assert {*test} == {"name", "reason", "repaired_by"}, test
        file, *_, function = test["name"].split("::")
        places = [ROOT / file, *(ROOT / "plugins/kvplug-testing/kvplug_testing/contract").rglob("*.py")]
        there = any(f"def {function}(" in each.read_text() for each in places)
        assert there, f"{test['name']} does not exist"
    late = [test["name"] for test in tests if test["repaired_by"] < today]
    assert not late, f"repair these, or remove what they judge: {', '.join(late)}"
