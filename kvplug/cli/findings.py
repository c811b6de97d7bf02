"""Prints findings on a terminal, or as plain text of 80 columns into a pipe."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any, Final

import click

from kvplug.assembly.examination.finding import Finding
from kvplug.cli.table import print_rich
from kvplug.net.peer_text import printable

_COLOURS: Final = {"ok": "green", "note": "yellow", "problem": "red"}
_WIDTH: Final = 80


def show_findings(findings: Sequence[Finding], *, quiet: bool = False, details: bool = False) -> None:
    """Print each finding: the verdict, the topic, the fact, why it matters, and what to change.

    Args:
        quiet: print only notes and problems, and the number of other findings.
        details: also print the alternatives considered for findings that are ok.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    shown = [each for each in findings if each.verdict != "ok"] if quiet else findings
    for finding in shown:
        topic = f"{finding.topic} (peer)" if finding.at == "peer" else finding.topic
        head = (Text(finding.verdict, style=_COLOURS[finding.verdict]), Text(printable(topic)))
        table.add_row(*head, Text(printable(finding.what)))
        for why in finding.why if details or finding.verdict != "ok" else ():
            table.add_row("", "", _marked("- ", why))
        if finding.change:
            table.add_row("", "", _marked("-> ", finding.change))
    print_rich(table, min(shutil.get_terminal_size().columns, _WIDTH))
    if quiet:
        others = len(findings) - len(shown)
        click.echo("1 other is ok" if others == 1 else f"{others} others are ok")


def _marked(mark: str, text: str) -> Any:
    from rich.table import Table
    from rich.text import Text

    lines = Table.grid()
    lines.add_row(mark, Text(printable(text)))
    return lines
