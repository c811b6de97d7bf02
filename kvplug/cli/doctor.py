"""``kvplug doctor``: what an engine with this config would meet, here and at a peer."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
import threading

import click

from kvplug.assembly.doctor.diagnosis import TIMEOUT_S, Diagnosis, DoctorServer, diagnose, problems_with
from kvplug.assembly.doctor.facts import read_facts
from kvplug.assembly.doctor.fields import Field
from kvplug.assembly.examination.finding import Finding
from kvplug.assembly.registry import Registry
from kvplug.cli.duration import Duration
from kvplug.config import Config
from kvplug.errors import ConfigError
from kvplug.net.peer_text import printable
from kvplug.net.threads import BackgroundThread

_COLOURS = {"ok": "green", "note": "yellow", "problem": "red"}
_WIDTH = 80
_ENDING = (signal.SIGTERM, signal.SIGINT)


@click.command("doctor")
@click.option(
    "--config",
    "path",
    metavar="FILE",
    help="A .toml or .json file. Default: the one that KVPLUG_CONFIG names.",
)
@click.option(
    "--peer",
    metavar="CONTACT",
    help="Also examine the engine, store or doctor at this address (host:port, unix:@name) or contact.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Answer doctors of other hosts at the configuration's address until SIGTERM or Ctrl-C, where no"
    " engine runs.",
)
@click.option(
    "--fact",
    "facts",
    metavar="KEY=VALUE",
    multiple=True,
    help="A fact of this side's engine, for example num_layers=32. Can be given again. Default: the peer's.",
)
@click.option(
    "--write",
    is_flag=True,
    help="Also put a page of 4 KiB into each store, get it and remove it.",
)
@click.option(
    "--timeout",
    metavar="DURATION",
    type=Duration(),
    default=TIMEOUT_S,
    help=f"When all waiting ends. Default: {TIMEOUT_S:g}.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]...")
def doctor(
    path: str | None,
    peer: str | None,
    serve: bool,
    facts: tuple[str, ...],
    write: bool,
    timeout: float,
    as_json: bool,
    overrides: tuple[str, ...],
) -> None:
    """Find out why nothing moves: try what an engine with this configuration does, here and at a peer.

    It shakes hands as an engine does, measures a pipe for at most a second with at most 64 MiB, and leaves
    nothing behind. Exits with 1 if there are problems.

    \b
    kvplug doctor --config kvplug.toml
    kvplug doctor --config kvplug.toml --peer 10.0.0.5:29555
    kvplug doctor --config kvplug.toml --serve          (on the other host)
    """
    try:
        stated = read_facts(facts)
    except ConfigError as e:
        raise click.BadParameter("; ".join(e.faults), param_hint="--fact") from e
    if serve and (peer or write):
        raise click.UsageError("--serve waits for other doctors; it takes neither --peer nor --write")
    try:
        config, registry = Config.load(path, overrides=overrides), Registry.from_env()
    except ConfigError as e:
        found = problems_with(e)
    else:
        if serve:
            _serve(config, registry, stated)
            return
        found = diagnose(config, registry, peer=peer, facts=stated, write=write, timeout_s=timeout)
    if as_json:
        click.echo(json.dumps(found.to_plain(), indent=2))
    else:
        _show(found)
    _leave(1 if found.problems else 0)


def _leave(code: int) -> None:
    """Exit; at once if a plugin's code has not returned, since its libraries may not let the process end."""
    stuck = [each for each in threading.enumerate() if isinstance(each, BackgroundThread)]
    if any(each.name == "kvplug-doctor-store" for each in stuck):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _serve(config: Config, registry: Registry, facts: dict[str, str | int]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with DoctorServer(config, registry, facts=facts) as server:
        click.echo(server.contact)
        click.echo("a doctor answers here; stop it with Ctrl-C or SIGTERM", err=True)
        signal.sigwait(_ENDING)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _show(found: Diagnosis) -> None:
    """What is in order first and briefly, so that problems stand at the end, where a terminal is read."""
    width = max((len(_topic(each)) for each in found.findings), default=0)
    for verdict in ("ok", "note", "problem"):
        for finding in (each for each in found.findings if each.verdict == verdict):
            _show_finding(finding, width)
        if verdict == "ok" and found.fields:
            click.echo("\n" + "\n".join(_rows(found.fields)) + "\n")
    count = found.problems
    click.echo(f"{count or 'no'} problem{'' if count == 1 else 's'} found")


def _topic(finding: Finding) -> str:
    return f"{finding.topic} (peer)" if finding.at == "peer" else finding.topic


def _show_finding(finding: Finding, width: int) -> None:
    head = printable(f"{finding.verdict:7}  {_topic(finding):{width}}  ")
    room = _WIDTH - len(head)
    lines = _wrapped(finding.what, room, "")
    for why in finding.why if finding.verdict != "ok" else ():  # --json has them all
        lines += _wrapped(why, room, "- ")
    if finding.change:
        lines += _wrapped(finding.change, room, "-> ")
    click.echo(click.style(head, fg=_COLOURS[finding.verdict]) + lines[0])
    for line in lines[1:]:
        click.echo(" " * len(head) + line)


def _wrapped(text: str, room: int, mark: str) -> list[str]:
    wrapped: list[str] = []
    for line in printable(text).splitlines() or [""]:
        wrapped += textwrap.wrap(
            line, room, initial_indent=mark, subsequent_indent=" " * len(mark), break_on_hyphens=False
        )
    return wrapped or [mark]


def _rows(fields: tuple[Field, ...]) -> list[str]:
    """The table, at most 80 columns wide: values that do not fit are shortened; --json has them whole."""
    widths = (max(len(each.name) for each in fields), max(len(each.outcome) for each in fields))
    room = (_WIDTH - sum(widths) - 6) // 2
    rows = [("FIELD", "OURS", "THEIRS", "OUTCOME")]
    rows += [(each.name, each.ours, each.theirs, each.outcome) for each in fields]
    return [
        printable(
            f"{name:{widths[0]}}  {_cut(ours, room):{room}}  {_cut(theirs, room):{room}}  {outcome}".rstrip()
        )
        for name, ours, theirs, outcome in rows
    ]


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "\N{HORIZONTAL ELLIPSIS}"
