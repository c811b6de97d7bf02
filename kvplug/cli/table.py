"""Tables on a terminal, no wider than it is, and the same as aligned plain text where there is none."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

import click

from kvplug.net.peer_text import printable

_STYLES = {"ok": "green", "broken": "red", "ambiguous": "red", "unavailable": "yellow", "blocked": "yellow"}
_GAP: Final = "  "
_NARROW: Final = 20
"""A cell of fewer columns cannot be read, unless all of its column has fewer."""
_NARROW_TEXT: Final = 28
"""The same for the last column, which has sentences."""


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print a table; a pipe or a file gets aligned text. On a terminal it is no wider than that: cells are
    wrapped, and where they would become too narrow to be read, each row is printed as a paragraph."""
    if title:
        click.echo(printable(title))
    columns, *rows = ([printable(cell).replace("\n", " ") for cell in row] for row in (columns, *rows))
    natural = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    if not sys.stdout.isatty():
        for row in (columns, *rows):
            click.echo(
                _GAP.join(cell.ljust(width) for cell, width in zip(row, natural, strict=True)).rstrip()
            )
        return
    room = shutil.get_terminal_size().columns
    widths = _fitted(natural, room)
    lines = _paragraphs(columns, rows, room) if widths is None else _wrapped(columns, rows, widths)
    for line in lines:
        click.echo(line)


def _fitted(natural: Sequence[int], room: int) -> list[int] | None:
    """Widths that fit, the widest columns made narrower; ``None``: too narrow to be read."""
    least = [min(width, _NARROW) for width in natural[:-1]] + [min(natural[-1], _NARROW_TEXT)]
    widths = list(natural)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - room
    while excess > 0:
        able = [i for i in range(len(widths)) if widths[i] > least[i]]
        if not able:
            return None
        widths[max(able, key=lambda i: widths[i])] -= 1
        excess -= 1
    return widths


def _wrapped(columns: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> Iterator[str]:
    for number, row in enumerate((columns, *rows)):
        cells = [_lines(cell, width) for cell, width in zip(row, widths, strict=True)]
        for i in range(max(map(len, cells))):
            parts = []
            for cell, lines, width in zip(row, cells, widths, strict=True):
                text = (lines[i] if i < len(lines) else "").ljust(width)
                parts.append(click.style(text, bold=number == 0 or None, fg=_STYLES.get(cell)))
            yield _GAP.join(parts).rstrip()


def _paragraphs(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int) -> Iterator[str]:
    """A row: its first cell, then a line for each of the others, with the name of its column."""
    label = max(map(len, columns))
    for row in rows:
        yield from (click.style(line, bold=True) for line in _lines(row[0], room))
        for name, cell in zip(columns[1:], row[1:], strict=True):
            if cell:
                for i, line in enumerate(_lines(cell, max(room - label - 2 * len(_GAP), 10))):
                    head = f"{_GAP}{(name if i == 0 else '').ljust(label)}{_GAP}"
                    yield (head + click.style(line, fg=_STYLES.get(cell))).rstrip()


def _lines(cell: str, width: int) -> list[str]:
    return textwrap.wrap(cell, width, break_on_hyphens=False) or [""]
