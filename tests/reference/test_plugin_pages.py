"""Options and flags of all that comes with kvplug are on their pages, with what the code says of them."""

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
PAGES = ROOT / "docs" / "reference"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))

LOOK = """
import importlib, json, sys
import click
from kvplug.config import describe_options

def flags_of(name, command):
    for each in command.params:
        if isinstance(each, click.Option):
            value = each.metavar or "|".join(getattr(each.type, "choices", ()))
            value = value or each.type.name.upper().split()[0]
            flag = " ".join([*each.opts, "" if each.is_flag else value]).strip()
            yield name, flag, " ".join((each.help or "").split())
    for inner in getattr(command, "commands", {}).values():
        yield from flags_of(f"{name} {inner.name}", inner)

flags, sections = [], []
for line in sys.argv[1:]:
    module, _, distribution = line.partition(" ")
    module = importlib.import_module(module)
    for hook in ("transports", "stores", "directories", "connectors", "sinks"):
        for spec in getattr(module, f"kvplug_{hook}", list)():
            cls = spec.load_options()
            if cls is not None:
                title = f"## {spec.kind.replace('_', ' ').capitalize()} `{spec.name}`"
                lines = [title, "", f"From `{distribution}`.", "", "| option | type | default | meaning |"]
                lines.append("| --- | --- | --- | --- |")
                for row in describe_options(cls):
                    lines.append(f"| `{row.name}` | {row.type} | `{row.default}` | {row.help} |")
                sections.append("\\n".join(lines))
    for spec in getattr(module, "kvplug_commands", list)():
        flags += flags_of(f"kvplug {spec.name}", spec.load())
print(json.dumps([sections, flags]))
"""


@cache
def looked_at() -> tuple[list[str], list[tuple[str, str, str]]]:
    """The sections of options as they must stand on the page; and the command, flag and help of each flag.
    Read from the tree: what is shown of options and commands needs no installation."""
    modules, path = ["kvplug.assembly.builtin kvplug"], []
    for plugin in PLUGINS:
        project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
        targets = project.get("entry-points", {}).get("kvplug", {}).values()
        modules += [f"{target} {project['name']}" for target in targets]
        path.append(str(plugin))
    given = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([*given, *path])}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, *modules], env=environ, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    sections, flags = json.loads(done.stdout)
    return sections, [(name, flag, text) for name, flag, text in flags]


def test_every_option_is_on_the_page_and_none_that_is_gone() -> None:
    sections, text = looked_at()[0], (PAGES / "options.md").read_text()
    missing = [section for section in sections if section not in text]
    assert not missing, "docs/reference/options.md lacks:\n\n" + "\n\n".join(missing)
    known = "\n".join(sections)
    gone = [line for line in text.splitlines() if line.startswith(("| `", "## ")) and line not in known]
    assert not gone, "docs/reference/options.md has too much:\n" + "\n".join(gone)


@pytest.mark.skipif(not PLUGINS, reason="the plugins are not in this tree")
def test_the_plugins_are_looked_at_and_every_flag_has_a_help_and_is_on_the_page() -> None:
    sections, flags = looked_at()
    assert any("`kvplug-cpu`" in section for section in sections) and flags
    assert not [(name, flag) for name, flag, text in flags if not text]
    of: dict[tuple[str, str], list[str]] = {}
    for name, flag, text in flags:
        of.setdefault((flag.replace("|", "\\|"), text), []).append(f"`{name}`")
    page = (PAGES / "cli.md").read_text()
    rows = [f"| {', '.join(names)} | `{flag}` | {text} |" for (flag, text), names in of.items()]
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/reference/cli.md lacks:\n" + "\n".join(missing)
