"""docs/reference/testing.md has a table for each suite: what its author may set, and what override."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import kvplug_testing
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.suites import every

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "testing.md"
SAME = "BlockingStoreContract"
"""It has the attributes of ``StoreContract``."""
SUITES = [cls for cls in every() if cls.__name__ in kvplug_testing.__all__ and cls.__name__ != SAME]


def in_words(doc: str) -> str:
    """A docstring in Markdown, on one line, without its sections."""
    said = " ".join(re.split(r"\n\n(?:Args|Returns|Raises):", inspect.cleandoc(doc))[0].split())
    return re.sub(r":\w+:`([^`]+)`", r"`\1`", said.replace("``", "`"))


def value(cls: type, name: str) -> str:
    found: Any = getattr(cls, name)
    return repr(dict(found) if isinstance(found, Mapping) else found).replace("'", '"')


@cache
def rows(cls: type) -> tuple[str, ...]:
    """Of what the class itself says: its public attributes, and the methods that wait to be overridden."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    return tuple(_rows(cls, body))


def _rows(cls: type, body: list[ast.stmt]) -> Iterator[str]:
    for node, below in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            name = node.target.id
            if name == "kind" or name.startswith("_") or "ClassVar" not in ast.unparse(node.annotation):
                continue
            assert isinstance(below, ast.Expr), f"{cls.__name__}.{name} has no docstring"
            yield f"| set | `{name}` | `{value(cls, name)}` | {in_words(ast.literal_eval(below.value))} |"
        elif isinstance(node, ast.FunctionDef) and "Override it" in (doc := ast.get_docstring(node) or ""):
            arguments = ", ".join(each.arg for each in node.args.args[1:])
            yield f"| override | `{node.name}({arguments})` | | {in_words(doc)} |"


def expected(cls: type) -> list[str]:
    """All rows of a suite's table. What all suites have stands in a table of its own, once."""
    shared = {row.split("|")[2] for row in rows(Contract)}
    own = [row for each in cls.__mro__[:-1] if each is not Contract for row in rows(each)]
    return list(dict.fromkeys(row for row in own if row.split("|")[2] not in shared))


def table(anchor: str) -> list[str]:
    """The rows below an anchor of the page."""
    section = PAGE.read_text().partition(f"({anchor})=\n")[2].partition("\n(")[0]
    return [line for line in section.splitlines() if line.startswith(("| set |", "| override |"))]


def test_what_every_suite_has_is_in_the_table_of_them_all() -> None:
    assert table("every-suite") == [*rows(Contract)], "as it must be:\n" + "\n".join(rows(Contract))


@pytest.mark.parametrize("cls", SUITES, ids=lambda cls: cls.__name__)
def test_what_an_author_may_set_and_override_is_in_the_table_of_the_suite(cls: type) -> None:
    assert table(cls.__name__.lower()) == expected(cls), "as it must be:\n" + "\n".join(expected(cls))


def test_every_public_suite_is_among_them() -> None:
    assert {cls.__name__ for cls in SUITES} | {SAME} == {
        name for name in kvplug_testing.__all__ if name.endswith("Contract")
    }
    named = {row.split("`")[1] for row in expected(kvplug_testing.PipeContract)}
    assert named >= {"limit_option", "beyond_limit_bytes", "make_endpoint(context)"}
