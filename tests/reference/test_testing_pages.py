"""The reference of the conformance kit: laws, options of pytest, and public names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import kvplug_testing
from kvplug_testing import pytest_plugin
from kvplug_testing.contract.base import LEVELS
from kvplug_testing.laws import LAWS

PAGES = Path(__file__).parents[2] / "docs" / "reference"
HEADING = re.compile(r"^\(([A-Z]+-\d+)\)=\n([A-Z]+-\d+), (.+)\n: ", re.MULTILINE)


def headings() -> list[tuple[str, str, str]]:
    return HEADING.findall((PAGES / "laws.md").read_text())


def test_every_law_is_on_its_page_with_its_title_in_its_order() -> None:
    assert [(id_, title) for _, id_, title in headings()] == [(law.id, law.title) for law in LAWS.values()]


def test_every_law_can_be_linked_to() -> None:
    assert [target for target, *_ in headings()] == [*LAWS]
    text = (PAGES / "laws.md").read_text()
    assert len(re.findall(r"^\([A-Z]+-\d+\)=$", text, re.MULTILINE)) == len(LAWS)


class Options:
    """Stands where pytest's parser does."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def getgroup(self, *_: str) -> Options:
        return self

    def addoption(self, name: str, *, help: str, metavar: str = "", **given: Any) -> None:  # noqa: A002
        value = metavar or "|".join(given.get("choices", ()))
        self.rows.append(f"| `{name} {value}` | {help} |".replace("|".join(LEVELS), "LEVEL"))


def option_rows() -> list[str]:
    options = Options()
    pytest_plugin.pytest_addoption(options)  # type: ignore[arg-type]
    return options.rows


def name_rows() -> list[str]:
    return [f"| `{name}` |" for name in kvplug_testing.__all__]


@pytest.mark.parametrize("rows", [option_rows, name_rows])
def test_every_option_of_pytest_and_every_public_name_is_on_the_page(rows: Any) -> None:
    text = (PAGES / "testing.md").read_text()
    missing = [row for row in rows() if row not in text]
    assert not missing, "docs/reference/testing.md lacks:\n" + "\n".join(missing)


def test_nothing_is_on_the_page_that_is_gone() -> None:
    known = [*option_rows(), *name_rows(), *(f"| `{level}` |" for level in LEVELS)]
    table = [line for line in (PAGES / "testing.md").read_text().splitlines() if line.startswith("| `")]
    gone = [line for line in table if not line.startswith(tuple(known)) and "kvplug_testing." not in line]
    assert not gone, "docs/reference/testing.md has too much:\n" + "\n".join(gone)


def test_levels_are_said_alike_in_the_two_places() -> None:
    """The plugin that pytest loads everywhere imports nothing, so it says them again."""
    assert pytest_plugin._LEVELS == LEVELS
