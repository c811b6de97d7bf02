"""Checks the names and plugin options in a config against the plugins, and reports all faults at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kvplug.assembly.making import made
from kvplug.assembly.registry.registry import Registry
from kvplug.config.config import Config, Role, directory_of
from kvplug.config.messages import Fault, did_you_mean, listed, shown
from kvplug.config.options import check_options, option_fields
from kvplug.errors import ConfigError, PluginError
from kvplug.metrics.prometheus import sink_fault
from kvplug.metrics.tracing import exporter_fault
from kvplug.net.affinity import missing_cpus
from kvplug.net.wire import checksum
from kvplug.transport.directory import Directory
from kvplug.transport.spec import CommandSpec, ConnectorSpec, Kind

CHOSEN: Mapping[str, Kind] = {
    "connector": Kind.CONNECTOR,
    "transport": Kind.PIPE,
    "queue": Kind.QUEUE,
    "lookup_buffer": Kind.LOOKUP_BUFFER,
    "communicator": Kind.COMMUNICATOR,
}
"""The config keys whose value is one name from a plugin, and what kind of thing has that name."""

NAMED: Mapping[str, Kind] = {"stores": Kind.STORE, "sinks": Kind.SINK}
"""The config keys whose value is a list of such names."""

CHECKED = ("peers", "integrity", "role", "thread_cpus", "tracing")
"""The other config keys that can only be checked with the plugins or on this host."""

_PROMETHEUS = "kvplug.metrics.prometheus:ConfiguredPrometheusSink"
"""The factory of the sink whose package is optional."""
_DEFAULT_CONNECTOR = option_fields(Config)["connector"].default


Tables = Mapping[str, Mapping[str, Any]]
"""The tables of options in a config, by name."""


def name_faults(registry: Registry, names: Mapping[str, Any], options: Tables) -> tuple[str, ...]:
    """Return the faults of the names in a config, and of all its tables of options.

    ``names`` holds values of the keys in :data:`CHOSEN`, :data:`NAMED` and :data:`CHECKED`. Leave out a key
    whose value has the wrong form.
    """
    faults: list[str] = []
    for key, kind in {**CHOSEN, **NAMED}.items():
        given = names.get(key) or ()
        seen: dict[int, str] = {}
        for name in (given,) if isinstance(given, str) else given:
            if name == "auto":
                continue
            try:
                spec = registry.get(kind, name)
            except PluginError as e:
                faults.append(Fault(f"{key}: {e}", key=key, line=e.change))
                continue
            if (before := seen.setdefault(id(spec), name)) != name:
                faults.append(f"{key}: {before!r} and {name!r} are the same {kind}; name it once")
            if spec.factory == _PROMETHEUS and (fault := sink_fault()):
                faults.append(fault)
            if spec.name not in options:
                faults += _spec_faults(registry, spec, options)  # faults if an option is required
    for peer in names.get("peers", ()):
        if (directory := directory_of(peer)) is not None:
            try:
                faults += _directory_faults(registry, registry.get(Kind.DIRECTORY, directory), peer, options)
            except PluginError as e:
                faults.append(Fault(f"peers: {e}", key="peers", line=e.change))
    connector = registry.find(Kind.CONNECTOR, names.get("connector", _DEFAULT_CONNECTOR))
    if connector is not None:
        faults += _connector_faults(registry, connector, names)
    if missing := missing_cpus(names.get("thread_cpus", "all")):
        faults.append(missing)
    integrity = names.get("integrity", "auto")
    if integrity not in ("auto", "off", *checksum.NAMES):
        allowed = f"allowed is {listed(['auto', 'off', *checksum.NAMES])}"
        faults.append(
            f"integrity: {shown(integrity)} was given; {allowed}{did_you_mean(integrity, checksum.NAMES)}"
        )
    if (tracing := names.get("tracing")) and (fault := exporter_fault(tracing)):
        faults.append(fault)
    able = [spec for _, spec in registry if not isinstance(spec, CommandSpec)]
    for name in options:
        specs = [spec for spec in able if spec.name == name]
        faults += (fault for spec in specs for fault in _spec_faults(registry, spec, options))
        if not specs:
            hint = did_you_mean(name, {spec.name for spec in able})
            faults.append(f"options.{name}: nothing with that name is installed{hint}")
    return tuple(dict.fromkeys(faults))  # specs that share an options class repeat its faults


def _directory_faults(registry: Registry, spec: Any, url: str, options: Tables) -> tuple[str, ...]:
    """Return the faults of a directory's options. If it has none, return the faults of its URL.

    The directory's factory checks the URL without connecting.

    Raises:
        PluginError: the directory's code does not load.
    """
    try:
        filled = options_of(registry, spec, options)
    except ConfigError as e:
        return e.faults if spec.name not in options else ()  # name_faults() checks its table
    if not spec.run_probe().viable:
        return ()
    try:
        made(spec, Directory.Context(options=filled, url=url)).close()
    except ConfigError as e:
        return e.faults
    return ()


def _connector_faults(
    registry: Registry, connector: ConnectorSpec, names: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a fault if the connector saves into a store and none is named, or if a lookup buffer is named but
    the connector does not use one."""
    saves = connector.moves_pages and names.get("role") in (Role.PRODUCER, Role.BOTH)
    if saves and not names.get("stores", True):
        yield f"stores: nothing was given; {connector.name!r} saves into a store, such as 'host'"
    buffer = names.get("lookup_buffer", "auto")
    is_unused = "connector" in names and not connector.uses_lookup_buffer
    if is_unused and registry.find(Kind.LOOKUP_BUFFER, buffer) is not None:
        able = [spec.name for spec in registry.specs(Kind.CONNECTOR) if spec.uses_lookup_buffer]
        hint = f"; {listed(map(repr, able))} does" if able else ""
        yield (
            f"lookup_buffer: {buffer!r} was given, and the connector {connector.name!r} uses no lookup buffer"
            f"{hint}"
        )


def options_of(registry: Registry, spec: Any, options: Tables) -> Any:
    """Return an instance of the spec's options class, filled from ``[options.<name>]``, or ``None`` if the
    spec takes no options.

    A pipe and a connector may have the same name. They then share one table, and each has its own options.

    Raises:
        ConfigError: the options are wrong; the error lists every fault.
        PluginError: the options class does not load.
    """
    cls = spec.load_options()
    sharing = (other for _, other in registry if other.name == spec.name and other != spec)
    theirs = {key for other in sharing for key in _keys(other)}.difference(_keys(spec))
    given = {key: value for key, value in options.get(spec.name, {}).items() if key not in theirs}
    if cls is not None:
        return check_options(cls, given, where=f"options.{spec.name}")
    if given:
        raise ConfigError(f"options.{spec.name}: the {spec.kind} {spec.name!r} takes no options")
    return None


def _keys(spec: Any) -> Iterable[str]:
    try:
        cls = None if isinstance(spec, CommandSpec) else spec.load_options()
    except PluginError:
        return ()  # reported when the other spec is checked
    return () if cls is None else option_fields(cls)


def _spec_faults(registry: Registry, spec: Any, options: Tables) -> tuple[str, ...]:
    try:
        options_of(registry, spec, options)
    except ConfigError as e:
        return e.faults
    except PluginError as e:
        return (f"options.{spec.name}: {e}",)
    return ()
