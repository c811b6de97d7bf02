"""Faults of names and of plugins' options, all at once: the checks that need the plugins."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug.assembly.making import made
from kvplug.assembly.registry.registry import Registry
from kvplug.config.config import Config, Role, directory_of
from kvplug.config.messages import Fault, did_you_mean, listed, shown
from kvplug.config.options import check_options, option_fields
from kvplug.errors import ConfigError, PluginError
from kvplug.net.affinity import missing_cpus
from kvplug.net.wire import checksum
from kvplug.transport.directory import Directory
from kvplug.transport.spec import CommandSpec, ConnectorSpec, Kind, TransportSpec

CHOSEN: Mapping[str, Kind] = {
    "connector": Kind.CONNECTOR,
    "transport": Kind.PIPE,
    "queue": Kind.QUEUE,
    "lookup_buffer": Kind.LOOKUP_BUFFER,
    "communicator": Kind.COMMUNICATOR,
}
"""Keys of a config that name a plugin's offer, and its kind."""

NAMED: Mapping[str, Kind] = {"stores": Kind.STORE, "sinks": Kind.SINK}
"""Keys of a config that list such names."""

CHECKED = ("peers", "integrity", "role", "thread_cpus")
"""Other keys of a config that only the plugins, or this host, can judge."""


def name_faults(
    registry: Registry, names: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """The faults of the names in a config, and of every table of options in it.

    ``names`` holds the keys of :data:`CHOSEN`, :data:`NAMED` and :data:`CHECKED`, as far as their form is
    right.
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
            if spec.name not in options:
                faults += _spec_faults(registry, spec, options)  # something may have to be given
            if isinstance(spec, TransportSpec) and spec.wraps:
                faults += _inner_faults(registry, spec, options)
    for peer in names.get("peers", ()):
        directory = directory_of(peer)
        if directory is None:
            continue
        try:
            faults += _directory_faults(registry, registry.get(Kind.DIRECTORY, directory), peer, options)
        except PluginError as e:
            faults.append(Fault(f"peers: {e}", key="peers", line=e.change))
    faults += _missing_stores(registry, names)
    faults += _unused_buffer(registry, names)
    if fault := missing_cpus(names.get("thread_cpus", "all")):
        faults.append(fault)
    integrity = names.get("integrity", "auto")
    if integrity not in ("auto", "off", *checksum.NAMES):
        allowed = f"allowed is {listed(['auto', 'off', *checksum.NAMES])}"
        faults.append(
            f"integrity: {shown(integrity)} was given; {allowed}{did_you_mean(integrity, checksum.NAMES)}"
        )
    for name in options:
        faults += _table_faults(registry, name, options)
    return tuple(dict.fromkeys(faults))  # things of one name may share a class of options, and its faults


def _directory_faults(
    registry: Registry, spec: Any, url: str, options: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """The faults of a directory's options, else of its URL, which its factory checks without connecting.

    Raises:
        PluginError: its code does not load.
    """
    try:
        filled = options_of(registry, spec, options)
    except ConfigError as e:
        return e.faults if spec.name not in options else ()  # else they are those of its table
    if not spec.run_probe().viable:
        return ()
    try:
        made(spec, Directory.Context(options=filled, url=url)).close()
    except ConfigError as e:
        return e.faults
    return ()


def _missing_stores(registry: Registry, names: Mapping[str, Any]) -> list[str]:
    """The fault of a config without a store where the connector saves into one."""
    if names.get("stores", True) or names.get("role") not in (Role.PRODUCER, Role.BOTH):
        return []
    try:
        connector = registry.get(
            Kind.CONNECTOR, names.get("connector", option_fields(Config)["connector"].default)
        )
    except PluginError:
        return []  # a fault of its name
    if not connector.moves_pages:
        return []
    return [f"stores: nothing was given; {connector.name!r} saves into a store, such as 'host'"]


def _unused_buffer(registry: Registry, names: Mapping[str, Any]) -> list[str]:
    """The fault of a config that names a lookup buffer, and a connector that uses none."""
    name, connector = names.get("lookup_buffer", "auto"), names.get("connector")
    if name == "auto" or connector is None:
        return []
    try:
        registry.get(Kind.LOOKUP_BUFFER, name)
        spec = registry.get(Kind.CONNECTOR, connector)
    except PluginError:
        return []  # a fault of its name
    if spec.uses_lookup_buffer:
        return []
    able = [each.name for _, each in registry if isinstance(each, ConnectorSpec) and each.uses_lookup_buffer]
    hint = f"; {listed(map(repr, sorted(able)))} does" if able else ""
    return [f"lookup_buffer: {name!r} was given, and the connector {spec.name!r} uses no lookup buffer{hint}"]


def _table_faults(registry: Registry, name: str, options: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The faults of ``[options.<name>]``, for every spec of that name."""
    able = [spec for _, spec in registry if not isinstance(spec, CommandSpec)]
    specs = [spec for spec in able if spec.name == name]
    if not specs:
        hint = did_you_mean(name, {spec.name for spec in able})
        return [f"options.{name}: nothing of that name is installed{hint}"]
    return [fault for spec in specs for fault in _spec_faults(registry, spec, options)]


def options_of(registry: Registry, spec: Any, options: Mapping[str, Mapping[str, Any]]) -> Any:
    """An instance of the spec's options class, filled from ``[options.<name>]``; ``None``: it takes none.

    A pipe and a connector may have the same name; each has its own options, in one table.

    Raises:
        ConfigError: with every fault of these options.
        PluginError: the class of the options does not load.
    """
    others = [
        other
        for _, other in registry
        if other.name == spec.name and other != spec and not isinstance(other, CommandSpec)
    ]
    theirs = {key for other in others for key in _keys(other)}
    if theirs:
        theirs -= _keys(spec)
    given = {key: value for key, value in options.get(spec.name, {}).items() if key not in theirs}
    cls = spec.load_options()
    if cls is not None:
        return check_options(cls, given, where=f"options.{spec.name}")
    if given:
        raise ConfigError(f"options.{spec.name}: the {spec.kind} {spec.name!r} takes no options")
    return None


def _keys(spec: Any) -> set[str]:
    try:
        cls = spec.load_options()
    except PluginError:
        return set()  # a fault of its own, which is reported there
    return set() if cls is None else set(option_fields(cls))


def _spec_faults(registry: Registry, spec: Any, options: Mapping[str, Mapping[str, Any]]) -> tuple[str, ...]:
    try:
        options_of(registry, spec, options)
    except ConfigError as e:
        return e.faults
    except PluginError as e:
        return (f"options.{spec.name}: {e}",)
    return ()


def _inner_faults(
    registry: Registry, spec: TransportSpec, options: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """The faults of the inner transport's name."""
    try:
        name = str(getattr(options_of(registry, spec, options), "inner", "auto"))
    except (ConfigError, PluginError):
        name = str(options.get(spec.name, {}).get("inner", "auto"))  # other options have faults of their own
    if name == "auto":
        return ()
    key = f"options.{spec.name}.inner"
    try:
        inner = registry.get(spec.kind, name)
    except PluginError as e:
        return (f"{key}: {e}",)
    if isinstance(inner, TransportSpec) and inner.wraps:
        return (f"{key}: {name!r} wraps another transport itself; name that one",)
    return ()
