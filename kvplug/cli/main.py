"""The entry point of the program ``kvplug``. It imports only what the command needs."""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

import kvplug
from kvplug.cli.completion import items
from kvplug.cli.log import JsonFormatter, start_log
from kvplug.errors import KvplugError
from kvplug.net.peer_text import printable
from kvplug.transport.hookspecs import PLUGIN_API
from kvplug.transport.spec import CommandSpec, Kind

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kvplug.assembly.registry import Registry

OWN = {
    name: CommandSpec(name=name, target=f"kvplug.cli.{target}", summary=summary)
    for name, target, summary in (
        ("config", "config:config", "Show the effective configuration, check one, or make a secret for it."),
        ("doctor", "doctor:doctor", "Find out why nothing moves, here and at a peer."),
        ("explain", "doctor:explain", "Explain what a configuration would do here, and why."),
        ("list", "list:list_plugins", "List plugins, what they offer, and what works here."),
        ("new", "new:new", "Generate the package of a plugin."),
        ("store", "store:store", "Serve a store of KV pages to other programs, or ask one what it holds."),
        ("top", "top:top", "Show what engines and stores do now, again and again."),
    )
}
"""The commands of the core. Plugins cannot take their names."""

_log = logging.getLogger(__name__)

_REGISTRY = "kvplug.assembly.registry"
_TRUE = ("1", "true", "yes", "on")


class Program(click.Group):
    """A group that lists commands by name and summary, and imports a command's code when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._specs(ctx))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import a command. If it is unknown, raise an error that lists all; completion gets ``None``."""
        spec = OWN.get(cmd_name) or (specs := self._specs(ctx)).get(cmd_name)
        if spec is None and ctx.resilient_parsing:
            return None
        if spec is None:
            registry = _registry(ctx)
            if registry.owners(Kind.COMMAND, cmd_name):
                registry.get(Kind.COMMAND, cmd_name)  # raises, because two plugins offer it
            text = registry.about_unknown("no command named", cmd_name, specs, Kind.COMMAND)
            raise click.UsageError(text, ctx)
        command = spec.load()
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{spec.target} is not a click command")
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete options, and commands with their summaries, without importing the commands' code."""
        known = [(name, spec.summary) for name, spec in sorted(self._specs(ctx).items())]
        return items(known, incomplete) + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            specs = sorted(self._specs(ctx).items())
            formatter.write_dl([(name, printable(spec.summary.rstrip("."))) for name, spec in specs])

    def invoke(self, ctx: click.Context) -> Any:
        """Invoke a command as click does, but make error messages printable."""
        try:
            return super().invoke(ctx)
        except click.ClickException as e:
            e.message = printable(e.message)  # type: ignore[misc]  # click offers no other way
            raise

    @staticmethod
    def _specs(ctx: click.Context) -> dict[str, CommandSpec]:
        brought = {spec.name: spec for spec in _registry(ctx).specs(Kind.COMMAND)}
        return {name: spec for name, spec in brought.items() if isinstance(spec, CommandSpec)} | OWN


def _registry(ctx: click.Context) -> Registry:
    """Return the registry of installed plugins, which is loaded once."""
    found: Registry | None = ctx.meta.get(_REGISTRY)
    if found is None:
        from kvplug.assembly.registry import Registry

        found = ctx.meta[_REGISTRY] = Registry.from_env()
    return found


@click.command(cls=Program, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(
    kvplug.__version__,
    message="%(prog)s %(version)s, plugin API {}.{}, Python {}".format(
        *PLUGIN_API, sys.version.partition(" ")[0]
    ),
    help="Show versions and exit.",
)
def program() -> None:
    """Move KV caches between LLM engines: connectors and transports, chosen by name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program and exit with 0 (success), 1 (failure; one message explains it) or 2 (wrong usage)."""
    try:
        start_log(os.environ.get("KVPLUG_LOG", ""))
        color = False if os.environ.get("NO_COLOR") else None  # None: colour only on a terminal
        program.main(args=None if arguments is None else list(arguments), prog_name="kvplug", color=color)
    except (KvplugError, OSError) as e:  # OSError: stdout cannot be written
        if os.environ.get("KVPLUG_DEBUG", "").strip().lower() in _TRUE:
            raise
        if any(isinstance(handler.formatter, JsonFormatter) for handler in logging.root.handlers):
            _log.error("%s", e)
        else:
            print(printable(f"kvplug: {e}"), file=sys.stderr)
        sys.exit(1)
    finally:
        gc.freeze()  # else Python searches for cycles at exit: a tenth of the time of `kvplug list`
