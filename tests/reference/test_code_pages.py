"""Errors and variables are on their pages, wherever in the source they are declared or read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

import kvplug.errors
from kvplug.config import KEYS, RESERVED, RESERVED_PREFIXES

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
SOURCES = [
    path
    for folder in ("kvplug", *(f"plugins/{path.name}" for path in (ROOT / "plugins").glob("kvplug-*")))
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in path.relative_to(ROOT).parts
]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources_with(pattern: str) -> list[Path]:
    """Those that have it: to parse all of them takes many seconds."""
    return [path for path in SOURCES if re.search(pattern, path.read_text(encoding="utf-8"), re.M)]


def rows_of(page: str, start: str) -> list[str]:
    return [line for line in (PAGES / page).read_text().splitlines() if line.startswith(start)]


# -- errors --------------------------------------------------------------------------------------


def errors() -> dict[str, str]:
    """The public errors of kvplug but for those of ``kvplug.errors``: path and summary."""
    known = {name for name, each in vars(kvplug.errors).items() if isinstance(each, type)}
    found: dict[str, str] = {}
    classes = [
        (path, node)
        for path in sources_with(r"^ *class \w+\([^)]*Error\b")
        if path != ROOT / "kvplug" / "errors.py"
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    ]
    for _ in range(3):  # errors of errors
        for path, node in classes:
            if known & {ast.unparse(base).rpartition(".")[2] for base in node.bases} and node.name[0] != "_":
                known.add(node.name)
                parts = path.relative_to(ROOT).with_suffix("").parts
                module = ".".join(parts[2:] if parts[0] == "plugins" else parts).removesuffix(".__init__")
                summary = (ast.get_docstring(node) or "").partition("\n\n")[0]
                found[f"{module}.{node.name}"] = " ".join(summary.split()).replace("``", "`")
    return found


def test_every_error_that_is_declared_elsewhere_is_on_the_page_and_none_that_is_gone() -> None:
    rows = {row.split("`")[1]: row.split("|")[3].strip() for row in rows_of("errors.md", "| `kvplug")}
    assert rows == errors()
    assert "kvplug_testing.peers.ChildError" in rows and all(rows.values())


# -- variables -----------------------------------------------------------------------------------

THROUGH = {
    ("kvplug/config/sources.py", "name"),
    ("kvplug/assembly/registry/registry.py", "variable"),
}
"""Where a variable's name is not in the source: all there are, and an argument, which is one of ours."""


def reads(tree: ast.AST) -> Iterable[ast.expr]:
    """What stands for the name, wherever a variable is read or asked for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and is_environ(node.value):
            yield node.slice
        elif isinstance(node, ast.Compare) and any(is_environ(each) for each in node.comparators):
            yield node.left
        elif isinstance(node, ast.Call) and node.args:
            asked = node.func.value if isinstance(node.func, ast.Attribute) else None
            name = ast.unparse(node.func).rpartition(".")[2]
            reads_one = name in ("get", "pop", "setdefault") and asked is not None and is_environ(asked)
            if reads_one or name in ("getenv", "getenvb"):
                yield node.args[0]


def is_environ(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2] in ("environ", "environb", "environment")


@cache
def variables() -> tuple[set[str], set[tuple[str, str]]]:
    """The names that are read, and where a name is not in the source."""
    named, through = set[str](), set[tuple[str, str]]()
    for path in sources_with("environ|getenv"):
        tree = tree_of(path)
        constants = {
            ast.unparse(target): node.value
            for node in tree.body
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        }
        for read in reads(tree):
            value = constants.get(ast.unparse(read), read)
            if isinstance(value, ast.Constant):
                named.add(str(value.value))
            else:
                through.add((path.relative_to(ROOT).as_posix(), ast.unparse(read)))
    return named, through


def test_every_variable_that_is_read_is_on_the_page() -> None:
    named, through = variables()
    assert {"KVPLUG_SECRET", "KVPLUG_CONFIG"} <= named
    assert through == THROUGH
    text = (PAGES / "environment.md").read_text()
    assert not {name for name in named if f"| `{name}` |" not in text}


@pytest.mark.skipif(not any("plugins" in path.parts for path in SOURCES), reason="there are no plugins here")
def test_no_variable_of_others_is_on_the_page_that_nothing_reads() -> None:
    rows = {row.split("`")[1] for row in rows_of("environment.md", "| `") if "`KVPLUG_" not in row[:10]}
    assert rows == {name for name in variables()[0] if not name.startswith("KVPLUG_")}


def test_every_variable_of_ours_that_the_code_names_is_known_as_one() -> None:
    """Any other of this form is refused as a typo."""
    named = {name for path in SOURCES for name in re.findall(r"[\"'](KVPLUG_[A-Z0-9_]+)", path.read_text())}
    known = {*RESERVED, *RESERVED_PREFIXES, *(f"KVPLUG_{key.upper()}" for key in KEYS)}
    unknown = {name for name in named - known if not name.startswith(tuple(RESERVED_PREFIXES))}
    assert not unknown - {"KVPLUG_API", "KVPLUG_OPTIONS__"}
