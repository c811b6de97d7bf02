"""The memory that a config lets this process use, and whether that much is available."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvplug.assembly.registry import Registry
from kvplug.assembly.registry.check import CHOSEN, options_of
from kvplug.config.config import Config, Role
from kvplug.config.options import MEMORY, option_fields
from kvplug.config.units import bytes_in_words
from kvplug.errors import ConfigError, PluginError
from kvplug.net.memory.room import free_memory, machine_memory
from kvplug.transport.spec import Kind

_MIB = 1 << 20


def budgets_of(config: Config, registry: Registry, keys: frozenset[str]) -> dict[str, int]:
    """Return the budgets of host memory in bytes, by the config key that sets each.

    ``keys``: the keys that the caller uses. Options with faults are skipped.
    """
    found: dict[str, int] = {}
    connector = registry.find(Kind.CONNECTOR, config.connector) if "connector" in keys else None
    if connector is not None and not connector.moves_pages:
        keys -= {"stores"}
    for spec in _used(config, registry, keys):
        with contextlib.suppress(PluginError, ConfigError):  # these faults are reported elsewhere
            options = options_of(registry, spec, config.options)
            for name, field in () if options is None else option_fields(type(options)).items():
                if field.metadata.get(MEMORY):
                    value = getattr(options, field.name)
                    key = "buffer_size" if value is None else f"options.{spec.name}.{name}"
                    found[key] = config.buffer_size if value is None else value
    holds_entries = "lookup_buffer" in keys
    if "connector" in keys:
        holds_entries = connector is not None and connector.uses_lookup_buffer
        holds_entries = holds_entries and config.role is not Role.CONSUMER
    if holds_entries:
        found["buffer_size"] = config.buffer_size
    if "stores" in keys and not config.device.startswith("cpu"):
        found["staging_size"] = config.staging_size
    return found


def _used(config: Config, registry: Registry, keys: frozenset[str]) -> Iterator[Any]:
    """Yield the specs that the config names or has options for."""
    for key, kind in CHOSEN.items():
        name = getattr(config, key)
        if key in keys and name == "auto":
            yield from (spec for _, spec in registry if spec.kind is kind and spec.name in config.options)
        elif key in keys and (spec := registry.find(kind, name)) is not None:
            yield spec
    for name in config.stores if "stores" in keys else ():
        spec = registry.find(Kind.STORE, name)
        # A consumer puts nothing into a store of its own process.
        if spec is not None and (config.role is not Role.CONSUMER or spec.client is None):
            yield spec


@attrs.frozen
class Shortage:
    """Budgets that do not fit into the memory."""

    key: str
    """The key of the largest budget."""
    text: str
    """How much is requested, how much is available, and how much would fit."""
    is_final: bool
    """Whether the budgets exceed all memory that this process can ever have."""


def shortage_of(budgets: Mapping[str, int]) -> Shortage | None:
    """Explain why these budgets exceed the memory of the machine or of this process's control groups.

    Return ``None`` if they fit.
    """
    wanted, limit = sum(budgets.values()), machine_memory()
    room = limit if wanted > limit else free_memory()
    if wanted <= room:
        return None
    key = max(budgets, key=lambda each: budgets[each])
    others = [f"{bytes_in_words(nbytes)} for {each}" for each, nbytes in budgets.items() if each != key]
    beside = f", with {' and '.join(others)}," if others else ""
    there = "this process can have" if room == limit else "are free now"
    fits = (room - wanted + budgets[key]) // _MIB
    advice = f"set it to at most {fits} MiB" if fits > 0 else f"set {' and '.join(budgets)} to less"
    text = (
        f"{bytes_in_words(budgets[key])}{beside} is more than the {bytes_in_words(room)} of memory that"
        f" {there}, and the kernel kills a process that takes more; {advice}, or give the process more memory"
    )
    return Shortage(key, text, wanted > limit)
