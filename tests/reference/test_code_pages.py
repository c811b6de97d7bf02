"""Errors and variables are on their pages, wherever in the source they are declared or read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import kvplug.errors
from kvplug.config.config import KEYS
from kvplug.config.sources import RESERVED, RESERVED_PREFIXES

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
SOURCES = [
    path
    for folder in ("kvplug", *(f"plugins/{path.name}" for path in (ROOT / "plugins").glob("kvplug-*")))
    for path in sorted((ROOT / folder).rglob("*.py"))
    if "tests" not in path.relative_to(ROOT).parts
]


def rows_of(page: str, start: str) -> list[str]:
    return [line for line in (PAGES / page).read_text().splitlines() if line.startswith(start)]


# -- errors --------------------------------------------------------------------------------------


def errors() -> dict[str, str]:
    """The public errors of kvplug but for those of ``kvplug.errors``: path and summary."""
    known = {name for name, each in vars(kvplug.errors).items() if isinstance(each, type)}
    found: dict[str, str] = {}
    classes = [
        (path, node)
        for path in SOURCES
        if path != ROOT / "kvplug" / "errors.py"
        and re.search(r"^ *class \w+\([^)]*Error\b", path.read_text(encoding="utf-8"), re.M)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
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


def test_every_variable_that_is_read_is_on_the_page() -> None:
    read = re.compile(r"(?:environ\.\w+|getenv)\(\s*[\"'](\w+)[\"']")
    named = {name for path in SOURCES for name in read.findall(path.read_text(encoding="utf-8"))}
    text = (PAGES / "environment.md").read_text()
    assert len(named) > 5 and not {name for name in named if f"| `{name}` |" not in text}


def test_every_variable_of_ours_that_the_code_names_is_known_as_one() -> None:
    """Any other of this form is refused as a typo."""
    named = {name for path in SOURCES for name in re.findall(r"[\"'](KVPLUG_[A-Z0-9_]+)", path.read_text())}
    known = {*RESERVED, *RESERVED_PREFIXES, *(f"KVPLUG_{key.upper()}" for key in KEYS)}
    unknown = {name for name in named - known if not name.startswith(tuple(RESERVED_PREFIXES))}
    assert not unknown - {"KVPLUG_API", "KVPLUG_OPTIONS__"}
