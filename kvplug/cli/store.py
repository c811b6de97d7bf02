"""``kvplug store``: serves a store of KV pages apart from any engine, and prints what it holds."""

from __future__ import annotations

import json
import logging
import signal
from typing import Any

import attrs
import click

from kvplug.assembly.stores import StoreStats, serve_store, store_stats
from kvplug.cli.completion import offers, overrides as complete_keys
from kvplug.cli.config import config_option
from kvplug.cli.main import show_log
from kvplug.cli.table import show_table
from kvplug.config.config import Config
from kvplug.config.options import format_value
from kvplug.transport.spec import Kind

_ENDING = (signal.SIGTERM, signal.SIGINT)

_overrides = click.option(
    "--set",
    "overrides",
    metavar="KEY=VALUE",
    shell_complete=complete_keys,
    multiple=True,
    help="Set a key of the configuration, for example options.host.size='64 GiB'. Can be given again.",
)


@click.group()
def store() -> None:
    """Serve a store of KV pages to other programs, or ask one what it holds.

    A store that runs apart keeps its pages when the engines that use it end.
    """


@store.command()
@click.argument("name", metavar="[NAME]", required=False, shell_complete=offers(Kind.STORE))
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Where to listen: host:port, unix:@name, or unix:/path for containers that share a folder. Default:"
    " the host and port of the configuration.",
)
@config_option
@_overrides
def serve(name: str | None, address: str | None, path: str | None, overrides: tuple[str, ...]) -> None:
    """Serve the store NAME until SIGTERM or SIGINT (Ctrl-C).

    NAME is a store that `kvplug list` shows and that other programs can use, such as host. Default: the first
    of the configuration's stores.

    The first line of the output is the contact: other programs set it as an option of their store, for
    example options.host.contact. Programs that connect and leave are logged to stderr.

    \b
    kvplug store serve host --address unix:@kv --set options.host.size='64 GiB'
    kvplug store stats unix:@kv
    """
    if name is not None and name.endswith((".toml", ".json")):
        raise click.UsageError(f"{name!r} was given; allowed is the name of a store: use --config {name}")
    config = Config.load(path, overrides=overrides)
    show_log("INFO", "%(asctime)s %(levelname)s %(message)s")  # unless KVPLUG_LOG is set
    # The signals are blocked in all threads and awaited below, since a handler could interrupt anything.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    with serve_store(config, name, address) as server:
        click.echo(server.contact)
        budget = server.stats().budget_bytes
        logging.getLogger(__name__).info(
            "the store %r listens%s; stop it with Ctrl-C or SIGTERM",
            server.name,
            "" if budget is None else f" and keeps up to {format_value(budget, 'bytes')}",
        )
        ended = signal.sigwait(_ENDING)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)  # a second signal ends it at once
        logging.getLogger(__name__).info("%s: the store %r ends", signal.Signals(ended).name, server.name)


@store.command()
@click.argument("contact", metavar="CONTACT")
@config_option
@_overrides
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def stats(contact: str, path: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Print what the store at CONTACT holds.

    The output has pages, bytes, the budget, and how many programs use the store. CONTACT is the first line of
    the output of `kvplug store serve`, or its address. Exit code 1: no store answers there.
    """
    found = store_stats(Config.load(path, overrides=overrides), contact)
    if as_json:
        click.echo(json.dumps(attrs.asdict(found), indent=2))
    else:
        show_table(("STORE", found.name), list(_rows(found).items()))


def _rows(found: StoreStats) -> dict[str, Any]:
    used = f"{found.used_bytes / found.budget_bytes:.1%}" if found.budget_bytes else ""
    return {
        "pages": f"{found.num_pages:,}",
        "bytes": " ".join(filter(None, (format_value(found.used_bytes, "bytes"), used and f"({used})"))),
        "budget": "no limit of its own"
        if found.budget_bytes is None
        else format_value(found.budget_bytes, "bytes"),
        "programs that use it": str(found.num_clients),
    }
