"""The reference of the conformance kit: laws, options of pytest, and public names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kvplug_testing
from kvplug_testing import pytest_plugin
from kvplug_testing.contract.base import LEVELS

PAGES = Path(__file__).parents[2] / "docs" / "reference"


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


def test_every_option_name_and_level_is_on_the_page_and_none_that_is_gone() -> None:
    text = (PAGES / "testing.md").read_text()
    levels = [f"| `{level}` |" for level in LEVELS]
    known = [*option_rows(), *(f"| `{name}` |" for name in kvplug_testing.__all__), *levels]
    missing = [row for row in known if row not in text]
    assert not missing, "docs/reference/testing.md lacks:\n" + "\n".join(missing)
    table = [line for line in text.splitlines() if line.startswith("| `")]
    gone = [line for line in table if not line.startswith(tuple(known)) and "kvplug_testing." not in line]
    assert not gone, "docs/reference/testing.md has too much:\n" + "\n".join(gone)
