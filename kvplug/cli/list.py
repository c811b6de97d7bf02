"""``kvplug list``: the plugins, their offers, and whether these work on this host."""

from __future__ import annotations

import itertools
import json
import shutil
import textwrap
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import click

from kvplug.assembly.registry import PluginInfo, PluginStatus, Registry
from kvplug.assembly.registry.discovery import normalised
from kvplug.cli.completion import kinds, offers
from kvplug.cli.table import show_table
from kvplug.config.messages import did_you_mean
from kvplug.errors import AmbiguousNameError, PluginLoadError, UnknownNameError
from kvplug.net.peer_text import printable
from kvplug.transport.capabilities import Capabilities
from kvplug.transport.spec import CommandSpec, ConnectorSpec, Spec, StoreSpec, TransportSpec

if TYPE_CHECKING:
    from kvplug.config.options import OptionRow


@attrs.frozen(kw_only=True)
class Line:
    """One offered spec, or a plugin whose offers are unknown because it is broken or blocked."""

    name: str
    kind: str
    """A kind, or ``"plugin"``."""
    plugin: str
    distribution: str
    version: str
    status: str
    """ok, unavailable (on this host), ambiguous (two plugins offer it), broken (a plugin, or the code of an
    offer requested by name), or blocked (a plugin)."""
    reason: str = ""
    capabilities: Capabilities | None = None
    persistent: bool | None = None
    """For a store: whether its pages outlive the processes that use it."""
    cross_host: bool | None = None
    """For a store: whether processes on several hosts can use it."""
    devices: Sequence[str] | None = None
    """For a store: the devices whose memory it serves without staging."""
    summary: str = ""


