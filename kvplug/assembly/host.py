"""This process's host: limits, memory, namespaces, interfaces, versions."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import attrs

import kvplug
from kvplug.config.config import Config
from kvplug.net.memory.room import memory_limit
from kvplug.net.trust.identity import boot_id, namespace

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - only inspected
_NAMESPACES: Final = ("pid", "net", "ipc", "mnt", "user")
_LIBRARIES: Final = ("torch", "vllm", "sglang", "lmcache", "nixl", "nixl-cu12", "numpy", "pyzmq")
"""Libraries whose installed versions are reported, in addition to those of kvplug's plugins."""
_GET_ADDRESS: Final = 0x8915
_REQUEST: Final = struct.Struct("=16s24x")


@attrs.frozen(kw_only=True)
class HostFacts:
    """Facts about one process and its host. ``None`` or empty means no limit, or unknown."""

    host: str = ""
    boot_id: str = ""
    namespaces: Mapping[str, str] = attrs.field(factory=dict)
    interfaces: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    """The addresses of each interface."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    memory_bytes: int | None = None
    """The most memory that the process can have."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_id: str = ""
    """Equal for processes of one host that share ``/dev/shm``."""
    descriptors: int | None = None
    descriptors_used: int | None = None
    locked_bytes: int | None = None
    file_bytes: int | None = None
    rdma: str = ""
    """RDMA devices, separated by commas."""
    secret: str = ""
    """The source of the secret, never the secret itself; empty if no secret is set."""
    time_ms: int | None = None
    """Milliseconds since 1970, by this host's clock."""


def facts_of(config: Config) -> HostFacts:
    """Return the facts of this process."""
    shm: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        room, status = os.statvfs(SHARED_MEMORY), os.stat(SHARED_MEMORY)
        shm["shm_bytes"] = room.f_blocks * room.f_frsize
        shm["shm_free_bytes"] = room.f_bavail * room.f_frsize
        shm["shm_id"] = f"{status.st_dev}:{status.st_ino}"
    return HostFacts(
        host=socket.gethostname(),
        boot_id=boot_id(),
        namespaces={kind: namespace(kind) for kind in _NAMESPACES},
        interfaces={name: tuple(addresses) for name, addresses in interfaces().items()},
        versions=_versions(),
        memory_bytes=memory_limit(),
        descriptors=_soft_limit("NOFILE"),
        descriptors_used=len(_listed("/proc/self/fd")) or None,
        locked_bytes=_soft_limit("MEMLOCK"),
        file_bytes=_soft_limit("FSIZE"),
        rdma=", ".join(_listed("/sys/class/infiniband")),
        secret=secret_source(config),
        time_ms=int(time.time() * 1000),
        **shm,
    )


def secret_source(config: Config) -> str:
    """Return the source of the secret; empty if no secret is set."""
    if config.secret_file:
        return "secret_file"
    return "KVPLUG_SECRET" if os.environ.get("KVPLUG_SECRET", "").strip() else ""


def interfaces() -> dict[str, list[str]]:
    """Return the interfaces of this process's network namespace, with their addresses."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            found[name] = []
            with contextlib.suppress(OSError):  # the interface has no IPv4 address
                answer = fcntl.ioctl(sock, _GET_ADDRESS, _REQUEST.pack(name.encode()))
                found[name].append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            packed = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
            scope = f"%{name}" if packed.startswith("fe80:") else ""
            found.setdefault(name, []).append(packed + scope)
    return found


def _soft_limit(name: str) -> int | None:
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return None if soft == resource.RLIM_INFINITY else soft


def _listed(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _versions() -> dict[str, str]:
    """Return the versions of Python, kvplug, its plugins and _LIBRARIES, without importing any of them."""
    found = {"python": platform.python_version()}
    for entry in importlib.metadata.entry_points(group="kvplug"):
        if entry.dist is not None:
            found[entry.dist.name] = entry.dist.version
    found["kvplug"] = kvplug.__version__
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
