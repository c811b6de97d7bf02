"""This process's host: limits, memory, namespaces, interfaces, versions, and what is wrong with them."""

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
from kvplug.assembly.examination.finding import Finding, line_for_resource, note, ok, problem
from kvplug.config.config import Config
from kvplug.config.units import bytes_in_words
from kvplug.net.memory.room import memory_limit
from kvplug.net.peer_text import peer_text
from kvplug.net.trust.identity import boot_id, namespace

MIB: Final = 1 << 20
SHARED_MEMORY: Final = "/dev/shm"  # noqa: S108 - it is looked at
_NAMESPACES: Final = ("pid", "net", "ipc", "mnt", "user")
_LIBRARIES: Final = ("torch", "vllm", "sglang", "lmcache", "nixl", "nixl-cu12", "numpy", "pyzmq")
"""Their versions are reported where they are installed, besides those of kvplug's plugins."""
_GET_ADDRESS: Final = 0x8915
_REQUEST: Final = struct.Struct("=16s24x")
_SECRET: Final = re.compile(
    r"(secret|passw(or)?d|pwd|passphrase|credential|auth|token|key)s?$", re.IGNORECASE
)
"""Ends of the names of options whose values may be secret."""
_HARMLESS: Final = re.compile(r"[\w .%+-]{0,40}")
"""Values of options that are sent: numbers, sizes and words. A path, an address or a URL does not match."""
_MAX_TEXTS: Final = 256
"""Entries of a mapping that is taken from a peer."""
_SHM_NEEDED: Final = 16 * MIB
_SHM_USUAL: Final = 1024 * MIB
_DESCRIPTORS_NEEDED: Final = 64
_DESCRIPTORS_USUAL: Final = 1024
_LOCKED_USUAL: Final = 64 * MIB
_CLOCK_S: Final = 5.0


@attrs.frozen(kw_only=True)
class HostFacts:
    """Facts of one process and its host. ``None`` and empty: no limit, or unknown."""

    host: str = ""
    system: str = ""
    boot_id: str = ""
    namespaces: Mapping[str, str] = attrs.field(factory=dict)
    interfaces: Mapping[str, str] = attrs.field(factory=dict)
    """Addresses of each, with commas between them."""
    versions: Mapping[str, str] = attrs.field(factory=dict)
    cpus: int | None = None
    """The CPUs that the process may use."""
    memory_bytes: int | None = None
    """The most that the process can have."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_id: str = ""
    """Equal for processes of one host that share ``/dev/shm``."""
    descriptors: int | None = None
    descriptors_used: int | None = None
    locked_bytes: int | None = None
    file_bytes: int | None = None
    processes: int | None = None
    """Processes and threads of this user."""
    huge_pages: int | None = None
    huge_pages_free: int | None = None
    rdma: str = ""
    """RDMA devices, with commas between them."""
    secret: str = ""
    """Where the secret comes from; empty: there is none. Never the secret."""
    tls: bool = False
    time_ms: int | None = None
    """Milliseconds since 1970, by this host's clock."""

    @classmethod
    def from_plain(cls, plain: object) -> HostFacts:
        """The facts in a peer's report, as text that a terminal can show; malformed ones are left out."""
        given = plain if isinstance(plain, Mapping) else {}
        fields = (field for field in attrs.fields(cls) if field.name in given)
        return cls(**{field.name: _cleaned(field.default, given[field.name]) for field in fields})


def _cleaned(default: Any, given: Any) -> Any:
    """A value of a peer's, as the kind of value that the field's default is."""
    if default is None:
        return given if type(given) is int and given >= 0 else None
    if isinstance(default, bool):
        return given is True
    return peer_text(given, 200) if isinstance(default, str) else texts(given)


def texts(given: Any) -> dict[str, str]:
    """A mapping of short texts, from whatever a peer has sent."""
    items = list(given.items())[:_MAX_TEXTS] if isinstance(given, Mapping) else []
    return {peer_text(key, 80): peer_text(value, 200) for key, value in items}