@click.command("list")
@click.argument("names", metavar="[NAME]...", nargs=-1, shell_complete=offers(plugins=True))
@click.option(
    "--kind", metavar="KIND", shell_complete=kinds, help="Only offers of this kind, such as store or pipe."
)
@click.option("--long", "as_table", is_flag=True, help="A table with packages, versions and capabilities.")
@click.option(
    "--options",
    "options_of",
    metavar="NAME",
    shell_complete=offers(),
    help="Show the options of NAME: type, unit, default.",
)
@click.option(
    "--all", "everything", is_flag=True, help="Also list what is made for tests: fakes and fault injection."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
def list_plugins(
    names: tuple[str, ...],
    kind: str | None,
    as_table: bool,
    options_of: str | None,
    everything: bool,
    as_json: bool,
) -> None:
    """Show what the installed plugins offer, and whether that can work on this host.

    Probes check what can work here. With NAME, this shows everything about the offers of that name, and loads
    their code.
    """
    registry = Registry.from_env()
    if options_of is not None:
        _show_options(registry, options_of, as_json)
        return
    lines = lines_of(registry, names, everything=everything or bool(names))
    lines = _selected(registry, lines, names, kind, failed=not as_json)
    if as_json:
        click.echo(json.dumps([_plain(line) for line in lines], indent=2))
    elif not lines:
        click.echo("No plugins are installed. pip install kvplug-cpu kvplug-lookup brings the first ones.")
    elif as_table:
        columns = ("NAME", "KIND", "STATUS", "FROM, CAPABILITIES, SUMMARY")
        show_table(columns, [_cells(line) for line in lines])
    elif names:
        click.echo("\n\n".join(_whole(line) for line in lines))
    else:
        _show_by_kind(lines)


def _selected(
    registry: Registry, lines: Sequence[Line], names: Sequence[str], kind: str | None, *, failed: bool
) -> list[Line]:
    """Select the lines of these names and this kind. ``failed``: also select plugins that did not load.

    Raises:
        UnknownNameError: no line has the name or kind; the message lists the known ones.
    """
    if kind is not None:
        there = dict.fromkeys(line.kind for line in lines)
        wanted = kind.replace(" ", "_").replace("-", "_")
        if wanted not in there:
            shown = ", ".join(map(_words, there))
            raise UnknownNameError(
                f"no offer has the kind {kind!r}{did_you_mean(wanted, there)}; kinds: {shown}"
            )
        # A plugin that did not load may offer that kind, because its offers are unknown.
        lines = [line for line in lines if line.kind == wanted or (failed and line.kind == "plugin")]
    for name in names:
        if all(name not in (line.name, line.plugin, line.distribution) for line in lines):
            known = (line.name for line in lines)
            raise UnknownNameError(registry.about_unknown("nothing is installed that is named", name, known))
    if not names:
        return list(lines)
    return [line for line in lines if {line.name, line.plugin, line.distribution} & {*names}]


def _words(kind: str) -> str:
    return kind.replace("_", " ")


def _show_by_kind(lines: Sequence[Line]) -> None:
    """Print a paragraph for each offer, on one line if the terminal is wide enough."""
    width = max(len(line.name) for line in lines)
    for kind, group in itertools.groupby(lines, lambda line: line.kind):
        click.secho(_words(kind), bold=True)
        for line in group:
            text = line.summary if line.status == "ok" else f"{line.status}: {line.reason}"
            colour = None if line.status == "ok" else "yellow"
            click.secho(_paragraph(f"  {line.name.ljust(width)}  ", text), fg=colour)
    click.echo("\n`kvplug list NAME` shows details of an offer, `--options NAME` shows its options.")


def _whole(line: Line) -> str:
    """Format everything about an offer."""
    rows = {
        "summary": line.summary,
        "status": line.status if not line.reason else f"{line.status}: {line.reason}",
        "can do": _able(line),
        "from": f"{line.distribution} {line.version}, plugin {line.plugin}",
        "options": f"kvplug list --options {line.name}" if line.kind not in ("command", "plugin") else "",
    }
    shown = [_paragraph(f"  {name.ljust(8)} ", text) for name, text in rows.items() if text]
    return "\n".join([printable(f"{_words(line.kind)} {line.name}"), *shown])


def _paragraph(head: str, text: str) -> str:
    """Wrap text beside its head to the terminal's width, or to 80 columns in a pipe."""
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(
        printable(f"{head}{text}"), columns, subsequent_indent=" " * len(head), break_on_hyphens=False
    ).rstrip()


def lines_of(registry: Registry, names: Collection[str] = (), *, everything: bool = False) -> list[Line]:
    """Return the probed offers, then the plugins that are broken or blocked.

    ``names``: offers, plugins or distributions whose code is loaded too. ``everything``: include offers made
    for tests.
    """
    offered = []
    for plugin, spec in registry:
        if everything or isinstance(spec, CommandSpec) or not spec.for_tests:
            load = not {spec.name, plugin.name, plugin.distribution}.isdisjoint(names)
            offered.append(_line(plugin, *_status(registry, spec, load=load), spec=spec))
    failed = [
        _line(plugin, plugin.status.value, plugin.reason)
        for plugin in registry.plugins
        if plugin.status is not PluginStatus.OK
    ]
    return sorted(offered, key=lambda line: (line.kind, line.name, line.distribution)) + failed


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


def _line(plugin: PluginInfo, status: str, reason: str, *, spec: Spec | None = None) -> Line:
    store = spec if isinstance(spec, StoreSpec) else None
    return Line(
        name=plugin.name if spec is None else spec.name,
        kind="plugin" if spec is None else spec.kind.value,
        plugin=plugin.name,
        distribution=plugin.distribution,
        version=plugin.version,
        status=status,
        reason=reason,
        capabilities=spec.capabilities if isinstance(spec, TransportSpec) and not spec.wraps else None,
        persistent=None if store is None else store.persistent,
        cross_host=None if store is None else store.cross_host,
        devices=None if store is None else sorted(store.devices),
        summary="" if spec is None else spec.summary,
    )


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


def _plain(line: Line) -> dict[str, Any]:
    plain = attrs.asdict(line)
    if line.capabilities is not None:
        plain["capabilities"]["devices"] = sorted(line.capabilities.devices)
    return plain


def _cells(line: Line) -> tuple[str, ...]:
    about = (f"{line.distribution} {line.version}", _able(line), line.reason or line.summary)
    return (line.name, _words(line.kind), line.status, "; ".join(filter(None, about)))


def _able(line: Line) -> str:
    """Describe the abilities of a transport or store in words."""
    able = line.capabilities
    if able is not None:
        trust = [] if able.authenticated else ["not authenticated"]
        cost = [f"{able.cost.gb_per_s:g} GB/s", f"{able.cost.latency_us:g} us"]
        words = ["+".join(sorted(able.devices)), "any host" if able.cross_host else "one host", *trust, *cost]
    elif line.devices is not None:
        words = [f"{'+'.join(line.devices)} (others staged)", "any host" if line.cross_host else "one host"]
        words += ["persistent"] if line.persistent else []
    else:
        words = []
    return ", ".join(words)


# -- options ---------------------------------------------------------------------------------------


def _show_options(registry: Registry, name: str, as_json: bool) -> None:
    from kvplug.config.options import describe_options

    described = []
    for plugin, spec in _called(registry, name):
        cls = spec.load_options()
        described.append((plugin, spec, () if cls is None else describe_options(cls)))
    if as_json:
        every = [
            {"name": spec.name, "kind": spec.kind.value, "distribution": plugin.distribution}
            | {"options": [attrs.asdict(row) for row in rows]}
            for plugin, spec, rows in described
        ]
        click.echo(json.dumps(every, indent=2))
        return
    for i, (plugin, spec, rows) in enumerate(described):
        if i:
            click.echo()
        title = f"{_words(spec.kind)} {spec.name} ({plugin}), [options.{spec.name}]"
        click.echo(printable(title if rows else f"{title}: takes no options"))
        if rows:
            cells = [(row.name, row.default, f"{_type_of(row)}. {row.help}") for row in rows]
            show_table(("OPTION", "DEFAULT", "TYPE, MEANING"), cells)


def _called(registry: Registry, name: str) -> list[tuple[PluginInfo, Any]]:
    """Return every spec of that name (or ``distribution:name``) that can have options."""
    distribution, _, bare = name.rpartition(":")
    every = [(plugin, spec) for plugin, spec in registry if not isinstance(spec, CommandSpec)]
    found = [
        (plugin, spec)
        for plugin, spec in every
        if spec.name == bare and normalised(distribution) in ("", normalised(plugin.distribution))
    ]
    if not found:
        known = (spec.name for _, spec in every)
        raise UnknownNameError(registry.about_unknown("nothing is installed that is named", name, known))
    return found


def _type_of(row: OptionRow) -> str:
    return f"{row.type} ({row.unit})" if row.unit else row.type
