"""The worker side: passes vLLM's tensors and calls to a WorkerConnector."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from typing import Any, TypeVar

import torch

from kvplug.engine import KVCacheConfig, KVLayout, LayoutError, WorkerConnector
from kvplug.net.wire import encode
from kvplug_vllm.metadata import (
    KvplugConnectorMetadata,
    KvplugHandshakeMetadata,
    KvplugStats,
    KvplugWorkerMetadata,
)
from kvplug_vllm.translate import in_memory_order

_log = logging.getLogger(__name__)

_Call = TypeVar("_Call", bound=Callable[..., Any])


def _outside_inference_mode(call: _Call) -> _Call:
    """torch's decorator, typed so that it keeps the type of the decorated function."""
    wrapped: _Call = torch.inference_mode(False)(call)
    return wrapped


class KvplugConnectorWorker:
    """One WorkerConnector in one of vLLM's workers.

    vLLM runs its model and these calls in torch's inference mode. A thread outside this mode can never write
    to a tensor that was made inside it, and connectors have threads. So each call leaves the mode first.
    """

    def __init__(
        self, connector: WorkerConnector, cache: KVCacheConfig, *, which: str, fails_requests: bool = False
    ) -> None:
        """``fails_requests``: failed loads are reported to vLLM by request, not by block."""
        self.connector = connector
        self._failures = _FailedRequests() if fails_requests else None
        self._which = which
        self._layouts: dict[str, KVLayout] = {
            name: group.layout for group in cache.groups for name in group.layer_names
        }
        self._caches: dict[str, torch.Tensor] = {}
        self._running: set[str] = set()
        """Requests that vLLM has scheduled and that have not ended, as far as this worker knows."""
        self._sends = _AwaitedRequests("sent")
        self._receipts = _AwaitedRequests("received")
        self._settling: frozenset[str] = frozenset()
        """Requests to report as received in this step."""
        self._unloaded: frozenset[int] = frozenset()

    # -- at start ------------------------------------------------------------------------------

    @_outside_inference_mode
    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        missing = [name for name in self._layouts if name not in kv_caches]
        if missing:
            raise LayoutError(f"vLLM registered no cache for {', '.join(missing)}, which its config names")
        self._caches = {
            name: in_memory_order(_writable_anywhere(kv_caches[name]), layout)
            for name, layout in self._layouts.items()
        }
        self.connector.register_kv_caches(self._caches)

    @_outside_inference_mode
    def get_handshake_metadata(self) -> KvplugHandshakeMetadata | None:
        plain = self.connector.get_handshake_metadata()
        return None if plain is None else KvplugHandshakeMetadata(encode(plain), self._which)

    # -- each step -----------------------------------------------------------------------------

    @_outside_inference_mode
    def handle_preemptions(self, metadata: KvplugConnectorMetadata) -> None:
        if metadata.preempted:
            self.connector.handle_preemptions(metadata.preempted)

    @_outside_inference_mode
    def bind(self, metadata: KvplugConnectorMetadata) -> None:
        self._running |= metadata.begun
        self._sends.add(metadata.newly_pending.held)
        self._receipts.add(metadata.newly_pending.loading)
        self._settling = metadata.newly_pending.settling
        self._unloaded = metadata.unloaded
        if self._failures is not None:
            self._failures.add(metadata.newly_pending.block_ids)
        self.connector.bind_connector_metadata(metadata.plan)
        if self._settling:  # start it now: vLLM starts background loads after the step
            self.connector.start_load_kv()

    @_outside_inference_mode
    def clear(self) -> None:
        self.connector.clear_connector_metadata()

    @_outside_inference_mode
    def start_load_kv(self) -> None:
        if not self._settling:
            self.connector.start_load_kv()

    @_outside_inference_mode
    def wait_for_layer_load(self, layer_name: str) -> None:
        if layer_name in self._layouts:  # other layers use another layer's cache
            self.connector.wait_for_layer_load(layer_name)

    @_outside_inference_mode
    def save_kv_layer(self, layer_name: str) -> None:
        if layer_name in self._caches:
            self.connector.save_kv_layer(layer_name, self._caches[layer_name])

    @_outside_inference_mode
    def wait_for_save(self) -> None:
        self.connector.wait_for_save()

    @_outside_inference_mode
    def get_finished(self, finished_request_ids: set[str]) -> tuple[set[str], set[str]]:
        self._running -= finished_request_ids
        sent, received = self.connector.get_finished(frozenset(finished_request_ids))
        received |= self._settling  # the connector has waited for the loads that the step needs
        return self._sends.take(sent, early=self._running), self._receipts.take(received)

    @_outside_inference_mode
    def failed_among(self, received: set[str]) -> set[str]:
        """The requests whose load failed, of those just reported as received."""
        if self._failures is None:
            return set()
        self._failures.fail(self._failed_blocks())
        return self._failures.take(received)

    @_outside_inference_mode
    def get_block_ids_with_load_errors(self) -> set[int]:
        failed = self._failed_blocks()
        if self._failures is None:
            return set(failed)
        self._failures.fail(failed)  # their requests are reported as received later
        return set()

    def _failed_blocks(self) -> frozenset[int]:
        unloaded, self._unloaded = self._unloaded, frozenset()
        return unloaded | self.connector.get_block_ids_with_load_errors()

    @_outside_inference_mode
    def get_stats(self) -> KvplugStats | None:
        snapshot = self.connector.get_stats()
        return KvplugStats(data=dict(snapshot)) if snapshot else None

    @_outside_inference_mode
    def build_worker_metadata(self) -> KvplugWorkerMetadata | None:
        events, plain = tuple(self.connector.take_events()), self.connector.build_worker_metadata()
        if plain is None and not events:
            return None
        return KvplugWorkerMetadata(() if plain is None else (plain,), events)


