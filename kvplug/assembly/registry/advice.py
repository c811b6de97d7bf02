"""What the message about an unknown name advises: a package to install, or an entry point to correct."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Final

from kvplug.assembly.registry.discovery import distributions, normalised
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.transport.hookspecs import PROJECT
from kvplug.transport.spec import Kind

_log = logging.getLogger(__name__)

PACKAGES: Final[Mapping[Kind, Mapping[str, str]]] = {
    Kind.CONNECTOR: {"lookup": "kvplug-lookup", "p2p": "kvplug-p2p", "simple": "kvplug-lookup"},
    Kind.PIPE: {name: f"kvplug-{name}" for name in ("cpu", "cuda-ipc", "nixl", "pynccl", "shm")},
    Kind.QUEUE: {"shm": "kvplug-shm"},
    Kind.LOOKUP_BUFFER: {"simple": "kvplug-lookup"},
    Kind.COMMUNICATOR: {name: f"kvplug-{name}" for name in ("cpu", "pynccl")},
    Kind.STORE: {name: f"kvplug-{name}" for name in ("fs", "host", "mooncake", "nixl", "redis")},
    Kind.DIRECTORY: {name: f"kvplug-{name}" for name in ("etcd", "redis")},
    Kind.COMMAND: {
        "bench": "kvplug-bench",
        "check": "kvplug-testing",
        "demo": "kvplug-transformers",
        "events": "kvplug-lookup",
    },
}
"""The packages of kvplug's own project that offer a name. Nothing is chosen by this table."""


def how_to_install(name: str, installed: Iterable[str], kind: Kind | None = None) -> tuple[str, ...]:
    """A line for each package that offers ``name`` (or ``distribution:name``) and is not installed.

    Args:
        installed: names of distributions, those with plugins that are broken or blocked included.
        kind: what is meant; default: any.
    """
    distribution, _, bare = name.rpartition(":")
    kinds = PACKAGES if kind is None else [kind]
    packages = dict.fromkeys(PACKAGES[each][bare] for each in kinds if bare in PACKAGES.get(each, {}))
    there = {normalised(each) for each in installed}
    return tuple(
        f"not installed: pip install {package}"
        for package in packages
        if package not in there and normalised(distribution) in ("", package)
    )


def misspelt_groups() -> tuple[str, ...]:
    """A line for each distribution with entry points in a group whose name is close to ours, and none in
    ours. Reads all metadata again."""
    found = set()
    for distribution in distributions():
        try:
            groups = {each.group for each in distribution.entry_points}
            if PROJECT not in groups:
                name = distribution.metadata["Name"] or "unknown"
                found |= {(name, group) for group in groups if _is_close(group)}
        except Exception as e:  # one distribution's broken metadata must not hide the others
            NamedExhaustion.check(e, "looking for plugins")
            _log.debug("unreadable metadata of a distribution, left out: %s", e)
    return tuple(
        f"{distribution} declares entry points in the group {group!r}; did you mean {PROJECT!r}?"
        for distribution, group in sorted(found)
    )


def _is_close(group: str) -> bool:
    """Whether a group may be ours, misspelt: "kv_plugs" may, "plugins" may not."""
    return bool(get_close_matches(PROJECT, [re.split(r"[.:/]", group)[0].lower()], cutoff=0.75))
