"""``kvplug check NAME``: loads everything of a plugin, and says all that is wrong with it."""

from __future__ import annotations

import json
import sys

import click

from kvplug import Duration, Registry
from kvplug.kit import did_you_mean, plugins
from kvplug.transport import UnknownNameError, printable


@click.command("check")
@click.argument("name", shell_complete=plugins)
@click.option("--timeout", "timeout_s", type=Duration(), default=60.0, help="How long each process may take.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def check(name: str, timeout_s: float, as_json: bool) -> None:
    """Check the installed plugin NAME against the laws of plugins: it is found, light to load, and offers
    what its claims say; every factory, probe and option loads.

    NAME is that of its entry point. Processes of their own load it. Exits with 1 if something is wrong.
    """
    from kvplug_testing.contract.plugin import inspect_plugin
    from kvplug_testing.laws import LAWS

    known = {plugin.name for plugin in Registry.from_env().plugins}
    if name not in known:
        hint = did_you_mean(name, known) or f"; there are: {', '.join(sorted(known))}"
        raise UnknownNameError(f"no plugin is named {name!r}{hint}")
    found = inspect_plugin(name, timeout_s)
    breaches, skipped = found.breaches, list(found.unchecked)
    if as_json:
        wrong = [{"law": each.law, "observed": each.observed} for each in breaches]
        click.echo(json.dumps({"plugin": name, "wrong": wrong, "not_checked": skipped}, indent=2))
    else:
        for each in breaches:
            click.echo(printable(f"wrong: {each}"))
        for sentence in skipped:
            click.echo(printable(f"not checked: {sentence}"))
        if not breaches:
            click.echo(f"{name}: nothing is wrong")
        for law in dict.fromkeys(each.law for each in breaches):
            click.echo(f"\n{LAWS[law].quoted}")
    if breaches:
        sys.exit(1)
