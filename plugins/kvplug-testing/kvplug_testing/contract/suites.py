"""The suites by kind, and the classes generated for subjects on the command line."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from kvplug import ConfigError, Registry
from kvplug.kit import TRANSPORTS, Kind, UnknownTransportError, did_you_mean, discover, option_fields
from kvplug_testing.contract.base import Contract
from kvplug_testing.contract.plugin import PluginContract
from kvplug_testing.sources import at_source

_SUITES = {
    Kind.PIPE: "kvplug_testing.contract.pipe:PipeContract",
    Kind.QUEUE: "kvplug_testing.contract.queue:MessageQueueContract",
    Kind.LOOKUP_BUFFER: "kvplug_testing.contract.lookup:LookupBufferContract",
    Kind.COMMUNICATOR: "kvplug_testing.contract.communicator:DeviceCommunicatorContract",
    Kind.STORE: "kvplug_testing.contract.store:StoreContract",
    Kind.DIRECTORY: "kvplug_testing.contract.directory:DirectoryContract",
    Kind.CONNECTOR: "kvplug_testing.contract.connector:ConnectorContract",
    Kind.SINK: "kvplug_testing.contract.sink:SinkContract",
}

chosen: list[type[Contract]] = []
"""The suites of the subjects on the command line. pytest collects them in :data:`COLLECTED`."""
COLLECTED: Final = Path(__file__).with_name("collected_suites.py")


def suite_of(kind: Kind) -> type[Contract]:
    """The suite of a kind."""
    return at_source(_SUITES[kind])  # type: ignore[no-any-return]


def installed(
    transports: Iterable[str],
    connectors: Iterable[str],
    options: Iterable[str] = (),
    *,
    stores: Iterable[str] = (),
) -> list[type[Contract]]:
    """A suite for each name, as an author would have written it, and one for each plugin that offers them.

    ``options`` are ``"NAME.KEY=VALUE"``; NAME is the name of a subject, or ``KIND:NAME``.

    Raises:
        UnknownTransportError, UnknownConnectorError, AmbiguousNameError: none, or more than one, has the
        name. ConfigError: the options are wrong (lists every fault), or one names no subject.
    """
    registry = Registry.from_env()
    given = _by_name(options)
    named = [
        *(each for name in transports for each in _kinds(registry, name)),
        *((Kind.STORE, name) for name in stores),
        *((Kind.CONNECTOR, name) for name in connectors),
    ]
    if strange := {*given} - {each for kind, name in named for each in (name, f"{kind.value}:{name}")}:
        raise ConfigError(f"options of {', '.join(sorted(strange))} were given, and no such thing is judged")
    plugins = {plugin.name: None for kind, name in named for plugin in registry.owners(kind, name)}
    return [
        *(
            _made(registry, kind, name, given.get(name, {}) | given.get(f"{kind.value}:{name}", {}))
            for kind, name in named
        ),
        *(type(_called(name, PluginContract), (PluginContract,), {"plugin": name}) for name in plugins),
    ]


def _by_name(options: Iterable[str]) -> dict[str, dict[str, str]]:
    """The options by name. As in the environment, an empty value counts as not given.

    Raises:
        ConfigError: an option has another form.
    """
    found: dict[str, dict[str, str]] = {}
    for each in options:
        path, _, value = each.partition("=")
        name, _, key = path.strip().rpartition(".")
        if not (name and key and "=" in each):
            raise ConfigError(f"{each!r} was given; allowed is NAME.KEY=VALUE", source="--kvplug-option")
        if value.strip():
            found.setdefault(name, {})[key] = value
    return found


def _kinds(registry: Registry, given: str) -> list[tuple[Kind, str]]:
    """The kinds that have a transport of this name. ``KIND:NAME`` asks for one of them."""
    word, _, name = given.partition(":")
    word = word.replace(" ", "_")  # the form in which ``kvplug list`` prints a kind
    if name and word in {kind.value for kind in TRANSPORTS}:
        return [(Kind(word), name)]
    kinds = [kind for kind in TRANSPORTS if registry.owners(kind, given)]
    if not kinds:
        names = {spec.name for kind in TRANSPORTS for spec in registry.specs(kind)}
        hint = did_you_mean(given, names) or f"; there are: {', '.join(sorted(names))}"
        raise UnknownTransportError(f"no transport {given!r} is installed{hint}")
    return [(kind, given) for kind in kinds]


def _made(registry: Registry, kind: Kind, name: str, options: Mapping[str, str]) -> type[Contract]:
    """The suite for the subject with this name.

    Raises:
        ConfigError: the options are wrong; lists every fault.
    """
    spec: Any = registry.get(kind, name)
    suite = suite_of(kind)
    attributes: dict[str, Any] = {"transport": name, "options": options, "made_from": _SUITES[kind]}
    if suite.across_processes:
        attributes["across_processes"] = kind not in TRANSPORTS or not spec.for_tests
    made = type(_called(name, suite), (suite,), attributes)
    if options:
        cls, place = spec.load_options(), getattr(suite, "place_option", "")  # which each test sets
        is_known = cls is not None and place not in options and place in option_fields(cls)
        made().made_options(**{place: "kvplug"} if is_known else {})
    return made


def _called(name: str, suite: type[Contract]) -> str:
    """A class name that pytest collects."""
    return "Test" + re.sub(r"[^A-Za-z0-9]", "", name.title()) + suite.__name__


def versions() -> dict[str, str]:
    """Versions of Python, torch, and the distributions of the installed plugins."""
    found = {"python": sys.version.split()[0]} | {each.distribution: each.version for each in discover()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        found["torch"] = metadata.version("torch")
    return found
