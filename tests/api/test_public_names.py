"""The doors: what each of them shows is there, stands once, and comes from rooms that it may use."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import public_names
import pytest

import kvplug
import kvplug.engine
import kvplug.kit
import kvplug.transport

DOORS = (kvplug, kvplug.engine, kvplug.transport)
ABOVE = {
    "kvplug": (),
    "kvplug.engine": ("kvplug.assembly",),
    "kvplug.transport": ("kvplug.assembly", "kvplug.engine", "kvplug.negotiation", "kvplug.metrics"),
}
"""Rooms that a door may show nothing of: imports run down."""

every_door = pytest.mark.parametrize("door", DOORS, ids=lambda door: door.__name__)


def stub_of(door: Any) -> dict[str, str]:
    tree = ast.parse(Path(door.__file__).with_suffix(".pyi").read_text())
    return {
        alias.name: node.module or ""
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }


@pytest.mark.parametrize("door", [*DOORS, kvplug.kit], ids=lambda door: door.__name__)
def test_what_type_checkers_see_is_what_python_finds(door: Any) -> None:
    stub = stub_of(door)
    assert list(stub) == door.__all__
    for name, module in stub.items():
        assert getattr(door, name) is getattr(importlib.import_module(module), name)
    assert set(stub) <= set(dir(door))


@every_door
def test_a_door_shows_nothing_of_the_rooms_above_it(door: Any) -> None:
    assert not [home for home in stub_of(door).values() if home.startswith(ABOVE[door.__name__] or "-")]


def imports_of_kvplug(file: Path) -> Iterator[tuple[str, str]]:
    """Module and name; only the statements are parsed."""
    text = file.read_text(encoding="utf-8")
    for statement in re.findall(r"^ *(from kvplug\b[\w.]* import (?:\([^)]*\)|[^(\n]*))", text, re.M):
        (node,) = ast.parse(statement).body
        assert isinstance(node, ast.ImportFrom)
        yield from ((str(node.module), each.name) for each in node.names)


def test_the_kit_uses_each_name_that_is_there_for_it() -> None:
    files = (public_names.ROOT / "plugins" / "kvplug-testing" / "kvplug_testing").rglob("*.py")
    imported = {each for file in files for each in imports_of_kvplug(file)}
    if not imported:
        pytest.skip("the kit is not here: this is the sdist of the core")
    assert {name for module, name in imported if module == "kvplug.kit"} == {*kvplug.kit.__all__}


def test_a_public_name_stands_at_one_door() -> None:
    every = [name for door in (*DOORS, kvplug.kit) for name in stub_of(door)]
    assert sorted(every) == sorted(set(every))


@every_door
def test_no_public_name_hides_a_module_of_the_package(door: Any) -> None:
    rooms = {path.stem for path in Path(door.__file__).parent.iterdir()}
    assert not rooms & set(stub_of(door))


# -- what plugins that exist use ---------------------------------------------------------------------


def test_the_public_names_are_those_of_the_record() -> None:
    """What is gone or takes other arguments breaks plugins, whose authors were promised that it does not."""
    recorded, now = public_names.recorded(), public_names.names_now()
    said = "plugins that exist may break: keep the old name or argument beside the new one, as the section"
    changed = public_names.differences(recorded, now)
    assert not changed, "\n".join((f"{said} Deprecation of docs/explanation/versions.md says", *changed))
    assert not now.keys() - recorded.keys(), "record them with `python tests/api/public_names.py`"


def test_our_plugins_import_what_is_recorded_and_nothing_else_of_kvplug() -> None:
    root = public_names.ROOT
    files = [*root.glob("plugins/*/kvplug_*/**/*.py"), *root.glob("docs/examples/*/kvplug_*/**/*.py")]
    if not files:
        pytest.skip("the plugins are not here: this is the sdist of the core")
    tools = [root / "plugins" / name for name in ("kvplug-testing", "kvplug-bench")]
    imported = {
        f"{module}.{name}"
        for file in files
        if not any(file.is_relative_to(tool) for tool in tools)
        for module, name in imports_of_kvplug(file)
    }
    assert len(imported) > 100 and not imported - public_names.recorded().keys()
