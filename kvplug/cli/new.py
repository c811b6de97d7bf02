"""``kvplug new``: the package of a plugin, ready to be tested, from the templates beside this module."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import attrs
import click

import kvplug
from kvplug.assembly.registry import Registry
from kvplug.cli.groups import CommandGroup
from kvplug.errors import PluginError
from kvplug.transport.hookspecs import PLUGIN_API
from kvplug.transport.spec import Kind, SinkSpec

TEMPLATES: Final = Path(__file__).with_name("templates")
KINDS: Final = (Kind.PIPE,)
"""Kinds of transport that there is a template for."""

_COPIER = 'kvplug new needs copier: pip install "kvplug[scaffold]"'


@click.group(cls=CommandGroup)
def new() -> None:
    """Generate the package of a plugin that passes its own tests, to be changed into yours."""


def _common(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that all commands have."""
    for option in (
        click.option(
            "--force",
            is_flag=True,
            help="Overwrite existing files, and allow a name that an installed plugin offers.",
        ),
        click.option("--folder", metavar="FOLDER", help="Folder to write to. Default: kvplug-NAME."),
        click.argument("name", metavar="NAME"),
    ):
        command = option(command)
    return command


@new.command()
@_common
@click.option(
    "--kind",
    default="pipe",
    metavar="KIND",
    help="Kind of the transport. Only pipes can be generated so far.",
)
def transport(name: str, folder: str | None, force: bool, kind: str) -> None:
    """Generate kvplug-NAME, which offers a transport: a small one that works and keeps every law.

    NAME is what a config will say: up to 40 lower-case letters, digits and hyphens, a letter first.
    """
    if kind not in KINDS:
        there = ", ".join(KINDS)
        raise click.UsageError(f"there is no template of a transport of kind {kind!r}; there is: {there}")
    _generate(Package.called(name, Kind(kind)), folder, force)


@new.command()
@_common
def connector(name: str, folder: str | None, force: bool) -> None:
    """Generate kvplug-NAME, which offers a connector: a small one that works and keeps every law.

    NAME is what a config will say: up to 40 lower-case letters, digits and hyphens, a letter first.
    """
    _generate(Package.called(name, Kind.CONNECTOR), folder, force)


@new.command()
@_common
def store(name: str, folder: str | None, force: bool) -> None:
    """Generate kvplug-NAME, which offers a store: a small one that works and keeps every law.

    NAME is what a config will say: up to 40 lower-case letters, digits and hyphens, a letter first.
    """
    _generate(Package.called(name, Kind.STORE), folder, force)


@attrs.frozen
class Package:
    """The names of what is generated."""

    name: str
    kind: Kind

    @classmethod
    def called(cls, name: str, kind: Kind) -> Package:
        """Refuse an invalid name, as loading the plugin would."""
        try:
            SinkSpec(name=name, factory="package.module:name")
        except PluginError as e:
            raise click.UsageError(str(e)) from e
        if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name):
            raise click.UsageError(
                f"{name!r} cannot be the name of a package: a hyphen stands between letters or digits"
            )
        return cls(name, kind)

    @property
    def distribution(self) -> str:
        return f"kvplug-{self.name}"

    @property
    def module(self) -> str:
        return self.distribution.replace("-", "_")

    @property
    def words(self) -> str:
        return self.kind.replace("_", " ")

    @property
    def answers(self) -> Mapping[str, Any]:
        """The values that the templates are filled with."""
        return {
            "name": self.name,
            "kind": self.words,
            "distribution": self.distribution,
            "module": self.module,
            "stem": self.name.replace("-", "_"),
            "title": "".join(part.capitalize() for part in self.name.split("-")),
            "kvplug_version": ".".join(kvplug.__version__.split(".")[:2]),
            "api_major": PLUGIN_API[0],
            "api_minor": PLUGIN_API[1],
        }


def _generate(package: Package, folder: str | None, force: bool) -> None:
    target = Path(folder or package.distribution)
    if not force:
        _check_free(package, target)
    try:
        from copier import run_copy
        from copier.errors import CopierError
    except ImportError as e:
        raise click.ClickException(_COPIER) from e
    for template in ("package", package.kind.value):
        try:
            run_copy(
                str(TEMPLATES / template),
                target,
                data=dict(package.answers),
                defaults=True,
                overwrite=True,
                cleanup_on_error=False,  # it would remove the whole folder, and with it what was there
                quiet=True,
            )
        except (CopierError, OSError) as e:
            raise click.ClickException(f"{target} is not whole: {type(e).__name__}: {e}") from e
    click.echo(_next(package, target))


def _check_free(package: Package, target: Path) -> None:
    """Refuse a folder that exists and a name that an installed plugin offers."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise click.ClickException(f"{target} exists; --folder names another one, --force writes over it")
    owners = Registry.from_env().owners(package.kind, package.name)
    if owners:
        raise click.ClickException(
            f"the {package.words} {package.name!r} is offered by {owners[0]}, which is installed;"
            " of two with one name neither is taken (--force generates it all the same)"
        )


def _next(package: Package, target: Path) -> str:
    what = {
        Kind.PIPE: "pipe.py",
        Kind.CONNECTOR: "scheduler.py and worker.py",
        Kind.STORE: "store.py",
    }[package.kind]
    return "\n".join(
        [
            f"{target} offers the {package.words} {package.name!r}. Next:",
            "",
            f"    cd {target}",
            '    pip install -e ".[test]"   # then `kvplug list` shows it',
            "    pytest                     # kvplug's conformance kit: a failure quotes the law",
            "    tox run                    # the same from the wheel, on each Python; tox.ini says how",
            "",
            f"Make {what} in {package.module} yours, and run pytest after each step.",
        ]
    )
