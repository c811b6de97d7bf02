"""``kvplug new``: generates the package of a plugin, ready to test, from the templates beside this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import click

import kvplug
from kvplug.assembly.registry import Registry
from kvplug.cli.main import OWN
from kvplug.errors import PluginError
from kvplug.transport.hookspecs import PLUGIN_API
from kvplug.transport.spec import Kind, SinkSpec

TEMPLATES: Final = Path(__file__).with_name("templates")
"""Contains ``copier.yml``, a folder named after each kind, and ``package``, which all packages share."""

COMMANDS: Final[Mapping[str, tuple[Kind, str]]] = {
    "transport": (Kind.PIPE, "a pipe: tensors from one process to another"),
    "queue": (Kind.QUEUE, "a message queue: values from one process to many"),
    "lookup": (Kind.LOOKUP_BUFFER, "a lookup buffer: KV found by its tokens"),
    "communicator": (Kind.COMMUNICATOR, "a communicator: collectives of ranks"),
    "store": (Kind.STORE, "a store: pages of KV under keys"),
    "connector": (Kind.CONNECTOR, "a connector: what an engine saves and loads"),
    "sink": (Kind.SINK, "a sink: where metrics go"),
    "command": (Kind.COMMAND, "a command of the program kvplug"),
}
"""For each KIND on the command line: the kind of offer that is generated, and its description."""

_HELP = f"""Generate kvplug-NAME, the package of a plugin that passes its own tests, to be changed into yours.

NAME is the name in a config or on a command line: up to 40 lower-case letters, digits and hyphens, a letter
first. KIND is what the package offers:

\b
{chr(10).join(f"{word:<13} {offer}" for word, (_, offer) in COMMANDS.items())}"""


@click.command("new", help=_HELP)
@click.argument("word", metavar="KIND", type=click.Choice(list(COMMANDS)))
@click.argument("name", metavar="NAME")
@click.option("--folder", metavar="FOLDER", help="Folder to write to. Default: kvplug-NAME.")
@click.option(
    "--force",
    is_flag=True,
    help="Overwrite existing files, and allow a name that an installed plugin offers.",
)
def new(word: str, name: str, folder: str | None, force: bool) -> None:
    _check_name(name)
    kind, _ = COMMANDS[word]
    target = Path(folder or f"kvplug-{name}")
    if not force:
        _check_free(name, kind, target)
    _generate(name, kind, target)
    click.echo(
        f"""{target} offers the {kind.replace("_", " ")} {name!r}. Next:

    cd {target}
    pip install -e ".[test]"   # then `kvplug list` shows it
    pytest                     # kvplug's conformance kit: a failure quotes the law
    tox run                    # the same from the wheel, on each Python; see tox.ini

README.md says what each module is. Change them to suit, and run pytest after each step."""
    )


def _check_name(name: str) -> None:
    """Refuse an invalid name, as loading the plugin would."""
    try:
        SinkSpec(name=name, factory="package.module:name")
    except PluginError as e:
        raise click.UsageError(str(e)) from e
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise click.UsageError(
            f"{name!r} cannot be the name of a package: a hyphen must be between letters or digits"
        )


def _check_free(name: str, kind: Kind, target: Path) -> None:
    """Refuse a folder that exists and a name that an installed plugin offers."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise click.ClickException(f"{target} exists; --folder names another one, --force overwrites it")
    if kind is Kind.COMMAND and name in OWN:
        raise click.ClickException(f"kvplug {name} is one of kvplug's own commands")
    if owners := Registry.from_env().owners(kind, name):
        raise click.ClickException(
            f"the installed {owners[0]} offers the {kind.replace('_', ' ')} {name!r}, and kvplug refuses a"
            " name that two packages offer: choose another name (--force generates it anyway)"
        )


def _generate(name: str, kind: Kind, target: Path) -> None:
    """Write the package. ``copier.yml`` defines the other values that its files need."""
    try:
        from copier import run_copy
        from copier.errors import CopierError
    except ImportError as e:
        raise click.ClickException('kvplug new needs copier: pip install "kvplug[scaffold]"') from e
    answers = {
        "name": name,
        "kind": kind.value,
        "kvplug_version": ".".join(kvplug.__version__.split(".")[:2]),
        "api_major": PLUGIN_API[0],
        "api_minor": PLUGIN_API[1],
    }
    for part in ("package", kind.value):
        try:
            # Cleaning up after an error would remove the whole folder with all earlier files.
            flags = {"defaults": True, "overwrite": True, "cleanup_on_error": False, "quiet": True}
            run_copy(str(TEMPLATES), target, data=answers | {"part": part}, **flags)
        except (CopierError, OSError) as e:
            raise click.ClickException(f"{target} is incomplete: {type(e).__name__}: {e}") from e
