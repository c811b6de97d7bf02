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
    KvplugHandshakeMetadata,
    KvplugMetadata,
    KvplugStats,
    KvplugWorkerMetadata,
)
from kvplug_vllm.pending import PendingRequests
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
"""Types of hints: their names come from outside."""
_NULL_BLOCK = 0
"""The first block of vLLM's pool, which no request gets: it stands where a request has no block."""


class SchedulerSide:
    """One SchedulerConnector in vLLM's scheduler.

    It also tracks the requests that vLLM waits for (:class:`PendingRequests`), and sends them to the workers:
    a worker must not pass on a name that vLLM does not wait for, since that would end vLLM's engine.

    And it ensures that KV whose load failed is not used. vLLM assumes at once that a load which its step
    needs has succeeded; until the step is reported, other requests wait for it (:class:`StepLoads`). If vLLM
    cannot rewind, that report is too late for the request itself: the next step is already planned, or
    computes the missing tokens at the wrong position. If vLLM replays whole steps that it has captured, no
    call between layers can wait. So there the connector is asked to load everything in the background. If it
    cannot, the request waits as well: vLLM is told that the load is in the background,
    and the workers name the request as received in the step that loads, which waits for the load. So it does
    if vLLM has not bound its pool of blocks, from which the blocks of a failed load are evicted.
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
            fails_requests: vLLM is told of failed loads by their requests, not by their blocks.
        """
        self.connector = connector
        self._groups = tuple(groups)
        self._fails_requests = fails_requests
        self._loading: dict[str, frozenset[int]] = {}
        """The blocks of requests that load, if their failures are told by request."""
        self._ended: set[str] = set()
        """Requests that have ended since the last report: it may say that their load failed."""
        self._which = which
        self._tensor_parallel_size = tensor_parallel_size
        self._loads_in_step = loads_in_step
        self._pool: BlockPool | None = None
        self._tables = block_tables()
        self._requests = Requests()
        self._step = 0
        self._answers: dict[str, _Answer] = {}
        """Answers about requests whose blocks are not yet allocated."""
        self._pending = PendingRequests()
        self._step_loads = StepLoads()
        self._counted = CountedLoads()
        self._unloaded = frozenset[int]()
        """Blocks that vLLM counts on in the next step, and that the connector does not load."""
        self._worker_events: list[CacheEvent] = []
        self._stats = TransferStats()
        """What the adapter itself counts."""
        self._ignored_hints: set[str] = set()

    # -- one request ---------------------------------------------------------------------------

    def on_new_request(self, request: VllmRequest) -> None:
        self._note_hints(request)
        self.connector.on_new_request(self._requests[request])

    def _note_hints(self, request: VllmRequest) -> None:
        """Count hints of an orchestrator (since vLLM 0.32): no connector of kvplug follows any."""
        hints = getattr(request, "kv_hints", None)
        for action in () if hints is None else hints.actions:
            self._stats.fail("hint", "ignored")
            if action.action_type not in self._ignored_hints and len(self._ignored_hints) < _MAX_LOGGED:
                self._ignored_hints.add(action.action_type)
                _log.warning(
                    "KV hints of the type %.100r are ignored (and counted): KV is loaded when a request needs"
                    " it, and kept by its use",
                    action.action_type,
                )

    def get_num_new_matched_tokens(
        self, request: VllmRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.skip_reading_prefix_cache:
            return 0, False  # it needs the outputs of all its tokens; some releases of vLLM ask all the same
        asked = self._requests[request]
        if self._step_loads.are_shared_by(asked, num_computed_tokens):
            return None, False  # not yet: the next step knows whether the load has succeeded
        found, in_background = self.connector.get_num_new_matched_tokens(asked, num_computed_tokens)
        if found is None:
            return None, False
        left = request.num_tokens - num_computed_tokens
        if not 0 <= found <= left:
            _log.error(
                "the connector would load %d tokens of %s, where %d are left: none are loaded",
                found,
                request.request_id,
                left,
            )
            found = 0
        # vLLM computes the last token again only after a load in the background.
        settles = not in_background and (not self._loads_in_step or self._pool is None or found == left)
        self._answers[request.request_id] = _Answer(num_computed_tokens, in_background, settles)
        return found, bool(found) and (in_background or settles)

    def update_state_after_alloc(
        self, request: VllmRequest, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        request_id, block_ids = request.request_id, self._block_ids(blocks.get_block_ids())
        answer = self._answers.pop(request_id, None)
        start = 0 if answer is None else answer.num_computed_tokens
        waits = answer is not None and (answer.in_background or answer.settles)
        settles = answer is not None and answer.settles
        try:
            self.connector.update_state_after_alloc(self._requests[request], block_ids, num_external_tokens)
        except Exception as e:  # which would end vLLM's engine
            _log.error("nothing is loaded for request %s: %s", request_id, e)
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
        """By vLLM's ``CacheHitSource``; what it has no name for is its ``EXTERNAL_UNSPECIFIED``."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        names = {"host": CacheHitSource.HOST, "disk": CacheHitSource.DISK, "peer": CacheHitSource.P2P}
        found: dict[Any, int] = {}
        said = self.connector.get_hit_sources(self._requests[request], num_external_tokens)
        for source, count in said.items():
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
        self._answers.pop(request_id, None)
        self._ended.add(request_id)
        return self._pending.end(request_id, keeps=keeps), params

    def _block_ids(self, tables: Iterable[Iterable[int]]) -> BlockIds:
        """vLLM's block tables in kvplug's words: what a window has freed is vLLM's null block there."""
        return tuple(
            tuple(table)
            if group.window is None
            else tuple(NO_BLOCK if block == _NULL_BLOCK else block for block in table)
            for table, group in zip(tables, self._groups, strict=True)
        )

    def _blocks_from(self, num_computed_tokens: int, block_ids: BlockIds) -> frozenset[int]:
        """The blocks that a load after these tokens writes into."""
        return frozenset(
            block
            for table, group in zip(block_ids, self._groups, strict=True)
            for block in table[num_computed_tokens // group.block_size :]
        ) - {NO_BLOCK}

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: VllmSchedulerOutput) -> KvplugMetadata:
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
        return KvplugMetadata(
            plan=plan,
            unloaded=unloaded,
            begun=frozenset(request.req_id for request in output.scheduled_new_reqs),
            preempted=preempted,
            newly_pending=self._pending.begin_step(output.num_scheduled_tokens),
        )

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        said, stats = output.kv_connector_worker_meta, output.kv_connector_stats
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
        if isinstance(said, KvplugWorkerMetadata):
            self._worker_events += dict.fromkeys(said.events)  # several workers may report the same event
        self.connector.update_connector_output(
            WorkerOutput(
                finished_sending=sent,
                finished_recving=received,
                invalid_block_ids=invalid,
                worker_metadata=said.parts if isinstance(said, KvplugWorkerMetadata) else (),
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
            pipeline_rank * self._tensor_parallel_size + tensor_rank: decode(said.payload)
            for (pipeline_rank, tensor_rank), said in metadata.items()
            if isinstance(said, KvplugHandshakeMetadata) and said.which == self._which
        }
        if metadata and not ours:
            _log.info("vLLM passes a sibling's handshake metadata, not that of %s", self._which)
        self.connector.set_xfer_handshake_metadata(ours)


@attrs.frozen
class _Answer:
    """The connector's answer about a request's load."""

    num_computed_tokens: int
    """The first token that it would load."""
    in_background: bool
    settles: bool
    """vLLM waits for it, and the connector ends it within its step."""


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