class _AwaitedRequests:
    """Requests that vLLM waits for. Reporting another one, or one twice, fails an assertion in vLLM."""

    def __init__(self, how: str) -> None:
        self._how = how
        self._awaited: set[str] = set()
        self._early: set[str] = set()

    def add(self, request_ids: frozenset[str]) -> None:
        self._awaited |= request_ids

    def take(self, reported: frozenset[str], early: Set[str] = frozenset()) -> set[str]:
        """Return the reported requests to pass on to vLLM.

        ``early``: requests that vLLM may wait for later. Their reports are kept until then: a peer may have
        read all blocks of a request before this worker knows that the request has ended.
        """
        self._early |= reported & early
        reported = (reported - early) | (self._early - early)
        self._early -= reported
        stray = reported - self._awaited
        if stray:
            _log.error(
                "the connector reported %s as %s, but did not keep it, or reported it before: not passed on",
                ", ".join(sorted(stray)),
                self._how,
            )
        self._awaited -= reported
        return set(reported - stray)


class _FailedRequests:
    """Finds the requests of failed loads by their blocks. A loaded block belongs to one request."""

    def __init__(self) -> None:
        self._blocks: dict[str, frozenset[int]] = {}
        self._failed: set[str] = set()

    def add(self, block_ids: Mapping[str, frozenset[int]]) -> None:
        """Track requests that load into these blocks."""
        self._blocks |= block_ids

    def fail(self, failed: frozenset[int]) -> None:
        """Mark the requests whose loads into these blocks failed."""
        if failed:
            self._failed |= {name for name, blocks in self._blocks.items() if not failed.isdisjoint(blocks)}

    def take(self, received: set[str]) -> set[str]:
        """Stop tracking these requests, whose loads have ended. Returns those that failed."""
        failed = self._failed & received
        self._failed -= received
        for request_id in received:
            self._blocks.pop(request_id, None)
        return failed


def _writable_anywhere(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that threads outside inference mode may write to."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
