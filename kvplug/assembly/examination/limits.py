"""What is wrong with a host, or with two of them, from their facts alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

import attrs

from kvplug.assembly.examination.finding import Finding
from kvplug.assembly.examination.host import SHARED_MEMORY, HostFacts
from kvplug.config import Config
from kvplug.config.units import bytes_in_words

MIB: Final = 1 << 20
_SHM_NEEDED: Final = 16 * MIB
_SHM_USUAL: Final = 1024 * MIB
_DESCRIPTORS_NEEDED: Final = 64
_DESCRIPTORS_USUAL: Final = 1024
_LOCKED_USUAL: Final = 64 * MIB
_CLOCK_S: Final = 5.0

Where = Literal["here", "peer"]


def findings_of_host(facts: HostFacts, config: Config, at: Where = "here") -> Iterator[Finding]:
    """What a process with these limits can do, one finding for each of them."""
    for each in (_descriptors(facts), _shm(facts), _locked(facts)):
        yield attrs.evolve(each, at=at)
    if facts.file_bytes is not None and facts.file_bytes < config.buffer_size:
        yield Finding(
            topic="files",
            verdict="problem",
            what=f"no file, and no shared memory, may be larger than {bytes_in_words(facts.file_bytes)}",
            why=("it is the limit RLIMIT_FSIZE of this process; segments and pages are cut off by it",),
            change="ulimit -f unlimited",
            at=at,
        )


def _descriptors(facts: HostFacts) -> Finding:
    limit, used = facts.descriptors, facts.descriptors_used or 0
    what = f"{'unlimited' if limit is None else limit} may be open, {used} are"
    why = ("each peer takes up to ten, each pipe up to six, and an engine itself some hundreds",)
    if limit is not None and limit - used < _DESCRIPTORS_NEEDED:
        return Finding(topic="descriptors", verdict="problem", what=what, why=why, change="ulimit -n 65536")
    if limit is not None and limit < _DESCRIPTORS_USUAL:
        return Finding(topic="descriptors", verdict="note", what=what, why=why, change="ulimit -n 65536")
    return Finding(topic="descriptors", verdict="ok", what=what)


def _shm(facts: HostFacts) -> Finding:
    total, free = facts.shm_bytes, facts.shm_free_bytes
    change = "docker run --shm-size=8g    (Kubernetes: an emptyDir with medium Memory at /dev/shm)"
    if total is None or free is None:
        return Finding(
            topic=SHARED_MEMORY,
            verdict="note",
            what="there is none",
            why=("engines, NCCL and UCX use it; kvplug's own shared memory does not",),
            change=change,
        )
    what = f"{bytes_in_words(free)} of {bytes_in_words(total)} are free"
    if free < _SHM_NEEDED:
        why = "NCCL, UCX and the workers of an engine fail, or take a slower way, without room in it"
        return Finding(topic=SHARED_MEMORY, verdict="problem", what=what, why=(why,), change=change)
    if total < _SHM_USUAL:
        why = "it is small, as containers have it by default; NCCL and UCX take a slower way when it is full"
        return Finding(topic=SHARED_MEMORY, verdict="note", what=what, why=(why,), change=change)
    return Finding(topic=SHARED_MEMORY, verdict="ok", what=what)


def _locked(facts: HostFacts) -> Finding:
    pages = facts.huge_pages
    huge = "" if pages is None else f"; {pages} huge pages, {facts.huge_pages_free} free"
    what = f"{bytes_in_words(facts.locked_bytes)} may be locked{huge}"
    if facts.rdma and facts.locked_bytes is not None and facts.locked_bytes < _LOCKED_USUAL:
        return Finding(
            topic="locked memory",
            verdict="note",
            what=what,
            why=(f"memory that an RDMA device reads by itself must be locked, and here is {facts.rdma}",),
            change="ulimit -l unlimited    (docker run --ulimit memlock=-1)",
        )
    return Finding(topic="locked memory", verdict="ok", what=what)


def findings_of_two(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    """What differs between the two hosts, or keeps two processes of one host apart."""
    if ours.boot_id and ours.boot_id == theirs.boot_id:
        yield from _namespaces(ours, theirs)
    else:
        yield Finding(
            topic="hosts",
            verdict="ok",
            what=f"the peer is on another host: {theirs.host or 'without a name'}",
        )
        if ours.time_ms and theirs.time_ms and abs(ours.time_ms - theirs.time_ms) > 1000 * _CLOCK_S:
            apart = abs(ours.time_ms - theirs.time_ms) / 1000
            yield Finding(
                topic="clocks",
                verdict="problem",
                what=f"the two hosts' clocks are {apart:.0f} s apart",
                why=("tickets in requests expire by them, and certificates are checked by them",),
                change="chronyc makestep    (or the host's other service of time)",
            )
    yield from _versions(ours, theirs)


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


def _namespaces(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    apart = False
    for kind, (why, change) in _APART.items():
        mine, yours = ours.namespaces.get(kind), theirs.namespaces.get(kind)
        if mine and yours and mine != yours:
            apart = True
            yield Finding(
                topic=f"{kind} namespace",
                verdict="note",
                what=f"the two ends are on one host, in different {kind} namespaces",
                why=(why,),
                change=change,
            )
    if ours.shm_id and theirs.shm_id and ours.shm_id != theirs.shm_id:
        apart = True
        yield Finding(
            topic=SHARED_MEMORY,
            verdict="note",
            what="the two ends are on one host, and each has a /dev/shm of its own",
            why=("NCCL and UCX take a slower way between them; kvplug's own shared memory is not in it",),
            change="docker run --ipc=host    (or one volume at /dev/shm of both)",
        )
    if not apart:
        yield Finding(topic="hosts", verdict="ok", what="both ends are on this host and share its namespaces")


def _versions(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    mine, yours = ours.versions, theirs.versions
    differing = sorted(
        name for name in mine.keys() & yours.keys() if name.startswith("kvplug") and mine[name] != yours[name]
    )
    if differing:
        yield Finding(
            topic="versions",
            verdict="note",
            what="; ".join(f"{name}: {mine[name]} here, {yours[name]} at the peer" for name in differing),
            why=("different versions work together where their handshake agrees",),
            change="pip install --upgrade NAME    (at the end with the lower version)".replace(
                "NAME", " ".join(differing)
            ),
        )
    else:
        yield Finding(topic="versions", verdict="ok", what=f"kvplug {mine.get('kvplug')} at both ends")
