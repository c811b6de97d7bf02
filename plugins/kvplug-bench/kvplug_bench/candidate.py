"""The candidates: transports, and the baselines that they are compared with."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

import attrs

from kvplug.config.units import format_bytes
from kvplug_bench.device import CPU, burst_bytes, kind_of

INTO: Final = "into"
"""Streaming: tensors are received into existing memory, one right after another."""
ALONE: Final = "alone"
"""One tensor is received into existing memory, after a pause in which both ends were idle."""
OWNED: Final = "owned"
"""Each message is received into a new tensor, after the previous one was dropped."""
KEPT: Final = "kept"
"""Each reader of a queue receives into its own tensor."""
LOOKED: Final = "looked"
"""Readers of a queue read messages in the queue's memory, without a copy."""
LATENCY: Final = "latency"
"""A small message whose receiver is already waiting."""
WAKE: Final = "wake"
"""A small message whose receiver is already waiting, after a pause."""

PIPE, QUEUE, COPY = "pipe", "queue", "copy"
OPS: Final = {
    COPY: (INTO, ALONE),
    PIPE: (INTO, ALONE, OWNED, LATENCY, WAKE),
    QUEUE: (KEPT, LOOKED, LATENCY, WAKE),
}
"""The ops of each kind. A copy is made by one process, without a transport."""
BULK: Final = (INTO, ALONE, OWNED, KEPT, LOOKED)
"""The ops that are measured for each size; the others move one small message."""


@attrs.frozen(kw_only=True)
class Candidate:
    """A transport, library or copy to measure."""

    name: str
    kind: str
    """A key of :data:`OPS`."""
    link: str = ""
    """``"package.module:Class"`` of its ends: a ``Link`` for a pipe, a ``Broadcast`` for a queue."""
    arguments: Mapping[str, Any] = attrs.field(factory=dict)
    """Arguments of ``link`` besides the rendezvous. Plain values."""
    baseline: bool = False
    """Whether other candidates are compared with it."""
    ops: tuple[str, ...] = attrs.field()
    largest_looked: int = 0
    """The size in bytes of the largest message that readers can read in place."""
    skipped_because: str = ""
    """The reason if it cannot be measured here, as far as known before a process starts."""
    python: str = sys.executable
    """The Python of its processes, for libraries that are not installed in this one."""
    env: Mapping[str, str] = attrs.field(factory=dict)
    """Added to the environment of its processes."""
    devices: tuple[str, ...] = (CPU,)
    """The device of each end's tensors; the last one applies to all further ends."""
    burst_bytes: int = attrs.field()
    """The bytes that are timed together."""

    @ops.default
    def _all(self) -> tuple[str, ...]:
        return OPS[self.kind]

    @burst_bytes.default
    def _as_the_device_needs(self) -> int:
        return burst_bytes(self.devices[0])

    def device(self, rank: int) -> str:
        return self.devices[min(rank, len(self.devices) - 1)]

    def refuses(self, op: str, nbytes: int) -> str:
        """The reason if it cannot do ``op`` with messages of that size; empty if it can."""
        if op == LOOKED and nbytes > self.largest_looked:
            if not self.largest_looked:
                return "readers cannot read its memory in place"
            return f"larger than one of its chunks, {format_bytes(self.largest_looked)}"
        return ""


def copy_on(device: str) -> Candidate:
    """The upper bound: one thread's copy within the device's memory, source and destination warm."""
    return Candidate(name="memcpy", kind=COPY, baseline=True, devices=(device,))


MEMCPY: Final = copy_on(CPU)
_GLOO: Final = {PIPE: "kvplug_bench.gloo:Gloo", QUEUE: "kvplug_bench.gloo:GlooBroadcast"}
_ZMQ: Final = {PIPE: "kvplug_bench.zeromq:ZeroMQ", QUEUE: "kvplug_bench.zeromq:ZeroMQBroadcast"}
_LINKS: Final = {"gloo": _GLOO, "zmq": _ZMQ}

BASELINES: Final = ("memcpy", *_LINKS)
"""Names that ``--baseline`` accepts."""


def baseline(name: str, kinds: set[str], devices: tuple[str, ...] = (CPU,)) -> tuple[Candidate, ...]:
    """The baseline ``name``: a candidate for each of the ``kinds``, on the ``devices`` of the ends."""
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
