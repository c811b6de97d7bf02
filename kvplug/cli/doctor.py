"""``kvplug doctor``: the problems that an engine with this config would have, here and with a peer."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading

import click

from kvplug.assembly.doctor.diagnosis import Diagnosis
from kvplug.assembly.doctor.doctor import TIMEOUT_S, diagnose, serve_doctors
from kvplug.assembly.doctor.explanation import faults_of_file
from kvplug.assembly.doctor.facts import read_facts
from kvplug.assembly.doctor.stores import THREAD
from kvplug.assembly.registry import Registry
from kvplug.cli.config import reads_config
from kvplug.cli.duration import Duration
from kvplug.cli.findings import show_findings
from kvplug.cli.table import show_table
from kvplug.config.config import Config
from kvplug.errors import ConfigError

_WORD = 20
_ENDING = (signal.SIGTERM, signal.SIGINT)


@click.command("doctor")
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
    help=f"All waiting ends after this time, such as 10 or '1 min'. Default: {TIMEOUT_S:g} s.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
@click.option("--quiet", is_flag=True, help="Show notes and problems only, and how many others there are.")
@reads_config
def doctor(
    path: str | None,
    peer: str | None,
    serve: bool,
    facts: tuple[str, ...],
    write: bool,
    timeout: float,
    as_json: bool,
    quiet: bool,
    overrides: tuple[str, ...],
) -> None:
    """Find out why nothing moves: try what an engine with this configuration does, here and at a peer.

    It performs an engine's handshake, measures a pipe for at most a second with at most 64 MiB, and leaves
    nothing behind. Exit code 1: there are problems.

    \b
    kvplug doctor kvplug.toml
    kvplug doctor kvplug.toml --peer 10.0.0.5:29555
    kvplug doctor kvplug.toml --serve          (on the other host)
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
        found = Diagnosis(findings=[*faults_of_file(e)])
    else:
        if serve:
            _serve(config, registry, stated)
            return
        found = diagnose(config, registry, peer=peer, facts=stated, write=write, timeout_s=timeout)
    if as_json:
        click.echo(json.dumps(found.to_plain(), indent=2))
    else:
        _show(found, quiet=quiet)
    _leave(1 if found.problems else 0)


def _leave(code: int) -> None:
    """Exit. If plugin code has not returned, exit at once: its libraries may keep the process from ending."""
    if any(each.name == THREAD for each in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _serve(config: Config, registry: Registry, facts: dict[str, str | int]) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with serve_doctors(config, registry, facts=facts) as server:
        click.echo(server.contact)
        click.echo("answering doctors; stop with Ctrl-C or SIGTERM", err=True)
        signal.sigwait(_ENDING)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)


def _show(found: Diagnosis, *, quiet: bool = False) -> None:
    """Print the findings, with the problems last, where a terminal's reader looks first."""
    if found.fields and not quiet:
        rows = [(each.name, _cut(each.ours), _cut(each.theirs), each.outcome) for each in found.fields]
        show_table(("FIELD", "OURS", "THEIRS", "OUTCOME"), rows)
        click.echo()
    order = ("ok", "note", "problem")
    show_findings(sorted(found.findings, key=lambda each: order.index(each.verdict)), quiet=quiet)
    count = found.problems
    click.echo(f"{count or 'no'} problem{'' if count == 1 else 's'} found")


def _cut(text: str) -> str:
    """Shorten long words, such as ids, to fit the table into 80 columns. --json prints the whole text."""
    return " ".join(
        word if len(word) <= _WORD else f"{word[: _WORD - 1]}\N{HORIZONTAL ELLIPSIS}" for word in text.split()
    )
