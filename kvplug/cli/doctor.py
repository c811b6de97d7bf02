"""``kvplug explain`` and ``kvplug doctor``: what an engine with a config would do, and what would fail."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import attrs
import click

from kvplug.assembly.doctor.diagnosis import Diagnosis
from kvplug.assembly.doctor.doctor import TIMEOUT_S, diagnose, serve_doctors
from kvplug.assembly.doctor.explanation import explain as findings_of, faults_of_file
from kvplug.assembly.doctor.facts import read_facts
from kvplug.assembly.doctor.finding import note
from kvplug.assembly.doctor.stores import THREAD
from kvplug.assembly.peers import LinkServer
from kvplug.assembly.registry import Registry
from kvplug.cli import options
from kvplug.cli.duration import Duration
from kvplug.cli.output import show_findings, show_json
from kvplug.cli.request import explain_request
from kvplug.cli.serving import serve_until_signalled
from kvplug.config.config import Config
from kvplug.errors import ConfigError

Load = Callable[[], Config]


@click.command("explain")
@click.option(
    "--request",
    "request_id",
    metavar="ID",
    help="Explain a recent request of the engines that this user runs on this host instead: where its KV came"
    " from, how long each part took, and what failed. ID: the engine's id of the request, or its beginning.",
)
@options.as_json
@options.quiet
@options.reads_config
def explain(load: Load, request_id: str | None, as_json: bool, quiet: bool) -> None:
    """Explain what this configuration would do here: which connector, stores and transport it would use and
    why, which peers it would accept, and what it would verify.

    Nothing is started or written. Exit code 1: an engine could not start with it, or would transfer no KV; or
    no engine remembers the request.
    """
    if request_id is not None:
        sys.exit(not explain_request(request_id, as_json=as_json))
    try:
        findings = [*findings_of(load(), Registry.from_env())]
    except ConfigError as e:
        findings = [*faults_of_file(e)]
    if as_json:
        show_json([attrs.asdict(each) for each in findings])
    else:
        show_findings(findings, quiet=quiet, details=True)
    sys.exit(any(each.verdict == "problem" for each in findings))


@click.command("doctor")
@click.option(
    "--peer",
    metavar="CONTACT",
    help="Also examine the engine, store or doctor at this address (host:port, unix:@name) or contact.",
)
@click.option(
    "--serve",
    is_flag=True,
    help="Stand in for an engine that is not running: answer `kvplug doctor --peer` at the configuration's"
    " address until SIGTERM or Ctrl-C.",
)
@click.option(
    "--fact",
    "facts",
    metavar="KEY=VALUE",
    multiple=True,
    help="A fact about this host's engine, for example num_layers=32. Can be given again. Facts that are not"
    " given are assumed to equal the peer's.",
)
@click.option("--write", is_flag=True, help="Also put a page of 4 KiB into each store, get it and remove it.")
@click.option(
    "--timeout",
    metavar="DURATION",
    type=Duration(),
    default=TIMEOUT_S,
    help=f"The limit on the total time spent waiting, such as 10 or '1 min'. Default: {TIMEOUT_S:g} s.",
)
@options.as_json
@options.quiet
@options.reads_config
def doctor(
    load: Load,
    peer: str | None,
    serve: bool,
    facts: tuple[str, ...],
    write: bool,
    timeout: float,
    as_json: bool,
    quiet: bool,
) -> None:
    """Find out why nothing moves: try what an engine with this configuration does, here and with a peer.

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
        config, registry = load(), Registry.from_env()
    except ConfigError as e:
        unread = note(
            "config", "this host, the stores and the peers were not checked, since the config cannot be read"
        )
        found = Diagnosis(findings=[*faults_of_file(e), unread])
    else:
        if serve:
            server = functools.partial(serve_doctors, config, registry, facts=stated)
            serve_until_signalled(server, _announce)
            return
        found = diagnose(config, registry, peer=peer, facts=stated, write=write, timeout_s=timeout)
    if as_json:
        show_json(found.to_plain())
    else:
        # Problems come last: that is where one looks first in a terminal.
        order = ("ok", "note", "problem")
        show_findings(sorted(found.findings, key=lambda each: order.index(each.verdict)), quiet=quiet)
        count = found.problems
        click.echo(f"{count or 'no'} problem{'' if count == 1 else 's'} found")
    code = int(found.problems > 0)
    if any(each.name == THREAD for each in threading.enumerate()):
        # Plugin code has not returned, so its libraries may keep the process from exiting.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _announce(server: LinkServer[Any]) -> None:
    click.echo(server.contact)
    click.echo("answering doctors; stop with Ctrl-C or SIGTERM", err=True)
