"""The flags of the commands that our plugins bring are on the page of the program, too."""

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
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

FLAGS = """
import importlib, json, sys
import click

def flags(name, command):
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            choices = "|".join(getattr(parameter.type, "choices", ()))
            value = parameter.metavar or choices or parameter.type.name.upper().split()[0]
            value = "" if parameter.is_flag else value
            yield name, " ".join([*parameter.opts, value]).strip(), parameter.help or ""
    for inner in getattr(command, "commands", {}).values():
        yield from flags(f"{name} {inner.name}", inner)

found = []
for module in sys.argv[1:]:
    for spec in getattr(importlib.import_module(module), "kvplug_commands", list)():
        found += flags(f"kvplug {spec.name}", spec.load())
print(json.dumps(found))
"""


@cache
def flags() -> tuple[tuple[str, str, str], ...]:
    """Command, flag, help: read from the tree, where commands import nothing heavy before they run."""
    modules, path = [], []
    for plugin in PLUGINS:
        project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
        modules += project.get("entry-points", {}).get("kvplug", {}).values()
        path.append(str(plugin))
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    done = subprocess.run(
        [sys.executable, "-c", FLAGS, *modules],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([*given, *path])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tuple((name, flag, " ".join(text.split())) for name, flag, text in json.loads(done.stdout))


@pytest.mark.skipif(not PLUGINS, reason="the plugins are not in this tree")
def test_every_flag_has_a_help_and_is_on_the_page() -> None:
    assert flags()
    assert not [(name, flag) for name, flag, text in flags() if not text]
    of: dict[tuple[str, str], list[str]] = {}
    for name, flag, text in flags():
        of.setdefault((flag.replace("|", "\\|"), text), []).append(f"`{name}`")
    page = (ROOT / "docs" / "reference" / "cli.md").read_text()
    rows = [f"| {', '.join(names)} | `{flag}` | {text} |" for (flag, text), names in of.items()]
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/reference/cli.md lacks:\n" + "\n".join(missing)
