"""``kvplug new``: the package of a plugin, ready to be tested, from the templates beside this module."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click

import kvplug
from kvplug.assembly.registry import Registry
from kvplug.cli.main import OWN, CommandGroup
from kvplug.config.messages import did_you_mean
from kvplug.errors import PluginError
from kvplug.transport.hookspecs import PLUGIN_API
from kvplug.transport.spec import Kind, SinkSpec

TEMPLATES: Final = Path(__file__).with_name("templates")
"""A folder for each kind, named after it, and ``package``, which is part of all."""

_COPIER = 'kvplug new needs copier: pip install "kvplug[scaffold]"'


@attrs.frozen
class Template:
    """What can be generated. The name of its command is its key in :data:`COMMANDS`."""

    kind: Kind
    what: str
    """What is generated, as the help of the command says it."""
    modules: str
    """The modules to be changed."""
    needs: tuple[str, ...] = ()
    """Requirements of the package besides kvplug."""
    tests_need: tuple[str, ...] = ()
    """Requirements of its tests besides the kit."""

    @property
    def words(self) -> str:
        """Its kind, for people."""
        return self.kind.replace("_", " ")


_ATTRS, _TORCH = "attrs>=23.2", "torch>=2.4"
COMMANDS: Final[Mapping[str, Template]] = {
    "transport": Template(
        Kind.PIPE, "a pipe: tensors from one process to another", "pipe.py", (_ATTRS, _TORCH)
    ),
    "queue": Template(
        Kind.QUEUE,
        "a message queue: values from one process to many",
        "message.py, writer.py and reader.py",
        (_ATTRS,),
    ),
    "lookup": Template(
        Kind.LOOKUP_BUFFER,
        "a lookup buffer: KV found by its tokens",
        "table.py",
        (_ATTRS, _TORCH),
        ("kvplug-cpu",),  # without a pipe to other processes their tests are skipped
    ),
    "communicator": Template(
        Kind.COMMUNICATOR,
        "a communicator: collectives of ranks",
        "communicator.py",
        (_ATTRS, _TORCH, "kvplug-cpu"),
    ),
    "store": Template(Kind.STORE, "a store: pages of KV under keys", "store.py", (_ATTRS,)),
    "connector": Template(
        Kind.CONNECTOR,
        "a connector: what an engine saves and loads",
        "scheduler.py and worker.py",
        (_ATTRS, _TORCH, "kvplug-lookup"),
        ("kvplug-cpu",),  # without a pipe the engines of its tests do not find each other
    ),
    "sink": Template(Kind.SINK, "a sink: where metrics go", "sink.py", (_ATTRS,)),
    "command": Template(
        Kind.COMMAND, "a command of the program kvplug", "command.py", (_ATTRS, "click>=8.1")
    ),
}


class _Kinds(CommandGroup):
    """Lists its commands in the order of :data:`COMMANDS`, also where there is none of a name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            there = ", ".join(self.commands)
            hint = did_you_mean(args[0], self.commands)
            raise click.UsageError(f"there is no template of a {args[0]!r}{hint}; there are: {there}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Kinds)
def new() -> None:
    """Generate the package of a plugin that passes its own tests, to be changed into yours."""


def _add(command: str, template: Template) -> None:
    """Add the command that generates this template."""

    short = f"{template.what[0].upper()}{template.what[1:]}."

    @new.command(command, help=_HELP.format(what=template.what), short_help=short)
    @click.argument("name", metavar="NAME")
    @click.option("--folder", metavar="FOLDER", help="Folder to write to. Default: kvplug-NAME.")
    @click.option(
        "--force",
        is_flag=True,
        help="Overwrite existing files, and allow a name that an installed plugin offers.",
    )
    def generate(name: str, folder: str | None, force: bool) -> None:
        _generate(name, template, folder, force)


_HELP = """Generate kvplug-NAME, which offers {what}. It is small, works, and keeps every law.

NAME is what a config or a command line will say: up to 40 lower-case letters, digits and hyphens, a letter
first."""


for _command, _template in COMMANDS.items():
    _add(_command, _template)


def _check_name(name: str) -> None:
    """Refuse an invalid name, as loading the plugin would."""
    try:
        SinkSpec(name=name, factory="package.module:name")
    except PluginError as e:
        raise click.UsageError(str(e)) from e
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
        raise click.UsageError(
            f"{name!r} cannot be the name of a package: a hyphen stands between letters or digits"
        )


def _answers(name: str, template: Template) -> dict[str, Any]:
    """The values that the templates are filled with."""
    needed = ("kvplug", "kvplug-testing", *template.needs, *template.tests_need)
    return {
        "name": name,
        "kind": template.words,
        "needs": list(template.needs),
        "ours": [each for each in needed if each.startswith("kvplug")],
        "tests_need": ["kvplug-testing", *template.tests_need],
        "distribution": f"kvplug-{name}",
        "module": f"kvplug_{name.replace('-', '_')}",
        "stem": name.replace("-", "_"),
        "title": "".join(part.capitalize() for part in name.split("-")),
        "kvplug_version": ".".join(kvplug.__version__.split(".")[:2]),
        "api_major": PLUGIN_API[0],
        "api_minor": PLUGIN_API[1],
    }


def _generate(name: str, template: Template, folder: str | None, force: bool) -> None:
    _check_name(name)
    answers = _answers(name, template)
    target = Path(folder or answers["distribution"])
    if not force:
        _check_free(name, template, target)
    try:
        from copier import run_copy
        from copier.errors import CopierError
    except ImportError as e:
        raise click.ClickException(_COPIER) from e
    for part in ("package", template.kind.value):
        try:
            run_copy(
                str(TEMPLATES / part),
                target,
                data=answers,
                defaults=True,
                overwrite=True,
                cleanup_on_error=False,  # it would remove the whole folder, and with it what was there
                quiet=True,
            )
        except (CopierError, OSError) as e:
            raise click.ClickException(f"{target} is not whole: {type(e).__name__}: {e}") from e
    click.echo(
        f"""{target} offers the {template.words} {name!r}. Next:

    cd {target}
    pip install -e ".[test]"   # then `kvplug list` shows it
    pytest                     # kvplug's conformance kit: a failure quotes the law
    tox run                    # the same from the wheel, on each Python; tox.ini says how

Make {template.modules} in {answers["module"]} yours, and run pytest after each step."""
    )


def _check_free(name: str, template: Template, target: Path) -> None:
    """Refuse a folder that exists and a name that an installed plugin offers."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise click.ClickException(f"{target} exists; --folder names another one, --force writes over it")
    if template.kind is Kind.COMMAND and name in OWN:
        raise click.ClickException(f"kvplug {name} is a command of kvplug's own")
    if owners := Registry.from_env().owners(template.kind, name):
        raise click.ClickException(
            f"the {template.words} {name!r} is offered by {owners[0]}, which is installed;"
            " of two with one name neither is taken (--force generates it all the same)"
        )
