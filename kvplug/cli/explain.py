"""``kvplug explain``: what a config would do here, step by step, with reasons."""

from __future__ import annotations

import json
import sys
import textwrap

import attrs
import click

from kvplug.assembly.explanation import Step, explain as steps_of, problems_of
from kvplug.assembly.registry import Registry
from kvplug.cli.completion import files, overrides as complete_keys
from kvplug.config import Config
from kvplug.errors import ConfigError
from kvplug.net.peer_text import printable

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
_WIDTH = 80


@click.command("explain")
@click.option(
    "--config",
    "path",
    metavar="FILE",
    shell_complete=files,
    help="A .toml or .json file. Default: the one that KVPLUG_CONFIG names.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...", shell_complete=complete_keys)
def explain(path: str | None, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Say what this configuration would do here: which connector, stores and transport are taken and why, who
    gets in, what is verified.

    Nothing is started or written. Exits with 1 if an engine could not start with it, or nothing would move.
    """
    try:
        steps = steps_of(Config.load(path, overrides=overrides), Registry.from_env())
    except ConfigError as e:
        steps = problems_of(e)
    if as_json:
        click.echo(json.dumps([attrs.asdict(step) for step in steps], indent=2))
    else:
        width = max(len(step.topic) for step in steps)
        for step in steps:
            _show(step, width)
    if any(step.verdict == "problem" for step in steps):
        sys.exit(1)


def _show(step: Step, width: int) -> None:
    head = printable(f"{step.verdict:7}  {step.topic:{width}}  ")
    room = _WIDTH - len(head)
    lines = []
    for line in printable(step.text).splitlines() or [""]:
        lines += textwrap.wrap(line.strip(), room, break_on_hyphens=False) or [""]
    for detail in step.details:
        lines += textwrap.wrap(printable(f"- {detail}"), room, subsequent_indent="  ", break_on_hyphens=False)
    click.echo(click.style(head, fg=_COLOURS[step.verdict]) + lines[0])
    for line in lines[1:]:
        click.echo(" " * len(head) + line)