def facts_of(config: Config) -> HostFacts:
    """The facts of this process."""
    shm: dict[str, Any] = {}
    with contextlib.suppress(OSError):
        room, status = os.statvfs(SHARED_MEMORY), os.stat(SHARED_MEMORY)
        shm["shm_bytes"] = room.f_blocks * room.f_frsize
        shm["shm_free_bytes"] = room.f_bavail * room.f_frsize
        shm["shm_id"] = f"{status.st_dev}:{status.st_ino}"
    return HostFacts(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        boot_id=boot_id(),
        namespaces={kind: namespace(kind) for kind in _NAMESPACES},
        interfaces={name: ", ".join(addresses) for name, addresses in _interfaces().items()},
        versions=_versions(),
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        memory_bytes=memory_limit(),
        descriptors=_soft_limit("NOFILE"),
        descriptors_used=len(_listed("/proc/self/fd")) or None,
        locked_bytes=_soft_limit("MEMLOCK"),
        file_bytes=_soft_limit("FSIZE"),
        processes=_soft_limit("NPROC"),
        huge_pages=_of_meminfo("HugePages_Total"),
        huge_pages_free=_of_meminfo("HugePages_Free"),
        rdma=", ".join(_listed("/sys/class/infiniband")),
        secret=secret_source(config),
        tls=config.tls_cert is not None,
        time_ms=int(time.time() * 1000),
        **shm,
    )


def connector_options(config: Config) -> dict[str, str]:
    """What the config gives its connector, as text. A value that may be a secret or a place is "(given)"."""
    given = config.options.get(config.connector.rpartition(":")[2], {})

    def shown(key: str, text: str) -> str:
        is_count = key.endswith("_tokens") and text.isdecimal()
        return text if is_count or (_HARMLESS.fullmatch(text) and not _SECRET.search(key)) else "(given)"

    return texts({key: shown(key, str(value)) for key, value in given.items()})


def secret_source(config: Config) -> str:
    """Where the secret comes from; empty: there is none."""
    if config.secret_file:
        return "secret_file"
    return "KVPLUG_SECRET" if os.environ.get("KVPLUG_SECRET", "").strip() else ""


def _soft_limit(name: str) -> int | None:
    soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
    return None if soft == resource.RLIM_INFINITY else soft


