"""The packages that offer a name, for the message about a name of one that is not installed.

Only those of kvplug's own project are known. Nothing is chosen by this table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from kvplug.assembly.registry.discovery import normalised
from kvplug.transport.spec import Kind

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
