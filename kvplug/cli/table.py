"""Tables on a terminal, and the same as plain text where there is none."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

_STYLES = {"ok": "green", "broken": "red", "ambiguous": "red", "unavailable": "yellow", "blocked": "yellow"}


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table. Rich draws it on a terminal; a pipe or a file gets aligned text."""
    if sys.stdout.isatty():
        _show_rich(columns, rows, title)
        return
    if title:
        click.echo(title)
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    for row in (columns, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _show_rich(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=Text(title) if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
    Console().print(table)
