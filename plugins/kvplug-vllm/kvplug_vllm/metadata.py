"""The metadata that vLLM carries between its processes for this connector: dataclasses of plain values."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvplug.engine import CacheEvent, Plain, TransferStats
from kvplug_vllm.pending import NewlyPending
from kvplug_vllm.releases.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)


@dataclasses.dataclass
class KvplugConnectorMetadata(KVConnectorMetadata):
    """From the scheduler side to every worker, once a step."""

    plan: Plain
    """The result of ``build_connector_meta``."""
    begun: frozenset[str] = frozenset()
    """Requests that are scheduled for the first time."""
    preempted: frozenset[str] = frozenset()
    unloaded: frozenset[int] = frozenset()
    """Blocks to report as failed: vLLM expects their load, but the connector refused it."""
    newly_pending: NewlyPending = dataclasses.field(default_factory=NewlyPending)
    """Requests that vLLM waits for from this step on."""


@dataclasses.dataclass
class KvplugWorkerMetadata(KVConnectorWorkerMetadata):
    """From the workers to the scheduler side, once a step."""

    parts: tuple[Plain, ...] = ()
    events: tuple[CacheEvent, ...] = ()

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KvplugWorkerMetadata:
        assert isinstance(other, KvplugWorkerMetadata)
        return KvplugWorkerMetadata(self.parts + other.parts, self.events + other.events)


@dataclasses.dataclass
class KvplugHandshakeMetadata(KVConnectorHandshakeMetadata):
    """From each worker to the scheduler side, once."""

    payload: bytes
    """Encoded in kvplug's wire format."""
    which: str
    """The sending connector, among the children of a MultiConnector."""


@dataclasses.dataclass
class KvplugStats(KVConnectorStats):
    """A snapshot of TransferStats. A dataclass as its base class is: vLLM constructs it with ``data=``."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """``stats["data"]``: before 0.30, vLLM reads the stats of a MultiConnector's children as if they were
        serialised, although a single-process engine does not serialise them.
        """
        return getattr(self, name)

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def aggregate(self, other: KVConnectorStats) -> KvplugStats:
        stats = TransferStats.from_snapshot(self.data) if self.data else TransferStats()
        if other.data:
            stats.merge(other.data)
        return KvplugStats(data=stats.snapshot())

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's log: some for each operation, and every reason of failure."""
        found: dict[str, int | float] = {}
        for op, figures in self.data.get("ops", {}).items():
            found[f"{op} count"] = figures["count"]
            if figures["bytes"]:
                found[f"{op} MiB"] = round(figures["bytes"] / 2**20, 1)
            if figures["tokens"]:
                found[f"{op} tokens"] = figures["tokens"]
            found[f"{op} mean ms"] = round(1e3 * figures["seconds"] / max(1, figures["count"]), 3)
        for op, reasons in self.data.get("failures", {}).items():
            for reason, count in reasons.items():
                found[f"{op} failed: {reason}"] = count
        return found
