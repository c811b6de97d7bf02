"""The front door's two lists, the one Python looks up and the one type checkers read, are the same."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import kvplug


def read_by_type_checkers() -> dict[str, str]:
    tree = ast.parse(Path(kvplug.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    return {
        alias.name: node.module or ""
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_what_type_checkers_see_is_what_python_finds() -> None:
    assert read_by_type_checkers() == kvplug._HOME


def test_no_public_name_is_listed_twice() -> None:
    assert len(kvplug.__all__) == len(set(kvplug.__all__))
    assert set(kvplug.__all__) <= set(dir(kvplug))


def test_no_public_name_hides_a_module_of_the_package() -> None:
    rooms = {path.stem for path in Path(kvplug.__file__).parent.iterdir()}
    assert not rooms & set(kvplug.__all__)


def test_importing_kvplug_loads_nothing_but_itself() -> None:
    code = "import sys; before = set(sys.modules); import kvplug; print(sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['kvplug']"


def test_an_error_costs_only_the_errors() -> None:
    code = (
        "import sys; from kvplug import ConfigError; print(sorted(m for m in sys.modules if 'kvplug' in m))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "['kvplug', 'kvplug.errors']"
