"""Groups of commands whose help shows the whole first sentence of each."""

from __future__ import annotations

import click


class CommandGroup(click.Group):
    """As click's, but a command's first sentence is wrapped where click cuts it off."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        named = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(
                [(name, command.get_short_help_str(limit=1000)) for name, command in named if command]
            )
