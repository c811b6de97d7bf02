"""The first-party packages that offer each name. Messages use this table; choices do not depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kvplug.transport.spec import Kind

PACKAGES: Final[Mapping[Kind, Mapping[str, str]]] = {
    Kind.CONNECTOR: {"lookup": "kvplug-lookup", "p2p": "kvplug-p2p", "simple": "kvplug-lookup"},
    Kind.PIPE: {name: f"kvplug-{name}" for name in ("cpu", "cuda-ipc", "nixl", "pynccl", "shm")},
    Kind.QUEUE: {"shm": "kvplug-shm"},
    Kind.LOOKUP_BUFFER: {"simple": "kvplug-lookup"},
    Kind.COMMUNICATOR: {name: f"kvplug-{name}" for name in ("cpu", "pynccl", "shm")},
    Kind.STORE: {name: f"kvplug-{name}" for name in ("fs", "host", "mooncake", "nixl", "redis")},
    Kind.DIRECTORY: {name: f"kvplug-{name}" for name in ("etcd", "redis")},
    Kind.COMMAND: {
        "bench": "kvplug-bench",
        "check": "kvplug-testing",
        "demo": "kvplug-transformers",
        "events": "kvplug-lookup",
    },
}
