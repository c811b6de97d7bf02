"""``kvplug list``: the plugins, their offers, and whether these work on this host."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import attrs
import click

from kvplug.assembly.registry import PluginInfo, Registry
from kvplug.assembly.registry.discovery import normalised
from kvplug.cli import options
from kvplug.cli.completion import offers
from kvplug.cli.output import paragraph, show_json, show_table
from kvplug.errors import AmbiguousNameError, PluginLoadError, UnknownNameError
from kvplug.net.peer_text import printable
from kvplug.transport.spec import CommandSpec, ConnectorSpec, Kind, Spec, StoreSpec, TransportSpec

Row = dict[str, Any]
"""One offer, or a broken or blocked plugin, whose offers are unknown; ``--json`` prints rows unchanged."""


@click.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=offers(plugins=True))
@click.option(
    "--kind",
    metavar="KIND",
    type=click.Choice([kind.value for kind in Kind]),
    help="Only offers of this kind, such as store or pipe.",
)
@click.option(
    "--options",
    "options_of",
    metavar="NAME",
    shell_complete=offers(),
    help="Show the options of NAME: type, unit, default.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Also list offers that are meant for tests, such as fakes."
)
@options.as_json
def list_plugins(
    names: tuple[str, ...], kind: str | None, options_of: str | None, everything: bool, as_json: bool
) -> None:
    """Show what the installed plugins offer, and whether that can work on this host.

    Probes check what can work here. With NAME, this shows everything about the offers of that name, and loads
    their code.
    """
    registry = Registry.from_env()
    if options_of is not None:
        _show_options(registry, options_of, as_json)
        return
    # A plugin that did not load may have offers of the kind.
    kinds = None if kind is None else {kind} if as_json else {kind, "plugin"}
    rows = [
        row for row in _rows(registry, names, everything=everything) if kinds is None or row["kind"] in kinds
    ]
    if as_json:
        show_json(rows)
    elif not rows:
        click.echo(
            "Nothing of this is installed. pip install kvplug-cpu kvplug-host kvplug-lookup brings the first"
            " plugins."
        )
    elif names:
        click.echo("\n\n".join(map(_whole, rows)))
    else:
        _show_by_kind(rows)


# -- rows ------------------------------------------------------------------------------------------------


def _rows(registry: Registry, names: Collection[str], *, everything: bool) -> list[Row]:
    """Return the probed offers, then the plugins that are broken or blocked.

    ``names``: return only the offers of these names, plugins or distributions, and load their code.

    Raises:
        UnknownNameError: nothing installed has one of the names.
    """
    every: list[tuple[PluginInfo, Spec | None]] = [*registry, *((plugin, None) for plugin in registry.failed)]
    called = [{plugin.name, plugin.distribution, spec.name if spec else ""} for plugin, spec in every]
    for name in names:
        if not any(name in each for each in called):
            known = (spec.name for _, spec in registry)
            raise UnknownNameError(registry.about_unknown("nothing is installed that is named", name, known))
    rows = [
        _row(registry, plugin, spec, load=bool(names))
        for (plugin, spec), each in zip(every, called, strict=True)
        if (each & {*names} if names else everything or not getattr(spec, "for_tests", False))
    ]
    return sorted(rows, key=lambda row: (row["kind"] == "plugin", row["kind"], row["name"], row["plugin"]))


def _row(registry: Registry, plugin: PluginInfo, spec: Spec | None, *, load: bool) -> Row:
    status, reason = plugin.status.value, plugin.reason
    if spec is not None:
        status, reason = _status(registry, spec, load=load)
    store = spec if isinstance(spec, StoreSpec) else None
    able = spec.capabilities if isinstance(spec, TransportSpec) else None
    return {
        "name": spec.name if spec else plugin.name,
        "kind": spec.kind.value if spec else "plugin",
        "plugin": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "status": status,
        "reason": reason,
        "capabilities": able and attrs.asdict(able),
        "persistent": store and store.persistent,
        "cross_host": store and store.cross_host,
        "summary": spec.summary if spec else "",
    }


def _status(registry: Registry, spec: Spec, *, load: bool) -> tuple[str, str]:
    """Return the status of an offer, and the reason."""
    try:
        registry.get(spec.kind, spec.name)
        probe = spec.run_probe() if isinstance(spec, TransportSpec | StoreSpec) else None
        if probe is not None and not probe.viable:
            return "unavailable", probe.reason or "its probe gives no reason"
        if load:
            _load_code(spec)
    except AmbiguousNameError as e:
        return "ambiguous", str(e)
    except PluginLoadError as e:
        return "broken", str(e)
    return "ok", ""


def _load_code(spec: Spec) -> None:
    """Import all the code that an offer names."""
    if isinstance(spec, CommandSpec):
        spec.load()
        return
    spec.load_factory()
    if isinstance(spec, ConnectorSpec):
        spec.load_worker_factory()
    if isinstance(spec, StoreSpec) and spec.client is not None:
        spec.load_client()


# -- printing --------------------------------------------------------------------------------------------


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _show_by_kind(rows: Sequence[Row]) -> None:
    """Print a paragraph for each offer, on one line if the terminal is wide enough."""
    width = max(len(row["name"]) for row in rows)
    for kind, group in itertools.groupby(rows, lambda row: row["kind"]):
        click.secho(_words(kind), bold=True)
        for row in group:
            is_ok = row["status"] == "ok"
            text = row["summary"] if is_ok else f"{row['status']}: {row['reason']}"
            head = f"  {row['name']:{width}}  "
            click.secho(paragraph(head, text), fg=None if is_ok else "yellow")
    click.echo("\n`kvplug list NAME` shows details of an offer, `--options NAME` shows its options.")


def _whole(row: Row) -> str:
    """Format all values that ``--json`` prints for an offer, without empty ones."""
    from kvplug.config.options import format_value

    able = row["capabilities"] or {}
    shown = {**row, **able, **able.get("cost", {})}
    if row["kind"] not in ("command", "plugin"):
        shown["options"] = f"kvplug list --options {row['name']}"
    return "\n".join(
        paragraph(f"{key:14} ", format_value(value))
        for key, value in shown.items()
        if value not in (None, "") and key not in ("capabilities", "cost")
    )


# -- options ---------------------------------------------------------------------------------------------


def _show_options(registry: Registry, name: str, as_json: bool) -> None:
    """Print the options of everything that is called ``name``, or ``distribution:name``."""
    from kvplug.config.options import describe_options

    distribution, _, bare = name.rpartition(":")
    every = [(plugin, spec) for plugin, spec in registry if not isinstance(spec, CommandSpec)]
    described = [
        (plugin, spec, () if (cls := spec.load_options()) is None else describe_options(cls))
        for plugin, spec in every
        if spec.name == bare and normalised(distribution) in ("", normalised(plugin.distribution))
    ]
    if not described:
        known = (spec.name for _, spec in every)
        raise UnknownNameError(registry.about_unknown("nothing is installed that is named", name, known))
    if as_json:
        show_json(
            [
                {"name": spec.name, "kind": spec.kind.value, "distribution": plugin.distribution}
                | {"options": [attrs.asdict(row) for row in rows]}
                for plugin, spec, rows in described
            ]
        )
        return
    for plugin, spec, rows in described:
        title = f"{_words(spec.kind)} {spec.name} ({plugin}), [options.{spec.name}]"
        click.echo(printable(title if rows else f"{title}: takes no options"))
        if rows:
            cells = [
                (row.name, row.default, f"{row.type}{row.unit and f' ({row.unit})'}. {row.help}")
                for row in rows
            ]
            show_table(("OPTION", "DEFAULT", "TYPE, MEANING"), cells)
