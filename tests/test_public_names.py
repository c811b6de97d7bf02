"""The doors: what each of them shows is there, stands once, and comes from rooms that it may use."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvplug
import kvplug.engine
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


@every_door
def test_what_type_checkers_see_is_what_python_finds(door: Any) -> None:
    stub = stub_of(door)
    assert stub == door._door.homes()
    assert list(stub) == door.__all__
    for name, module in stub.items():
        assert getattr(door, name) is getattr(importlib.import_module(module), name)
    assert set(stub) <= set(dir(door))


@every_door
def test_a_door_shows_nothing_of_the_rooms_above_it(door: Any) -> None:
    assert not [home for home in stub_of(door).values() if home.startswith(ABOVE[door.__name__] or "-")]


def test_a_public_name_stands_at_one_door() -> None:
    every = [name for door in DOORS for name in stub_of(door)]
    assert sorted(every) == sorted(set(every))


@every_door
def test_no_public_name_hides_a_module_of_the_package(door: Any) -> None:
    rooms = {path.stem for path in Path(door.__file__).parent.iterdir()}
    assert not rooms & set(stub_of(door))


@every_door
def test_a_name_that_is_not_there_is_an_attribute_error(door: Any) -> None:
    with pytest.raises(AttributeError, match=f"module '{door.__name__}' has no attribute 'Pip'"):
        door.Pip  # noqa: B018


def loaded_by(code: str) -> list[str]:
    code = f"import sys; before = set(sys.modules); {code}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.split()


def test_importing_kvplug_loads_nothing_but_itself() -> None:
    loaded = loaded_by("import kvplug")  # where coverage is measured, __future__ was loaded before
    assert [name for name in loaded if name != "__future__"] == ["kvplug", "kvplug.door"]


def test_an_error_costs_only_the_errors() -> None:
    ours = [name for name in loaded_by("from kvplug import ConfigError") if name.startswith("kvplug")]
    assert ours == ["kvplug", "kvplug.door", "kvplug.errors"]
