"""Prints tables no wider than the terminal, or as plain text of 80 columns into a pipe."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any, Final

import click

from kvplug.net.peer_text import printable

_STYLES: Final = {
    "ok": "green",
    "broken": "red",
    "ambiguous": "red",
    "unavailable": "yellow",
    "blocked": "yellow",
}

_NARROW: Final = 20
"""The least width of a wrapped cell, in columns, that is still readable."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Cells are wrapped between words if the table would be too wide."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    least = []
    for cells in zip(columns, *rows, strict=True):
        least.append(max(_least_width(cell) for cell in cells))
        table.add_column(Text(printable(cells[0])), min_width=least[-1])
    for row in rows:
        table.add_row(*(Text(printable(cell), style=_STYLES.get(cell, "")) for cell in row))
    print_rich(table, max(shutil.get_terminal_size().columns, sum(least) + 2 * len(least) - 2))


def _least_width(cell: str) -> int:
    words = cell.split()
    return max(min(len(cell), _NARROW), max(map(len, words), default=0))


def print_rich(renderable: Any, columns: int) -> None:
    """Print what ``rich`` renders, without trailing spaces."""
    from rich.console import Console

    console = Console(highlight=False, width=columns)
    with console.capture() as captured:
        console.print(renderable)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())
