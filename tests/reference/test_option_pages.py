"""The options of everything that comes with kvplug are on one page, with what the classes say of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "options.md"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

SECTIONS = """
import importlib, json, sys
from kvplug.config import describe_options

found = []
for line in sys.argv[1:]:
    module, _, distribution = line.partition(" ")
    module = importlib.import_module(module)
    for hook in (
        *("kvplug_transports", "kvplug_stores", "kvplug_directories", "kvplug_connectors", "kvplug_sinks"),
    ):
        for spec in getattr(module, hook, list)():
            cls = spec.load_options()
            if cls is not None:
                title = f"## {spec.kind.replace('_', ' ').capitalize()} `{spec.name}`"
                lines = [title, "", f"From `{distribution}`.", "", "| option | type | default | meaning |"]
                lines.append("| --- | --- | --- | --- |")
                for row in describe_options(cls):
                    lines.append(f"| `{row.name}` | {row.type} | `{row.default}` | {row.help} |")
                found.append("\\n".join(lines))
print(json.dumps(found))
"""


@cache
def sections() -> tuple[str, ...]:
    """As they must stand on the page. Read from the tree: what is told of options needs no installation."""
    modules, path = ["kvplug.assembly.builtin kvplug"], []
    for plugin in PLUGINS:
        project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
        for target in project.get("entry-points", {}).get("kvplug", {}).values():
            modules.append(f"{target} {project['name']}")
            path.append(str(plugin))
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    done = subprocess.run(
        [sys.executable, "-c", SECTIONS, *modules],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*given, *path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


def test_every_option_is_on_the_page() -> None:
    text = PAGE.read_text()
    missing = [section for section in sections() if section not in text]
    assert not missing, "docs/reference/options.md lacks:\n\n" + "\n\n".join(missing)


def test_no_option_is_on_the_page_that_is_gone() -> None:
    known = "\n".join(sections())
    lines = PAGE.read_text().splitlines()
    gone = [line for line in lines if line.startswith(("| `", "## ")) and line not in known]
    assert not gone, "docs/reference/options.md has too much:\n" + "\n".join(gone)


@pytest.mark.skipif(not PLUGINS, reason="the plugins are not in this tree")
def test_the_plugins_are_among_them() -> None:
    assert any("`kvplug-cpu`" in section for section in sections())
