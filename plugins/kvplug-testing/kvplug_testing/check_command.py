"""``kvplug check NAME``: loads everything of a plugin, and says all that is wrong with it."""

from __future__ import annotations

import json
import sys

import click

from kvplug import Duration
from kvplug.kit import plugins
from kvplug.transport import printable


@click.command("check")
@click.argument("name", shell_complete=plugins)
@click.option("--timeout", "timeout_s", type=Duration(), default=60.0, help="How long its process may take.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def check(name: str, timeout_s: float, as_json: bool) -> None:
    """Check the installed plugin NAME against the laws of plugins: it is found, light to load, and offers
    what its claims say; every factory, probe and option loads.

    NAME is that of its entry point. A process of its own loads it. Exits with 1 if something is wrong.
    """
    from kvplug_testing.contract.plugin import inspect_plugin

    found = inspect_plugin(name, timeout_s)
    if as_json:
        wrong = [{"law": id_, "observed": observed} for id_, observed in found.breaches]
        click.echo(json.dumps({"plugin": name, "wrong": wrong, "not_checked": found.unchecked}, indent=2))
    else:
        for sentence in found.described():
            click.echo(printable(f"wrong: {sentence}"))
        for sentence in found.unchecked:
            click.echo(printable(f"not checked: {sentence}"))
        click.echo(f"\n{found.quoted()}" if found.breaches else f"{name}: nothing is wrong")
    if found.breaches:
        sys.exit(1)
