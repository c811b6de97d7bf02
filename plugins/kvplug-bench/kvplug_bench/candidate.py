"""What is measured: transports, and what they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug.config.units import format_bytes
from kvplug_bench.place import CPU, burst_bytes, kind_of

INTO: Final = "into"
"""Tensors are received into memory that is there, one right after the other: streaming."""
ALONE: Final = "alone"
"""One tensor is received into memory that is there, after a pause in which both ends did nothing."""
OWNED: Final = "owned"
"""Each is received into a tensor of its own, after the one before it was dropped."""
KEPT: Final = "kept"
"""The same, of a queue: each reader has its own."""
LOOKED: Final = "looked"
"""Readers of a queue look at what lies in its memory, and copy nothing."""
LATENCY: Final = "latency"
"""A small message that somebody waits for."""
WAKE: Final = "wake"
"""The same, after a silence."""

PIPE, QUEUE, COPY = "pipe", "queue", "copy"
OPS: Final = {
    COPY: (INTO, ALONE),
    PIPE: (INTO, ALONE, OWNED, LATENCY, WAKE),
    QUEUE: (KEPT, LOOKED, LATENCY, WAKE),
}
"""What is measured of each kind. A copy is made by one process, and nothing crosses."""
BULK: Final = (INTO, ALONE, OWNED, KEPT, LOOKED)
"""Those that are measured for each size; the others move one small message."""


@attrs.frozen(kw_only=True)
class Candidate:
    """One thing to be measured."""

    name: str
    kind: str
    """Which of :data:`OPS` it is."""
    link: str = ""
    """``"package.module:Class"`` of its ends: a ``Link`` for a pipe, a ``Broadcast`` for a queue."""
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    """What ``link`` is called with besides the meeting. Plain values."""
    baseline: bool = False
    """Whether others are compared with it."""
    ops: tuple[str, ...] = attrs.field()
    largest_looked: int = 0
    """The most bytes that readers can look at in place."""
    skipped_because: str = ""
    """Why it cannot be measured here, where that is known before it is tried."""
    python: str = sys.executable
    """The interpreter of its processes, for libraries that are not installed in this one."""
    env: Mapping[str, str] = attrs.field(factory=dict)
    """Added to the environment of its processes."""
    devices: tuple[str, ...] = (CPU,)
    """Where the tensors of each end lie; the last one goes for all further ends."""
    burst_bytes: int = attrs.field()
    """How much is timed together."""

    @ops.default
    def _all(self) -> tuple[str, ...]:
        return OPS[self.kind]

    @burst_bytes.default
    def _as_the_device_needs(self) -> int:
        return burst_bytes(self.devices[0])

    def device(self, rank: int) -> str:
        return self.devices[min(rank, len(self.devices) - 1)]

    def refuses(self, op: str, nbytes: int) -> str:
        """Why it cannot do ``op`` with messages of that size; empty where it can."""
        if op == LOOKED and nbytes > self.largest_looked:
            if not self.largest_looked:
                return "readers cannot look at its memory"
            return f"larger than one of its chunks, {format_bytes(self.largest_looked)}"
        return ""


def copy_on(device: str) -> Candidate:
    """The ceiling: one thread's copy from the device's memory to the device's memory, both warm."""
    return Candidate(name="memcpy", kind=COPY, baseline=True, devices=(device,))


MEMCPY: Final = copy_on(CPU)
_GLOO: Final = {PIPE: "kvplug_bench.gloo:Gloo", QUEUE: "kvplug_bench.gloo:GlooBroadcast"}
_ZMQ: Final = {PIPE: "kvplug_bench.zeromq:ZeroMQ", QUEUE: "kvplug_bench.zeromq:ZeroMQBroadcast"}
_LINKS: Final = {"gloo": _GLOO, "zmq": _ZMQ}

BASELINES: Final = ("memcpy", *_LINKS)
"""What a transport can be compared with by name."""


def baseline(name: str, kinds: set[str], devices: tuple[str, ...] = (CPU,)) -> tuple[Candidate, ...]:
    """The baseline ``name``, as each of the ``kinds`` that are measured, on the ``devices`` of the ends."""
    if name == MEMCPY.name:
        return (copy_on(devices[0]),)
    elsewhere = "" if kind_of(devices[0]) == CPU else "it moves CPU tensors"
    ops = {PIPE: OPS[PIPE], QUEUE: (KEPT, LATENCY, WAKE)}
    return tuple(
        Candidate(
            name=name,
            kind=kind,
            link=link,
            ops=ops[kind],
            baseline=True,
            devices=devices,
            skipped_because=elsewhere,
        )
        for kind, link in _LINKS[name].items()
        if kind in kinds
    )
