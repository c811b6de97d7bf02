"""Faults of names and of plugins' options, all at once: what only those who know the plugins can see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvplug import checksum
from kvplug.config import check_options
from kvplug.config.faults import did_you_mean, listed, shown
from kvplug.errors import ConfigError, PluginError
from kvplug.registry.registry import Registry
from kvplug.spec import CommandSpec, Kind

CHOSEN: Mapping[str, Kind] = {
    "connector": Kind.CONNECTOR,
    "transport": Kind.PIPE,
    "queue": Kind.QUEUE,
    "lookup_buffer": Kind.LOOKUP_BUFFER,
    "communicator": Kind.COMMUNICATOR,
}
"""Keys of a config that name something, and what kind of thing."""


def name_faults(
    registry: Registry, names: Mapping[str, Any], options: Mapping[str, Mapping[str, Any]]
) -> tuple[str, ...]:
    """What is wrong with the names in a config, and with every table of options in it.

    ``names`` holds the keys of :data:`CHOSEN`, ``sinks`` and ``integrity``, as far as their form is right.
    """
    faults: list[str] = []
    for key, kind in CHOSEN.items():
        name = names.get(key)
        if name is None or name == "auto":
            continue
        try:
            registry.get(kind, name)
        except PluginError as e:
            faults.append(f"{key}: {e}")
    for name in names.get("sinks", ()):
        try:
            registry.get(Kind.SINK, name)
        except PluginError as e:
            faults.append(f"sinks: {e}")
    integrity = names.get("integrity", "auto")
    if integrity not in ("auto", "off", *checksum.NAMES):
        allowed = f"allowed is {listed(['auto', 'off', *checksum.NAMES])}"
        faults.append(
            f"integrity: {shown(integrity)} was given; {allowed}{did_you_mean(integrity, checksum.NAMES)}"
        )
    for name, given in options.items():
        faults += option_faults(registry, name, given)
    return tuple(faults)


def option_faults(registry: Registry, name: str, given: Mapping[str, Any]) -> list[str]:
    """What is wrong with ``[options.<name>]``, for everything that is called so."""
    specs = [spec for _, spec in registry if spec.name == name and not isinstance(spec, CommandSpec)]
    if not specs:
        known = {spec.name for _, spec in registry if not isinstance(spec, CommandSpec)}
        return [f"options.{name}: nothing of that name is installed{did_you_mean(name, known)}"]
    faults: list[str] = []
    for spec in specs:
        try:
            cls = spec.load_options()
            if cls is not None:
                check_options(cls, given, where=f"options.{name}")
            elif given:
                faults.append(f"options.{name}: the {spec.kind} {name!r} takes no options")
        except ConfigError as e:
            faults += e.faults
        except PluginError as e:
            faults.append(f"options.{name}: {e}")
    return faults
