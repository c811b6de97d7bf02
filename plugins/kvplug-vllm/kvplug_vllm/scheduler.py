"""The scheduler side: translates between vLLM's scheduler and a SchedulerConnector."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvplug.engine import (
    NO_BLOCK,
    BlockIds,
    CacheEvent,
    CacheGroup,
    ScheduledRequest,
    SchedulerConnector,
    SchedulerOutput,
    TransferStats,
    WorkerOutput,
    reason_of,
)
from kvplug.net.wire import decode
from kvplug_vllm.loads import CountedLoads, StepLoads
from kvplug_vllm.metadata import (
    KvplugConnectorMetadata,
    KvplugHandshakeMetadata,
    KvplugStats,
    KvplugWorkerMetadata,
)
from kvplug_vllm.pending import PendingRequests
from kvplug_vllm.releases.base import fails_where_reset_fails
from kvplug_vllm.releases.events import event_of
from kvplug_vllm.releases.tables import block_tables
from kvplug_vllm.requests import Requests, end_of

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput as VllmSchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request as VllmRequest

_log = logging.getLogger(__name__)

_MAX_LOGGED = 20
"""How many types of hints are logged: clients choose their names."""
_NULL_BLOCK = 0
"""The first block of vLLM's pool, which marks a missing block and belongs to no request."""


