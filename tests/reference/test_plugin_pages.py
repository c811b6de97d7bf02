"""Options and flags of all that comes with kvplug are on their pages, with what the code says of them."""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from kvplug.config.options import describe_options

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
HOOKS = ("transports", "stores", "directories", "connectors", "sinks", "commands")


@cache
def specs() -> list[tuple[str, Any]]:
    """Each with its distribution. Read from the tree: to look at them takes no installation."""
    modules = [("kvplug", "kvplug.assembly.builtin")]
    for plugin in PLUGINS:
        project = tomllib.loads((plugin / "pyproject.toml").read_text())["project"]
        entries = project.get("entry-points", {}).get("kvplug", {}).values()
        modules += [(project["name"], target) for target in entries]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, *map(str, PLUGINS)])
        found = [(name, importlib.import_module(module)) for name, module in modules]
        every = [
            (name, spec)
            for name, module in found
            for hook in HOOKS
            for spec in getattr(module, f"kvplug_{hook}", list)()
        ]
        for _, spec in every:
            spec.load() if spec.kind == "command" else spec.load_options()
        return every


def sections() -> list[str]:
    """Of options, as they must stand on the page."""
    found = []
    for distribution, spec in specs():
        if spec.kind != "command" and (cls := spec.load_options()) is not None:
            title = f"## {spec.kind.replace('_', ' ').capitalize()} `{spec.name}`"
            head = [title, "", f"From `{distribution}`.", "", "| option | type | default | meaning |"]
            rows = [
                f"| `{row.name}` | {row.type} | `{row.default}` | {row.help} |"
                for row in describe_options(cls)
            ]
            found.append("\n".join([*head, "| --- | --- | --- | --- |", *rows]))
    return found


def flags_of(name: str, command: Any) -> Iterator[tuple[str, str, str]]:
    """Command, flag and help."""
    for each in command.params:
        if isinstance(each, click.Option):
            value = each.metavar or "|".join(getattr(each.type, "choices", ()))
            value = value or each.type.name.upper().split()[0]
            flag = " ".join([*each.opts, "" if each.is_flag else value]).strip()
            yield name, flag, " ".join((each.help or "").split())
    for inner in getattr(command, "commands", {}).values():
        yield from flags_of(f"{name} {inner.name}", inner)


def test_every_option_is_on_the_page_and_none_that_is_gone() -> None:
    shown, text = sections(), (PAGES / "options.md").read_text()
    missing = [section for section in shown if section not in text]
    assert not missing, "docs/reference/options.md lacks:\n\n" + "\n\n".join(missing)
    known = "\n".join(shown)
    gone = [line for line in text.splitlines() if line.startswith(("| `", "## ")) and line not in known]
    assert not gone, "docs/reference/options.md has too much:\n" + "\n".join(gone)


@pytest.mark.skipif(not PLUGINS, reason="the plugins are not in this tree")
def test_the_plugins_are_looked_at_and_every_flag_has_a_help_and_is_on_the_page() -> None:
    flags = [
        flag
        for _, spec in specs()
        if spec.kind == "command"
        for flag in flags_of(f"kvplug {spec.name}", spec.load())
    ]
    assert flags and any("`kvplug-cpu`" in section for section in sections())
    assert not [(name, flag) for name, flag, text in flags if not text]
    of: dict[tuple[str, str], list[str]] = {}
    for name, flag, text in flags:
        of.setdefault((flag.replace("|", "\\|"), text), []).append(f"`{name}`")
    page = (PAGES / "cli.md").read_text()
    rows = [f"| {', '.join(names)} | `{flag}` | {text} |" for (flag, text), names in of.items()]
    missing = [row for row in rows if row not in page]
    assert not missing, "docs/reference/cli.md lacks:\n" + "\n".join(missing)
