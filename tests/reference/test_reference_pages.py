"""The reference says what the code says: every key, variable, hook, spec, option of a command, and error.

Tables are compared row by row. A row that is missing is shown as it must be written.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

import kvplug.errors
from kvplug import KvplugError
from kvplug.cli.main import OWN, program
from kvplug.config.config import KEYS, Config
from kvplug.config.options import OptionRow, describe_options
from kvplug.config.sources import RESERVED, RESERVED_PREFIXES, VLLM_IGNORED, VLLM_KEYS
from kvplug.net.log import FIELDS, LogEvent
from kvplug.transport import hookspecs
from kvplug.transport.hookspecs import OFFERED

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"


def first_paragraph(thing: object) -> str:
    return " ".join((inspect.getdoc(thing) or "").partition("\n\n")[0].split()).replace("``", "`")


def flags_of(name: str, command: click.Command) -> Iterable[str]:
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            written = " ".join(
                [*parameter.opts, "" if parameter.is_flag else parameter.metavar or ""]
            ).strip()
            yield f"| `{name}` | `{written}` | {parameter.help} |"
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            yield from flags_of(f"{name} {inner.name}", inner)


def option_rows(rows: Iterable[OptionRow]) -> list[str]:
    return [f"| `{row.name}` | {row.type} | `{row.default}` | {row.help} |" for row in rows]


def event_rows() -> list[str]:
    return [
        f"| `{event.name.lower()}` | {event.level} | {', '.join(f'`{field}`' for field in event.fields)} |"
        f" {event.meaning} |".replace("|  |", "| |")
        for event in LogEvent
    ]


def error_rows() -> list[str]:
    rows = []
    for name, cls in vars(kvplug.errors).items():
        if not (inspect.isclass(cls) and issubclass(cls, KvplugError)):
            continue
        builtin = [base for base in cls.__mro__ if base.__module__ == "builtins"]
        also = [f"`{base.__name__}`" for base in builtin if base not in (Exception, BaseException, object)]
        rows.append(f"| `{name}` | {', '.join(also)} | {first_paragraph(cls)} |".replace("|  |", "| |"))
    return rows


TABLES: dict[str, list[str]] = {
    "config.md": [
        *option_rows(row for row in describe_options(Config) if row.name in KEYS),
        *(f"| `{theirs}` | `{ours}` |" for theirs, ours in VLLM_KEYS.items()),
        ", ".join(f"`{key}`" for key in VLLM_IGNORED),
    ],
    "environment.md": [
        *(f"| `KVPLUG_{key.upper()}` | `{key}` |" for key in KEYS),
        *(f"| `{name}` | {meaning} |" for name, meaning in RESERVED.items()),
        *(f"| `{name}*` | {meaning} |" for name, meaning in RESERVED_PREFIXES.items()),
    ],
    "hooks.md": [
        f"| `{name}` | list of `{cls.__name__}` | {first_paragraph(getattr(hookspecs, name))} |"
        for name, cls in OFFERED.items()
    ],
    "plugin-api.md": [f"| `{cls.__name__}` | " for cls in OFFERED.values()],
    "cli.md": [
        *flags_of("kvplug", program),
        *(row for spec in OWN.values() for row in flags_of(f"kvplug {spec.name}", spec.load())),
    ],
    "errors.md": error_rows(),
    "logs.md": [*event_rows(), *(f"| `{field}` | {meaning} |" for field, meaning in FIELDS.items())],
}


@pytest.mark.parametrize("page", TABLES)
def test_a_page_of_the_reference_has_every_row_and_none_of_something_that_is_gone(page: str) -> None:
    text, known = (PAGES / page).read_text(), "\n".join(TABLES[page])
    missing = [row for row in TABLES[page] if row not in text]
    assert not missing, f"docs/reference/{page} lacks:\n" + "\n".join(missing)
    table = [line for line in text.splitlines() if line.startswith("| `")]
    gone = [line for line in table if line not in known and not line.startswith(BY_HAND)]
    assert page in OPEN or not gone, f"docs/reference/{page} has too much:\n" + "\n".join(gone)


OPEN = ("plugin-api.md", "cli.md")
"""Pages with other rows, which other tests compare."""
BY_HAND = (
    *("| `options` |", "| `kv_connector_", "| `Config", "| `kvplug.", "| `kvplug_", "| `NO_COLOR` |"),
    "| `NOTIFY_SOCKET` |",
    *("| `XDG_", "| `CC` |", "| `NCCL_", "| `CUDA_", "| `UCX_", "| `NIXL_", "| `VLLM_", "| `PYTEST_"),
)
"""How rows begin that no list in the code stands behind; another test finds the second line in the source."""


def test_every_command_of_the_core_is_on_its_page_and_each_of_its_rows_once() -> None:
    text = (PAGES / "cli.md").read_text()
    assert not [command for command in OWN if f"`kvplug {command}" not in text]
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert len(rows) == len({*rows}), [row for row in rows if rows.count(row) > 1]


def test_the_plugin_api_has_a_row_and_every_hook_and_spec_has_a_version() -> None:
    text = (PAGES / "plugin-api.md").read_text()
    table = text[text.index("| version |") :].partition("\n\n")[0]
    versions = [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    assert versions[-1] == ".".join(map(str, hookspecs.PLUGIN_API))
    assert versions == sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    names = {*OFFERED, *(cls.__name__ for cls in OFFERED.values())}
    assert not [name for name in names if f"`{name}`" not in table]


def test_every_module_that_the_pages_name_is_there() -> None:
    pages = [*PAGES.parent.rglob("*.md"), PAGES.parents[1] / "README.md"]
    named = {
        name
        for page in pages
        for name in re.findall(r"`(kvplug(?:_testing|_bench)?(?:\.[a-z_]+)+)`", page.read_text())
    }
    assert "kvplug_testing.peers" in named
    named -= {"kvplug.toml", "kvplug.json"}  # files
    missing = set()
    for name in named:
        home, _, last = name.rpartition(".")
        if not (is_module(name) or (is_module(home) and hasattr(importlib.import_module(home), last))):
            missing.add(name)
    assert not missing


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
