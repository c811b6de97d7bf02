"""Checks the host that a process runs on, and what separates two processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvplug.assembly.doctor.finding import LINE_FOR_RESOURCE, Finding, judged, note, ok, problem
from kvplug.assembly.host import SHARED_MEMORY, HostFacts
from kvplug.config.units import bytes_in_words

MIB: Final = 1 << 20
_SHM_NEEDED: Final = 16 * MIB
_SHM_USUAL: Final = 1024 * MIB
_DESCRIPTORS_NEEDED: Final = 64
_DESCRIPTORS_USUAL: Final = 1024
_LOCKED_USUAL: Final = 64 * MIB
_CLOCK_S: Final = 5.0


def of_limits(facts: HostFacts, buffer_size: int) -> Iterator[Finding]:
    """Check the limits of a process. ``buffer_size``: the value in its config."""
    limit, used = facts.descriptors, facts.descriptors_used or 0
    yield judged(
        "descriptors",
        f"{'unlimited' if limit is None else limit} may be open, {used} are in use",
        "each peer uses up to ten, each pipe up to six, and an engine itself several hundred",
        change=LINE_FOR_RESOURCE["descriptors"],
        wrong=limit is not None and limit - used < _DESCRIPTORS_NEEDED,
        doubtful=limit is not None and limit < _DESCRIPTORS_USUAL,
    )
    total, free = facts.shm_bytes or 0, facts.shm_free_bytes or 0
    yield judged(
        SHARED_MEMORY,
        f"{bytes_in_words(free)} of {bytes_in_words(total)} are free",
        "it is small or full; without room in it, NCCL, UCX and an engine's workers fail or are slow",
        change="docker run --shm-size=8g    (Kubernetes: an emptyDir with medium Memory at /dev/shm)",
        wrong=total > 0 and free < _SHM_NEEDED,
        doubtful=total < _SHM_USUAL,
    )
    locked, files = facts.locked_bytes, facts.file_bytes
    yield judged(
        "locked memory",
        f"{bytes_in_words(locked)} may be locked",
        f"the RDMA devices of this host ({facts.rdma}) can only read locked memory",
        change="ulimit -l unlimited    (docker run --ulimit memlock=-1)",
        doubtful=bool(facts.rdma) and locked is not None and locked < _LOCKED_USUAL,
    )
    yield judged(
        "files",
        f"the size limit of files and of segments of shared memory: {bytes_in_words(files)}",
        "larger segments and pages cannot be written, because of this process's RLIMIT_FSIZE",
        change="ulimit -f unlimited",
        wrong=files is not None and files < buffer_size,
    )


def of_device(device: str) -> Iterator[Finding]:
    """Check that PyTorch finds the config's device, without a tensor, which would take GPU memory."""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return
    try:
        import torch
    except ImportError:
        yield note("device", "not checked: PyTorch is not installed here", change="pip install torch")
        return
    count = torch.cuda.device_count()
    yield judged(
        "device",
        f"{device}: PyTorch {torch.__version__} finds {count} GPUs here",
        "this container does not have the GPU, or PyTorch was built without CUDA",
        change='docker run --gpus=all    (or device = "cpu")',
        wrong=int(index or 0) >= count,
    )


_APART: Final = {
    "pid namespace": (
        "each end notices the death of the other only after heartbeat_timeout_s",
        "docker run --pid=container:NAME    (Kubernetes: shareProcessNamespace: true)",
    ),
    "net namespace": (
        "abstract Unix sockets and loopback addresses only work within one network namespace",
        "docker run --network=host    (or host = unix:/path in a shared folder; or an address and a secret)",
    ),
    "ipc namespace": (
        "device memory cannot be shared between them (CUDA IPC), and NCCL and UCX use a slower path",
        "docker run --ipc=host    (or --ipc=container:NAME for both)",
    ),
    SHARED_MEMORY: (
        "NCCL and UCX use a slower path between them; kvplug's own shared memory is not affected",
        "docker run --ipc=host    (or mount the same volume at /dev/shm in both)",
    ),
}
"""Each resource that may differ between two processes on one host: the consequence, and what to change."""


def of_two_hosts(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    """Check what separates two hosts, or two processes on one host."""
    if ours.boot_id and ours.boot_id == theirs.boot_id:
        yield from [*_apart(ours, theirs)] or [
            ok("hosts", "both ends are on this host and share its namespaces")
        ]
    else:
        yield ok("hosts", f"the peer is on another host: {theirs.host or 'unknown'}")
        apart_s = abs((ours.time_ms or 0) - (theirs.time_ms or 0)) / 1000
        if ours.time_ms and theirs.time_ms and apart_s > _CLOCK_S:
            yield problem(
                "clocks",
                f"the two hosts' clocks are {apart_s:.0f} s apart",
                "the expiry of tickets and the validity of certificates are checked against them",
                change="chronyc makestep    (or the host's other time service)",
            )
    mine, yours = ours.versions, theirs.versions
    both = sorted(name for name in mine.keys() & yours.keys() if name.startswith("kvplug"))
    if differing := [name for name in both if mine[name] != yours[name]]:
        yield note(
            "versions",
            "; ".join(f"{name}: {mine[name]} here, {yours[name]} at the peer" for name in differing),
            "different versions work together if their handshake succeeds",
            change=f"pip install --upgrade {' '.join(differing)}    (at the end with the lower version)",
        )
    else:
        yield ok("versions", f"kvplug {mine.get('kvplug')} at both ends")


def _apart(ours: HostFacts, theirs: HostFacts) -> Iterator[Finding]:
    mine, yours = (
        {f"{kind} namespace": each for kind, each in facts.namespaces.items()} | {SHARED_MEMORY: facts.shm_id}
        for facts in (ours, theirs)
    )
    for topic, (why, change) in _APART.items():
        if mine.get(topic) and yours.get(topic) and mine[topic] != yours[topic]:
            what = f"the two ends are on one host, and each has its own {topic}"
            yield note(topic, what, why, change=change)
