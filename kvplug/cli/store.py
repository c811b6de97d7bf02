"""``kvplug store``: serves a store of KV pages apart from any engine, and prints what it holds."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

import attrs
import click

from kvplug.assembly.health import HealthServer
from kvplug.assembly.stores import StoreServer, serve_store, store_stats
from kvplug.cli import options
from kvplug.cli.completion import offers
from kvplug.cli.log import PrintableFormatter, show_log
from kvplug.cli.output import show_json, show_table
from kvplug.cli.serving import serve_until_signalled
from kvplug.config.addresses import Address
from kvplug.config.config import Config
from kvplug.config.options import format_value
from kvplug.errors import ConfigError
from kvplug.transport.spec import Kind

_log = logging.getLogger(__name__)


@click.group()
def store() -> None:
    """Serve a store of KV pages to other programs, or ask one what it holds.

    A store that runs apart keeps its pages when the engines that use it end.
    """


def _health_address(ctx: click.Context, param: click.Parameter, given: str | None) -> Address | None:
    try:
        address = None if given is None else Address.parse(given)
    except ConfigError:
        address = Address()
    if address is not None and address.is_unix:
        raise click.BadParameter(f"{given!r} was given; allowed is host:port, such as 127.0.0.1:29580")
    return address


@store.command()
@click.argument("name", metavar="[NAME]", required=False, shell_complete=offers(Kind.STORE))
@click.option(
    "--address",
    metavar="ADDRESS",
    help="Where to listen: host:port, unix:@name, or unix:/path for containers that share a folder. Default:"
    " the host and port of the configuration.",
)
@click.option(
    "--health",
    metavar="ADDRESS",
    callback=_health_address,
    help="Answer GET /live and GET /ready over HTTP at this host:port, for probes. Default: no.",
)
@options.sets_config
def serve(name: str | None, address: str | None, health: Address | None, config: Config) -> None:
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
    show_log("INFO", PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))  # unless KVPLUG_LOG is set
    serving = functools.partial(_serving, config, name, address, health)
    ended = serve_until_signalled(serving, _announce)
    _log.info("%s: the store has ended", ended)


@contextlib.contextmanager
def _serving(
    config: Config, name: str | None, address: str | None, health: Address | None
) -> Iterator[StoreServer]:
    """Serve the store. Probes are answered from before it opens until it has closed."""
    opened = contextlib.nullcontext() if health is None else contextlib.closing(HealthServer(health))
    with opened as probes, serve_store(config, name, address) as server:
        if probes is not None:
            probes.watch(server.health)
        yield server


def _announce(server: StoreServer) -> None:
    click.echo(server.contact)
    budget = server.stats().budget_bytes
    keeps = "" if budget is None else f" keeps up to {format_value(budget, 'bytes')}, and"
    _log.info("the store %r%s ends with Ctrl-C or SIGTERM", server.name, keeps)


@store.command()
@click.argument("contact", metavar="CONTACT")
@options.sets_config
@options.as_json
def stats(contact: str, config: Config, as_json: bool) -> None:
    """Print what the store at CONTACT holds.

    The output has pages, bytes, the budget, and how many programs use the store. CONTACT is the first line of
    the output of `kvplug store serve`, or its address. Exit code 1: no store answers there.
    """
    found = attrs.asdict(store_stats(config, contact))
    if as_json:
        show_json(found)
        return
    rows = [
        (key.replace("_", " "), format_value(value, "bytes" if key.endswith("bytes") else ""))
        for key, value in found.items()
    ]
    show_table(("STORE", found["name"]), rows)