def _listed(folder: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(os.listdir(folder))
    return []


def _of_meminfo(name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
    return None


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


def _interfaces() -> dict[str, list[str]]:
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


# -- what is wrong with one host -----------------------------------------------------------------------


def of_host(facts: HostFacts, config: Config) -> Iterator[Finding]:
    """What a process with these limits can do, one finding for each of them."""
    yield _descriptors(facts)
    yield _shm(facts)
    yield _locked(facts)
    if facts.file_bytes is not None and facts.file_bytes < config.buffer_size:
        limit = bytes_in_words(facts.file_bytes)
        yield problem(
            "files",
            f"no file, and no segment of shared memory, can be larger than {limit}",
            "it is the limit RLIMIT_FSIZE of this process, and cuts off segments and pages",
            change="ulimit -f unlimited",
        )


def _descriptors(facts: HostFacts) -> Finding:
    limit, used = facts.descriptors, facts.descriptors_used or 0
    what = f"{'unlimited' if limit is None else limit} may be open, {used} are"
    if limit is None or limit >= max(_DESCRIPTORS_USUAL, used + _DESCRIPTORS_NEEDED):
        return ok("descriptors", what)
    why = "each peer takes up to ten, each pipe up to six, and an engine itself some hundreds"
    make = problem if limit - used < _DESCRIPTORS_NEEDED else note
    return make("descriptors", what, why, change=line_for_resource("descriptors"))


def _shm(facts: HostFacts) -> Finding:
    total, free = facts.shm_bytes, facts.shm_free_bytes
    change = "docker run --shm-size=8g    (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    if total is None or free is None:
        why = "engines, NCCL and UCX use it; kvplug's own shared memory does not"
        return note(SHARED_MEMORY, "it does not exist here", why, change=change)
    what = f"{bytes_in_words(free)} of {bytes_in_words(total)} are free"
    if free < _SHM_NEEDED:
        why = "NCCL, UCX and the workers of an engine fail, or take a slower way, without room in it"
        return problem(SHARED_MEMORY, what, why, change=change)
    if total < _SHM_USUAL:
        why = "it is small, as containers have it by default; NCCL and UCX take a slower way when it is full"
        return note(SHARED_MEMORY, what, why, change=change)
    return ok(SHARED_MEMORY, what)


def _locked(facts: HostFacts) -> Finding:
    pages = facts.huge_pages
    huge = "" if pages is None else f"; {pages} huge pages, {facts.huge_pages_free} free"
    what = f"{bytes_in_words(facts.locked_bytes)} may be locked{huge}"
    if facts.rdma and facts.locked_bytes is not None and facts.locked_bytes < _LOCKED_USUAL:
        why = f"the RDMA devices of this host ({facts.rdma}) read only memory that is locked"
        change = "ulimit -l unlimited    (docker run --ulimit memlock=-1)"
        return note("locked memory", what, why, change=change)
    return ok("locked memory", what)


# -- what differs between two hosts --------------------------------------------------------------------

_APART: Final = {
    "pid": (
        "neither end can see that the other one died: it counts as dead after heartbeat_timeout_s only",
        "docker run --pid=container:NAME    (Kubernetes: shareProcessNamespace: true)",
    ),
    "net": (
        "abstract Unix sockets and loopback addresses reach only processes of one network namespace",
        "docker run --network=host    (or host = unix:/path in a shared folder; or an address and a secret)",
    ),
    "ipc": (
        "device memory cannot be shared between them (CUDA IPC), and NCCL and UCX take a slower way",
        "docker run --ipc=host    (or --ipc=container:NAME at both)",
    ),
}


def of_two_hosts(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    """What differs between the two hosts, or keeps two processes of one host apart."""
    if ours.boot_id and ours.boot_id == theirs.boot_id:
        apart = list(_apart(ours, theirs))
        yield from apart or [ok("hosts", "both ends are on this host and share its namespaces")]
    else:
        yield ok("hosts", f"the peer is on another host: {theirs.host or 'unknown'}")
        if ours.time_ms and theirs.time_ms and abs(ours.time_ms - theirs.time_ms) > 1000 * _CLOCK_S:
            yield problem(
                "clocks",
                f"the two hosts' clocks are {abs(ours.time_ms - theirs.time_ms) / 1000:.0f} s apart",
                "tickets in requests expire by them, and certificates are checked by them",
                change="chronyc makestep    (or the host's other service of time)",
            )
    mine, yours = ours.versions, theirs.versions
    differing = sorted(
        name for name in mine.keys() & yours.keys() if name.startswith("kvplug") and mine[name] != yours[name]
    )
    if differing:
        yield note(
            "versions",
            "; ".join(f"{name}: {mine[name]} here, {yours[name]} at the peer" for name in differing),
            "different versions work together where their handshake agrees",
            change=f"pip install --upgrade {' '.join(differing)}    (at the end with the lower version)",
        )
    else:
        yield ok("versions", f"kvplug {mine.get('kvplug')} at both ends")


def _apart(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    for kind, (why, change) in _APART.items():
        mine, yours = ours.namespaces.get(kind), theirs.namespaces.get(kind)
        if mine and yours and mine != yours:
            what = f"the two ends are on one host, in different {kind} namespaces"
            yield note(f"{kind} namespace", what, why, change=change)
    if ours.shm_id and theirs.shm_id and ours.shm_id != theirs.shm_id:
        yield note(
            SHARED_MEMORY,
            "the two ends are on one host, and each has a /dev/shm of its own",
            "NCCL and UCX take a slower way between them; kvplug's own shared memory is not in it",
            change="docker run --ipc=host    (or one volume at /dev/shm of both)",
        )
