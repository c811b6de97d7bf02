"""Facts of this process's host: limits, memory, namespaces, interfaces, versions. Read only."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import re
import resource
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import attrs

import kvplug
from kvplug.config import Config
from kvplug.net.memory.room import memory_limit
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.identity import boot_id, namespace

SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - it is looked at
_NAMESPACES: Final = ("pid", "net", "ipc", "mnt", "user")
_LIBRARIES: Final = ("torch", "vllm", "sglang", "lmcache", "nixl", "nixl-cu12", "numpy", "pyzmq")
"""Their versions are told where they are installed, besides kvplug's plugins."""
_GET_ADDRESS: Final = 0x8915
_REQUEST: Final = struct.Struct("=16s24x")
_SECRET: Final = re.compile(
    r"(secret|passw(or)?d|pwd|passphrase|credential|auth|token|key)s?$", re.IGNORECASE
)
"""Ends of names of options, of which a plugin may have any."""
_TOLD: Final = re.compile(r"[\w .%+-]{0,40}")
"""Values of options that are told: numbers, sizes and words. A path, an address or a URL is none of these."""
_MAX_TEXTS: Final = 256
"""Entries of a mapping that is taken from a peer."""


def texts(given: Any) -> dict[str, str]:
    """A mapping of short texts, from whatever a peer has sent."""
    items = list(given.items())[:_MAX_TEXTS] if isinstance(given, Mapping) else []
    return {peer_text(key, 80): peer_text(value, 200) for key, value in items}


def _number(given: Any) -> int | None:
    return given if type(given) is int and given >= 0 else None


def _text(given: Any) -> str:
    return peer_text(given, 200)


def _truth(given: Any) -> bool:
    return given is True


@attrs.frozen(kw_only=True)
class HostFacts:
    """Facts of one process and its host. A number that is ``None`` has no limit, or is not known there."""

    host: str = attrs.field(default="", converter=_text)
    system: str = attrs.field(default="", converter=_text)
    boot_id: str = attrs.field(default="", converter=_text)
    namespaces: Mapping[str, str] = attrs.field(factory=dict, converter=texts)
    interfaces: Mapping[str, str] = attrs.field(factory=dict, converter=texts)
    """Addresses of each, with commas between them."""
    versions: Mapping[str, str] = attrs.field(factory=dict, converter=texts)
    cpus: int | None = attrs.field(default=None, converter=_number)
    """That the process may use."""
    memory_bytes: int | None = attrs.field(default=None, converter=_number)
    """The most that the process can have."""
    shm_bytes: int | None = attrs.field(default=None, converter=_number)
    shm_free_bytes: int | None = attrs.field(default=None, converter=_number)
    shm_id: str = attrs.field(default="", converter=_text)
    """Equal for processes of one host that share ``/dev/shm``."""
    descriptors: int | None = attrs.field(default=None, converter=_number)
    descriptors_used: int | None = attrs.field(default=None, converter=_number)
    locked_bytes: int | None = attrs.field(default=None, converter=_number)
    file_bytes: int | None = attrs.field(default=None, converter=_number)
    processes: int | None = attrs.field(default=None, converter=_number)
    """Processes and threads of this user."""
    huge_pages: int | None = attrs.field(default=None, converter=_number)
    huge_pages_free: int | None = attrs.field(default=None, converter=_number)
    rdma: str = attrs.field(default="", converter=_text)
    """RDMA devices, with commas between them."""
    secret: str = attrs.field(default="", converter=_text)
    """Where the secret comes from; empty: there is none. Never the secret."""
    tls: bool = attrs.field(default=False, converter=_truth)
    time_ms: int | None = attrs.field(default=None, converter=_number)
    """Milliseconds since 1970, by this host's clock."""

    def to_plain(self) -> dict[str, Any]:
        """Plain values, for the wire and for JSON."""
        return attrs.asdict(self)

    @classmethod
    def from_plain(cls, plain: object) -> HostFacts:
        """What a peer has told, made fit for a terminal; facts that are none of these are left out."""
        known = {field.name for field in attrs.fields(cls)}
        given = plain if isinstance(plain, Mapping) else {}
        return cls(**{key: value for key, value in given.items() if key in known})


def facts_of(config: Config) -> HostFacts:
    """The facts of this process."""
    shm = _shared_memory()
    return HostFacts(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        boot_id=boot_id(),
        namespaces={kind: namespace(kind) for kind in _NAMESPACES},
        interfaces={name: ", ".join(addresses) for name, addresses in interfaces().items()},
        versions=_versions(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_bytes=memory_limit(),
        shm_bytes=shm[0],
        shm_free_bytes=shm[1],
        shm_id=shm[2],
        descriptors=_soft_limit("NOFILE"),
        descriptors_used=_used_descriptors(),
        locked_bytes=_soft_limit("MEMLOCK"),
        file_bytes=_soft_limit("FSIZE"),
        processes=_soft_limit("NPROC"),
        huge_pages=_of_meminfo("HugePages_Total"),
        huge_pages_free=_of_meminfo("HugePages_Free"),
        rdma=", ".join(_rdma_devices()),
        secret=secret_source(config),
        tls=config.tls_cert is not None,
        time_ms=int(time.time() * 1000),
    )


def connector_options(config: Config) -> dict[str, str]:
    """What the config gives its connector, as text. Of what may be a secret or a place, only its presence."""
    given = config.options.get(config.connector.rpartition(":")[2], {})
    return texts({key: _told(key, str(value)) for key, value in given.items()})


def _told(key: str, text: str) -> str:
    is_count = key.endswith("_tokens") and text.isdecimal()
    return text if is_count or (_TOLD.fullmatch(text) and not _SECRET.search(key)) else "(given)"


def secret_source(config: Config) -> str:
    """Where the secret comes from; empty: there is none."""
    if config.secret_file:
        return "secret_file"
    return "KVPLUG_SECRET" if os.environ.get("KVPLUG_SECRET", "").strip() else ""


def _soft_limit(name: str) -> int | None:
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return None if soft == resource.RLIM_INFINITY else soft


def _used_descriptors() -> int | None:
    try:
        return len(os.listdir("/proc/self/fd")) - 1
    except OSError:
        return None


def _shared_memory() -> tuple[int | None, int | None, str]:
    try:
        room, status = os.statvfs(SHARED_MEMORY), os.stat(SHARED_MEMORY)
    except OSError:
        return None, None, ""
    return room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize, f"{status.st_dev}:{status.st_ino}"


def _of_meminfo(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return None


def _rdma_devices() -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir("/sys/class/infiniband"))
    return []


def _versions() -> dict[str, str]:
    """Of Python, kvplug, its plugins and the libraries that matter; nothing is imported for it."""
    found = {"python": platform.python_version()}
    for entry in importlib.metadata.entry_points(group="kvplug"):
        if entry.dist is not None:
            found[entry.dist.name] = entry.dist.version
    found["kvplug"] = kvplug.__version__
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def interfaces() -> dict[str, list[str]]:
    """The network interfaces of this process's network namespace, with their addresses."""
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        found = {name: list(_ipv4_of(name)) for _, name in socket.if_nameindex()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            number, *_, name = line.split()
            packed = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number))
            scope = f"%{name}" if packed.startswith("fe80:") else ""
            found.setdefault(name, []).append(packed + scope)
    return found


def _ipv4_of(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        answer = fcntl.ioctl(sock, _GET_ADDRESS, _REQUEST.pack(name.encode()))
        yield socket.inet_ntoa(answer[20:24])
