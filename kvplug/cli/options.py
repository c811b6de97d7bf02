"""Options and arguments that several commands share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from kvplug.cli.completion import files, overrides as complete_keys

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

Command = Callable[..., None]

as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
quiet = click.option(
    "--quiet", is_flag=True, help="Show notes and problems only, and how many others there are."
)
_config = click.option(
    "--config",
    "path",
    metavar="FILE",
    shell_complete=files,
    help="A .toml or .json file. Default: the one that KVPLUG_CONFIG names.",
)


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the keys of KEY=VALUE, or file names if no key matches."""
    return complete_keys(ctx, param, incomplete) or files(ctx, param, incomplete)


def reads_config(command: Command) -> Command:
    """Add ``[FILE] [KEY=VALUE]...`` and ``--config FILE`` to a command. The command receives ``load``, a
    function that returns the Config."""

    @_config
    @click.argument("given", nargs=-1, metavar="[FILE] [KEY=VALUE]...", shell_complete=_complete)
    @functools.wraps(command)
    def with_config(path: str | None, given: tuple[str, ...], **others: Any) -> None:
        from kvplug.config.config import Config

        overrides = tuple(each for each in given if "=" in each[1:])  # "=x" has no key
        named = [each for each in given if each not in overrides]
        if wrong := [each for each in named if not each.endswith((".toml", ".json"))]:
            raise click.UsageError(f"{wrong[0]!r} was given; allowed is FILE.toml, FILE.json or KEY=VALUE")
        if path is not None:
            named.append(path)
        if len(named) > 1:
            raise click.UsageError(f"{' and '.join(named)} were given; allowed is one file")
        command(load=functools.partial(Config.load, *named, overrides=overrides), **others)

    return with_config


def sets_config(command: Command) -> Command:
    """Add ``--config FILE`` and ``--set KEY=VALUE`` to a command that has its own arguments. The command
    receives the ``config``."""

    @_config
    @click.option(
        "--set",
        "overrides",
        metavar="KEY=VALUE",
        shell_complete=complete_keys,
        multiple=True,
        help="Set a key of the configuration, for example options.host.size='64 GiB'. Can be given again.",
    )
    @functools.wraps(command)
    def with_config(path: str | None, overrides: tuple[str, ...], **others: Any) -> None:
        from kvplug.config.config import Config

        command(config=Config.load(path, overrides=overrides), **others)

    return with_config
