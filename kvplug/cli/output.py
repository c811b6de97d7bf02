"""Prints the results of commands, wrapped to the width of the terminal, or to 80 columns if there is none."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from kvplug.net.peer_text import printable

if TYPE_CHECKING:
    from kvplug.assembly.doctor.finding import Finding

_COLOURS: Final = {"ok": "green", "note": "yellow", "problem": "red"}
_WIDTH: Final = 80
_NARROW: Final = 20
"""The smallest readable width of a wrapped cell, in columns."""


def show_note(text: str) -> None:
    """Print a remark to stderr."""
    click.echo(printable(f"note: {text}"), err=True)


def show_json(value: Any) -> None:
    """Print JSON. Frozen sets become sorted lists; other values that JSON cannot represent become text."""
    import json

    click.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else str(value)


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table. Cells are wrapped between words to fit the terminal; only long words can make the table
    wider."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    least = []
    for cells in zip(columns, *rows, strict=True):
        narrow = min(_NARROW, max(map(len, cells)))
        least.append(max(narrow, *(len(word) for cell in cells for word in cell.split())))
        table.add_column(Text(printable(cells[0])), min_width=least[-1])
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    width = max(shutil.get_terminal_size().columns, sum(least) + 2 * len(least) - 2)
    console = Console(highlight=False, width=width)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


def paragraph(head: str, text: str, most: int | None = None) -> str:
    """Put ``head`` before a text, and wrap its lines to the terminal's width, at most to ``most`` columns."""
    columns = shutil.get_terminal_size().columns
    indent = " " * len(head)
    width = min(columns, most or columns)
    first, *others = text.splitlines() or [""]
    lines = [f"{head}{first}", *(f"{indent}{other.strip()}" for other in others)]
    return "\n".join(
        textwrap.fill(printable(line), width, subsequent_indent=indent, break_on_hyphens=False).rstrip()
        for line in lines
    )


def show_findings(findings: Sequence[Finding], *, quiet: bool = False, details: bool = False) -> None:
    """Print each finding: the verdict, the topic, the fact, why it matters, and what to change.

    Args:
        quiet: print only notes and problems, and the number of other findings.
        details: also print the reasons for findings that are ok.
    """
    shown = [each for each in findings if each.verdict != "ok" or not quiet]
    topics = [f"{each.topic} (peer)" if each.at == "peer" else each.topic for each in shown]
    width = max(map(len, topics), default=0)
    for finding, topic in zip(shown, topics, strict=True):
        head = f"{finding.verdict:7}  {topic:{width}}  "
        text = paragraph(head, finding.what, _WIDTH)
        verdict = click.style(finding.verdict, fg=_COLOURS[finding.verdict])
        click.echo(text.replace(finding.verdict, verdict, 1))
        for why in finding.why if details or finding.verdict != "ok" else ():
            click.echo(paragraph(f"{' ' * len(head)}- ", why, _WIDTH))
        if finding.change:
            click.echo(paragraph(f"{' ' * len(head)}-> ", finding.change, _WIDTH))
    if quiet:
        others = len(findings) - len(shown)
        click.echo("1 other is ok" if others == 1 else f"{others} others are ok")
