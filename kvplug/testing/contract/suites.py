"""The suites by kind, and classes made for what the command line names."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from kvplug.errors import UnknownTransportError
from kvplug.registry import Registry
from kvplug.spec import TRANSPORTS, Kind
from kvplug.testing import peers
from kvplug.testing.contract.base import Contract
from kvplug.testing.contract.plugin import PluginContract

_SUITES = {
    Kind.PIPE: "kvplug.testing.contract.pipe:PipeContract",
    Kind.QUEUE: "kvplug.testing.contract.queue:MessageQueueContract",
    Kind.LOOKUP_BUFFER: "kvplug.testing.contract.lookup:LookupBufferContract",
    Kind.COMMUNICATOR: "kvplug.testing.contract.communicator:DeviceCommunicatorContract",
    Kind.CONNECTOR: "kvplug.testing.contract.connector:ConnectorContract",
}

chosen: list[type[Contract]] = []
"""What the command line names, for the module ``judged``, which pytest collects."""


def suite_of(kind: Kind) -> type[Contract]:
    """The suite of a kind."""
    module, _, name = _SUITES[kind].partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def every() -> tuple[type[Contract], ...]:
    return (*(suite_of(kind) for kind in _SUITES), PluginContract)


def installed(transports: Iterable[str], connectors: Iterable[str]) -> list[type[Contract]]:
    """A suite for each name, as an author would have written it, and one for each plugin that offers them.

    Raises:
        UnknownTransportError, UnknownConnectorError, AmbiguousNameError: nothing, or more than one thing, has
            the name.
    """
    registry = Registry.from_env()
    named = [(kind, name) for each in transports for kind, name in _kinds(registry, each)]
    for name in connectors:
        registry.get(Kind.CONNECTOR, name)
        named.append((Kind.CONNECTOR, name))
    plugins = [plugin.name for kind, name in named for plugin in registry.owners(kind, name)]
    return [
        *(_made(kind, name, _reaches_other_processes(registry, kind, name)) for kind, name in named),
        *(_made_of_plugin(name) for name in dict.fromkeys(plugins)),
    ]


def made_names() -> set[str]:
    """Of the classes that :func:`installed` makes of whatever is installed."""
    registry = Registry.from_env()
    offered = {_called(spec.name, suite_of(spec.kind)) for _, spec in registry if spec.kind in _SUITES}
    return offered | {_called(plugin.name, PluginContract) for plugin in registry.plugins}


def _kinds(registry: Registry, given: str) -> list[tuple[Kind, str]]:
    """The kinds that have a transport of this name. ``KIND:NAME`` asks for one of them."""
    word, _, name = given.partition(":")
    if name and word in {kind.value for kind in TRANSPORTS}:
        registry.get(Kind(word), name)
        return [(Kind(word), name)]
    kinds = [kind for kind in TRANSPORTS if registry.owners(kind, given)]
    if not kinds:
        try:
            registry.get(Kind.PIPE, given)
        except UnknownTransportError as e:
            others = {spec.name for kind in TRANSPORTS for spec in registry.transports(kind)}
            raise UnknownTransportError(f"{e}; of any kind there are: {', '.join(sorted(others))}") from e
    for kind in kinds:
        registry.get(kind, given)
    return [(kind, given) for kind in kinds]


def _made(kind: Kind, name: str, across_processes: bool) -> type[Contract]:
    suite = suite_of(kind)
    said = {"transport": name, "made_from": _SUITES[kind], "across_processes": across_processes}
    return type(_called(name, suite), (suite,), said)


def _reaches_other_processes(registry: Registry, kind: Kind, name: str) -> bool:
    """Whether a transport's probe names the same domain in another process of this host as here."""
    if kind not in TRANSPORTS:
        return True
    spec: Any = registry.get(kind, name)
    here = spec.run_probe().domain
    if not here or spec.capabilities.cross_host:
        return True
    with peers.start(f"{__name__}:domain_of", kind.value, name) as child:
        return bool(child.result() == here)


def domain_of(parent: peers.Parent, kind: str, name: str) -> str:
    """In another process."""
    spec: Any = Registry.from_env().get(Kind(kind), name)
    return spec.run_probe().domain  # type: ignore[no-any-return]


def _made_of_plugin(name: str) -> type[Contract]:
    return type(_called(name, PluginContract), (PluginContract,), {"plugin": name})


def _called(name: str, suite: type[Contract]) -> str:
    """A name that pytest collects."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    return "Test" + "".join(word.capitalize() for word in words) + suite.__name__


def versions() -> dict[str, str]:
    """Of what takes part in every run; what is judged says its own."""
    found = {"python": sys.version.split()[0]}
    for name in ("kvplug", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
