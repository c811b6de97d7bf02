"""``kvplug check NAME``: loads everything of a plugin, and reports all that is wrong with it."""

from __future__ import annotations

import sys

import click

from kvplug.kit import plugins
from kvplug.transport import peer_text


@click.command("check")
@click.argument("name", shell_complete=plugins)
def check(name: str) -> None:
    """Check the installed plugin NAME against the laws of plugins: it is found, light to load, and offers
    what it claims; every factory, probe and option loads.

    NAME is that of its entry point. A process of its own loads it. Exits with 1 if something is wrong.
    """
    from kvplug_testing.contract.plugin import check_plugin

    if name.endswith((".toml", ".json")):
        hint = f"`kvplug config check {name}` checks a configuration"
        raise click.UsageError(f"NAME is the name of a plugin, and {name} that of a file; {hint}")
    try:
        unchecked = check_plugin(name)
    except AssertionError as e:
        click.echo(peer_text(str(e), keep_lines=True))
        sys.exit(1)
    for sentence in unchecked:
        click.echo(peer_text(f"not checked: {sentence}", keep_lines=True))
    click.echo(f"{name}: nothing is wrong")
