"""docs/reference/testing.md has a table for each suite: what its author may set, and what override."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import kvplug_testing
from kvplug_testing.contract.base import Contract

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "testing.md"
SAME = "BlockingStoreContract"
"""It has the attributes of ``StoreContract``."""
SUITES = [
    getattr(kvplug_testing, name)
    for name in kvplug_testing.__all__
    if name.endswith("Contract") and name != SAME
]


def rows(cls: type) -> Iterator[tuple[str, str, str]]:
    """The rows of the class itself: its public attributes, and the methods to override."""
    for name, annotation in vars(cls).get("__annotations__", {}).items():
        if name != "kind" and not name.startswith("_") and "ClassVar" in annotation:
            found: Any = getattr(cls, name)
            value = repr(dict(found) if isinstance(found, Mapping) else found).replace("'", '"')
            yield "set", name, value
    for name, member in vars(cls).items():
        if inspect.isfunction(member) and "Override it" in (member.__doc__ or ""):
            yield "override", f"{name}({', '.join([*inspect.signature(member).parameters][1:])})", ""


def expected(cls: type) -> set[tuple[str, str, str]]:
    """All rows of a suite's table. What all suites have stands in a table of its own, once."""
    seen, found = {name for _, name, _ in rows(Contract)}, set()
    for each in cls.__mro__:
        new = {row for row in rows(each) if row[1] not in seen}
        seen |= {name for _, name, _ in new}
        found |= new
    return found


def table(anchor: str) -> set[tuple[str, ...]]:
    """The rows below an anchor of the page, without what they mean."""
    section = PAGE.read_text().partition(f"({anchor})=\n")[2].partition("\n(")[0]
    cells = [
        line.split("|")[1:4] for line in section.splitlines() if line.startswith(("| set", "| override"))
    ]
    return {tuple(cell.strip(" `") for cell in row) for row in cells}


def test_what_every_suite_has_is_in_the_table_of_them_all() -> None:
    assert table("every-suite") == {*rows(Contract)}


@pytest.mark.parametrize("cls", SUITES, ids=lambda cls: cls.__name__)
def test_what_an_author_may_set_and_override_is_in_the_table_of_the_suite(cls: type) -> None:
    assert table(cls.__name__.lower()) == expected(cls)


def test_every_public_suite_is_among_them() -> None:
    assert {cls.__name__ for cls in SUITES} | {SAME} == {
        name for name in kvplug_testing.__all__ if name.endswith("Contract")
    }