class KvplugConnectorScheduler:
    """One SchedulerConnector in vLLM's scheduler.

    It tracks the requests that vLLM waits for (:class:`PendingRequests`) and sends them to the workers: a
    worker that reports any other request ends vLLM's engine.

    It also ensures that KV whose load failed is not used. If a step needs a load, vLLM assumes at once that
    the load succeeds; other requests wait until the step is reported (:class:`StepLoads`). If vLLM cannot
    rewind, that report is too late for the request itself: the next step is already planned, or computes the
    missing tokens at the wrong position. If vLLM replays whole captured steps, no call between layers can
    wait. In both cases the connector is asked to load everything in the background. If it cannot, the adapter
    still declares a background load, so that the request waits; the workers report the request as received in
    the step that loads, which waits for the load. The adapter does the same if vLLM has not bound its block
    pool, from which the blocks of a failed load are evicted.
    """

    def __init__(
        self,
        connector: SchedulerConnector,
        *,
        which: str,
        tensor_parallel_size: int,
        loads_in_step: bool,
        groups: Sequence[CacheGroup],
        fails_requests: bool = False,
    ) -> None:
        """
        Args:
            loads_in_step: a load may be part of the step that needs it; otherwise the request waits for it.
            fails_requests: failed loads are reported to vLLM by request, not by block.
        """
        self.connector = connector
        self._groups = tuple(groups)
        self._fails_requests = fails_requests
        self._loading: dict[str, frozenset[int]] = {}
        """The blocks of loading requests, if failures are reported by request."""
        self._ended: set[str] = set()
        """Requests that ended since the last report, which may still contain their failed loads."""
        self._which = which
        self._tensor_parallel_size = tensor_parallel_size
        self._loads_in_step = loads_in_step
        self._pool: BlockPool | None = None
        self._tables = block_tables()
        self._requests = Requests()
        self._step = 0
        self._matches: dict[str, _Match] = {}
        """Matches of requests whose blocks are not yet allocated."""
        self._pending = PendingRequests()
        self._step_loads = StepLoads()
        self._counted = CountedLoads()
        self._unloaded = frozenset[int]()
        """Blocks whose load vLLM expects in the next step, but the connector refused."""
        self._worker_events: list[CacheEvent] = []
        self._stats = TransferStats()
        """The adapter's own counters."""
        self._ignored_hints: set[str] = set()
        self._may_load = True
        """False if vLLM has ignored that a reset failed."""

    def reset_cache(self) -> bool:
        if self.connector.reset_cache():
            self._may_load = True
            return True
        self._may_load = fails_where_reset_fails()
        if self._may_load:
            _log.warning(
                "vLLM fails the operation that needs this reset. After a failed POST /pause the server stays"
                " paused until POST /resume; POST /pause?clear_cache=false pauses it without a reset"
            )
        else:
            _log.warning(
                "this release of vLLM ignores that a reset failed, also at POST /pause. Since KV may be that"
                " of other weights, kvplug loads nothing until a reset succeeds"
            )
        return False

    # -- one request ---------------------------------------------------------------------------

    def on_new_request(self, request: VllmRequest) -> None:
        self._count_hints(request)
        self.connector.on_new_request(self._requests[request])

    def _count_hints(self, request: VllmRequest) -> None:
        """Count an orchestrator's hints (since vLLM 0.32), which kvplug's connectors ignore."""
        hints = getattr(request, "kv_hints", None)
        for action in () if hints is None else hints.actions:
            self._stats.fail("hint", "ignored")
            if action.action_type not in self._ignored_hints and len(self._ignored_hints) < _MAX_LOGGED:
                self._ignored_hints.add(action.action_type)
                _log.warning(
                    "KV hints of the type %.100r are ignored (and counted): kvplug loads KV when a request"
                    " needs it, and evicts the least recently used",
                    action.action_type,
                )

    def get_num_new_matched_tokens(
        self, request: VllmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache or not self._may_load:
            return 0, False  # it needs the outputs of all its tokens; some releases of vLLM still ask
        asked = self._requests[request]
        if self._step_loads.are_shared_by(asked, num_computed_tokens):
            return None, False  # ask again: the next step knows whether the load succeeded
        found, in_background = self.connector.get_num_new_matched_tokens(asked, num_computed_tokens)
        if found is None:
            return None, False
        left = request.num_tokens - num_computed_tokens
        if not 0 <= found <= left:
            _log.error(
                "the connector offers to load %d tokens of %.100r, but %d are left: none are loaded",
                found,
                request.request_id,
                left,
            )
            found = 0
        # vLLM computes the last token again only after a load in the background.
        settles = not in_background and (not self._loads_in_step or self._pool is None or found == left)
        self._matches[request.request_id] = _Match(num_computed_tokens, in_background, settles)
        return found, bool(found) and (in_background or settles)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id, block_ids = request.request_id, self._block_ids(blocks.get_block_ids())
        match = self._matches.pop(request_id, None)
        start = 0 if match is None else match.num_computed_tokens
        waits = match is not None and (match.in_background or match.settles)
        settles = match is not None and match.settles
        try:
            self.connector.update_state_after_alloc(self._requests[request], block_ids, num_external_tokens)
        except Exception as e:  # it would end vLLM's engine
            _log.error("nothing is loaded for request %.100r: %s", request_id, e)
            self._stats.fail("load", reason_of(e))
            if num_external_tokens:
                self._unloaded |= self._blocks_from(start, block_ids)
                settles = waits
        if not num_external_tokens:
            self._pending.allocate(request_id)
            return
        self._counted.add(request, start, num_external_tokens)
        if waits:
            loading = None
            if self._fails_requests:
                loading = self._blocks_from(start, block_ids)
                self._loading[request_id] = loading
            self._pending.load(request_id, settles=settles, block_ids=loading)
        else:
            self._step_loads.add(self._requests[request], start, *block_ids)

    def get_hit_sources(self, request: VllmRequest, num_external_tokens: int) -> dict[Any, int]:
        """Tokens by vLLM's ``CacheHitSource``; other sources count as ``EXTERNAL_UNSPECIFIED``."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "peer": CacheHitSource.P2P}
        found: dict[Any, int] = {}
        sources = self.connector.get_hit_sources(self._requests[request], num_external_tokens)
        for source, count in sources.items():
            name = names.get(source, CacheHitSource.EXTERNAL_UNSPECIFIED)
            found[name] = found.get(name, 0) + count
        return found

    def request_finished(
        self, request: VllmRequest, block_ids: Iterable[Iterable[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        keeps, params = self.connector.request_finished(
            self._requests[request], self._block_ids(block_ids), end_of(request)
        )
        self._requests.forget(request_id)
        self._counted.forget(request_id)
        self._matches.pop(request_id, None)
        self._ended.add(request_id)
        return self._pending.end(request_id, keeps=keeps), params

    def _block_ids(self, tables: Iterable[Iterable[int]]) -> BlockIds:
        """vLLM's block tables in kvplug's form: vLLM's null block replaces those that a window freed."""
        return tuple(
            tuple(table)
            if group.window is None
            else tuple(NO_BLOCK if block == _NULL_BLOCK else block for block in table)
            for table, group in zip(tables, self._groups, strict=True)
        )

    def _blocks_from(self, num_computed_tokens: int, block_ids: BlockIds) -> frozenset[int]:
        """The blocks that a load after these tokens writes to."""
        return frozenset(
            block
            for table, group in zip(block_ids, self._groups, strict=True)
            for block in table[num_computed_tokens // group.block_size :]
        ) - {NO_BLOCK}

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: VllmSchedulerOutput) -> KvplugConnectorMetadata:
        self._step += 1
        preempted = frozenset(output.preempted_req_ids or ())
        tables, scheduled = self._tables(output), tuple(_scheduled(output))
        self._counted.correct(scheduled)
        plan = self.connector.build_connector_meta(
            SchedulerOutput(
                step=self._step,
                scheduled=scheduled,
                block_ids=lambda request_id: self._block_ids(tables(request_id)),
                token_ids=self._requests.token_ids,
                preempted_request_ids=preempted,
                finished_request_ids=frozenset(output.finished_req_ids),
            )
        )
        unloaded, self._unloaded = self._unloaded, frozenset()
        return KvplugConnectorMetadata(
            plan=plan,
            unloaded=unloaded,
            begun=frozenset(request.req_id for request in output.scheduled_new_reqs),
            preempted=preempted,
            newly_pending=self._pending.begin_step(output.num_scheduled_tokens),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        metadata, stats = output.kv_connector_worker_meta, output.kv_connector_stats
        sent, received = self._pending.settle(
            output.finished_sending or set(), output.finished_recving or set()
        )
        wrong = self._step_loads.end(output.invalid_block_ids)
        if wrong and self._pool is not None:
            self._pool.evict_blocks(wrong)
        invalid = frozenset(output.invalid_block_ids)
        for request_id in getattr(output, "failed_recving", ()):
            invalid |= self._loading.get(request_id, frozenset())
        for request_id in {*(output.finished_recving or ()), *self._ended}:
            self._loading.pop(request_id, None)
        self._ended.clear()
        if isinstance(metadata, KvplugWorkerMetadata):
            self._worker_events += dict.fromkeys(metadata.events)  # several workers may report one event
        self.connector.update_connector_output(
            WorkerOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=invalid,
                worker_metadata=metadata.parts if isinstance(metadata, KvplugWorkerMetadata) else (),
                stats=stats.data if isinstance(stats, KvplugStats) and stats.data else None,
            )
        )

    def take_events(self) -> Iterator[KVCacheEvent]:
        events, self._worker_events = self._worker_events, []
        for event in (*events, *self.connector.take_events()):
            yield _event(event)

    def get_stats(self) -> KvplugStats | None:
        snapshot, ours = self.connector.get_stats(), self._stats.take()
        if ours is not None:
            total = TransferStats.from_snapshot(ours)
            if snapshot:
                total.merge(snapshot)
            snapshot = total.snapshot()
        return KvplugStats(data=dict(snapshot)) if snapshot else None

    # -- at start ------------------------------------------------------------------------------

    def bind_block_pool(self, pool: BlockPool | None) -> None:
        """vLLM calls this before the first request."""
        self._pool = pool

    def set_handshake_metadata(self, metadata: dict[tuple[int, int], Any]) -> None:
        """``metadata`` is by (pipeline rank, tensor rank).

        A MultiConnector passes the metadata of its first child that has any to all of its children.
        """
        ours = {
            pipeline_rank * self._tensor_parallel_size + tensor_rank: decode(each.payload)
            for (pipeline_rank, tensor_rank), each in metadata.items()
            if isinstance(each, KvplugHandshakeMetadata) and each.which == self._which
        }
        if metadata and not ours:
            _log.info("vLLM passes a sibling's handshake metadata, not that of %s", self._which)
        self.connector.set_xfer_handshake_metadata(ours)


@attrs.frozen
class _Match:
    """A load that the connector offers for a request."""

    num_computed_tokens: int
    """The first token to load."""
    in_background: bool
    settles: bool
    """vLLM waits for the load, which ends within its step."""


def _scheduled(output: VllmSchedulerOutput) -> Iterator[ScheduledRequest]:
    new, cached = output.scheduled_new_reqs, output.scheduled_cached_reqs
    computed = [(request.req_id, request.num_computed_tokens) for request in new]
    computed += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    for request_id, num_computed_tokens in computed:
        yield ScheduledRequest(
            request_id=request_id,
            num_computed_tokens=num_computed_tokens,
            num_scheduled_tokens=output.num_scheduled_tokens[request_id],
        )


def _event(event: CacheEvent) -> KVCacheEvent:
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash as external

    if event.kind == "stored":
        return event_of(
            BlockStored,
            event.owner,
            block_hashes=[external(each) for each in event.block_hashes],
            parent_block_hash=None if event.parent_hash is None else external(event.parent_hash),
            token_ids=list(event.token_ids),
            block_size=event.block_size,
            lora_id=None,
            lora_name=event.adapter or None,
            medium=event.medium or None,
        )
    if event.kind == "removed":
        return event_of(
            BlockRemoved,
            event.owner,
            block_hashes=[external(each) for each in event.block_hashes],
            medium=event.medium or None,
        )
    return AllBlocksCleared()
