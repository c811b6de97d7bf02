"""The scheduler side of the connector "lookup"."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from kvplug import Config
from kvplug.engine import (
    BlockIds,
    CacheEvent,
    ChainMemo,
    ConnectorContext,
    Plain,
    Request,
    RequestEnd,
    Role,
    SchedulerConnector,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.net.wire import from_plain
from kvplug.net.wire.token_ids import pack_tokens
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Store, Timeout
from kvplug_lookup.connector.block_events import BlockEvents
from kvplug_lookup.connector.doubts import DoubtedBlocks
from kvplug_lookup.connector.engines import EngineSources
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.kept import KeptBlocks
from kvplug_lookup.connector.keys import PromptChains, Shard, namespace_of, shard_of
from kvplug_lookup.connector.load_cost import LoadCostModel, num_tokens_timed
from kvplug_lookup.connector.matching import Matcher, Runs, Search, first_of, tokens_of
from kvplug_lookup.connector.options import LookupConnectorOptions
from kvplug_lookup.connector.plan import LoadPlan, StepPlan, StepReport
from kvplug_lookup.connector.publisher import EventPublisher, open_events
from kvplug_lookup.connector.replica import Replica
from kvplug_lookup.connector.save_planner import SavePlanner
from kvplug_lookup.connector.sources import AskedSource, Source, followed, peers_of
from kvplug_lookup.connector.tracked import Tracked

_log = logging.getLogger(__name__)


class LookupScheduler(SchedulerConnector):
    """Promises pages that every worker can load, and plans loads and saves. Touches no tensor, never waits.

    It looks for pages in *sources*, in this order: the stores of the config, then the peer engines. It keeps
    replicas of stores that live in workers, and asks stores that every process reaches.
    """

    supports_hma = True

    @classmethod
    def needs_layer_hooks(cls, config: Config, options: LookupConnectorOptions) -> bool:
        # Pages in a cache on a device are saved when the step is complete, and background loads end before
        # their request is in a step.
        return config.role is not Role.PRODUCER and not options.async_load

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        options = context.options
        self._groups = Groups(context.cache)
        self._block_size = self._groups.block_size
        self._granule = self._groups.layout.granule
        self._shard = shard_of(context.cache, context.model, context.parallelism, options.page_tokens)
        self._page_tokens = self._shard.format.page_tokens
        self._chains = functools.partial(PromptChains, namespace_of(context.model), memo=ChainMemo())
        role = context.config.role
        self._saves = role in (Role.PRODUCER, Role.BOTH)
        self._loads = role in (Role.CONSUMER, Role.BOTH)
        self._in_background = options.async_load or context.loads_in_background
        self._tracked: dict[str, Tracked] = {}
        self._planned_loads: list[LoadPlan] = []
        self._forget: list[str] = []
        self._kept = KeptBlocks(context.parallelism.num_workers, context.cache.num_blocks)
        self._doubts = DoubtedBlocks(self._groups)
        self._last_report = -1
        """The latest step with a worker's report; -1: none."""
        self._reset = b""
        """If set, the next plan makes the workers forget everything. New bytes for each reset."""
        self._reset_step: int | None = None
        """The step of the last reset, until all workers have reported it."""
        self._num_reset = 0
        """How many workers have reported it."""
        self._salt = b""
        """The salt of keys in stores shared with other engines, since the last reset."""
        self._costs = LoadCostModel()
        self._events: BlockEvents | None = None
        self.publisher: EventPublisher | None = None
        """The publisher of events about blocks; ``None`` if the options name no address."""
        self._sources: list[Source] = []
        self._matcher = Matcher(
            self._sources,
            context.parallelism.num_workers,
            options.wait_timeout_s,
            context.stats,
        )
        self._engines = EngineSources(context)
        self._media: dict[str, str] = {}
        """The medium of each store of the config; other sources are peer engines."""
        self._own: list[Source] = []
        """The sources that this engine's workers put pages into."""
        self._shards: dict[int, Shard] = {}
        """The known shards by worker; each worker reports its own."""
        workers = context.parallelism.num_workers
        if context.parallelism.tensor_size == workers:
            self._shards = {rank: attrs.evolve(self._shard, tensor_rank=rank) for rank in range(workers)}
        try:
            if self._saves and options.events is not None:
                self._events, self.publisher = open_events(context, self._page_tokens, self._block_size)
            self._open_sources()
            self._save_planner = SavePlanner(
                self._groups,
                page_tokens=self._page_tokens,
                own=self._own,
                wait_timeout_s=options.wait_timeout_s,
                kept=self._kept,
                doubts=self._doubts,
                events=self._events,
                spans=context.spans,
            )
        except BaseException:
            self.shutdown()
            raise

    def _open_sources(self) -> None:
        context = self._context
        for name in context.config.stores:
            source = self._source_of(name)
            if source is not None:
                self._sources.append(source)
        self._matcher.num_stores = len(self._sources)
        self._own = list(self._sources) if self._saves else []
        self._name_series()
        if not self._loads:
            return
        for name, address in peers_of(context.config, self._saves or bool(self._sources)):
            self._sources.append(followed(context, name, address))
        self._engines.follow()

    def _source_of(self, name: str) -> Source | None:
        """Make the source of a store of the config; ``None`` if nothing can be loaded from it."""
        context = self._context
        store: Store = context.open_store(name)
        self._media[name] = store.medium
        if store.is_shared:
            workers = context.parallelism.num_workers
            return AskedSource(name, store, workers, context.options.wait_timeout_s)
        store.abort()
        is_first = name == context.config.stores[0]
        listener = self._events.apply if is_first and self._events is not None else None
        if not self._saves or not (self._loads or listener is not None):
            return None  # it lives in workers that save nothing, or this engine loads nothing
        return followed(context, name, listener=listener)

    def take_events(self) -> list[CacheEvent]:
        return [] if self._events is None else self._events.take()

    @property
    def replicas(self) -> list[Replica]:
        """The replicas of the stores of this engine's workers and the peers' workers."""
        return [replica for source in self._sources for replica in source.replicas]

    # -- at start and at the end ---------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Plain]) -> None:
        for rank, report in metadata.items():
            if isinstance(report, Mapping) and "shard" in report:
                self._note_shard(rank, from_plain(report["shard"], Shard, "shard of a model"))

    def _note_shard(self, rank: int, shard: Shard) -> None:
        """Note the part of the model that a worker holds."""
        self._shards[rank] = shard
        self._name_series()

    def _name_series(self) -> None:
        for source in self._sources:
            if isinstance(source, AskedSource):
                for rank, shard in self._shards.items():
                    if rank < len(source.series):
                        source.series[rank] = shard.series(source.store.seal.id, self._salt)

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._context.config.connect_timeout_s)
        self._engines.wait_until_known(deadline)
        for replica in self.replicas:
            replica.wait_until_ready(deadline)

    def shutdown(self) -> None:
        self._context.peers.close()  # wakes threads that are connecting
        self._engines.close()
        for source in self._sources:
            source.close()
        if self.publisher is not None:
            self.publisher.close()
        self._context.close()

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def get_status(self) -> Mapping[str, Plain]:
        return {"num_held": len(self._kept)}

    # -- of one request ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._track(request)

    def _track(self, request: Request) -> Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            self._engines.update(self._sources)
            tracked = Tracked(
                request,
                self._chains(request.extra, self._page_tokens),
                self._search(),
                has_reader=not self._loads or bool(request.params.get("do_remote_decode")),
            )
            self._tracked[request.request_id] = tracked
        tracked.request = request
        return tracked

    def _search(self) -> Search:
        """Begin a search that sees everything saved before."""
        return self._matcher.begin() if self._loads else Search([])

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._track(request)
        tracked.ask(num_computed_tokens)
        if not self._loads or tracked.has_failed:
            return 0, False
        usable = (len(request.token_ids) - 1) // self._block_size * self._block_size
        if usable <= num_computed_tokens or num_computed_tokens % self._granule:
            return 0, False
        if self._reset or self._reset_step is not None:
            return 0, False  # the stores may still have pages from before the reset
        begun, trace_id = time.perf_counter(), self._context.spans.trace_id_of(request.request_id)
        found = self._held(tracked, num_computed_tokens, usable)
        if found is None:
            return None, False
        end, sources = found
        end = end // self._block_size * self._block_size
        # Both ends may lie inside a page. Together, at most one page is moved in vain.
        before, after = num_computed_tokens % self._page_tokens, -end % self._page_tokens
        if before + after > self._page_tokens:
            end = (end - end % self._page_tokens) // self._block_size * self._block_size
        new = end - num_computed_tokens
        reason = None
        if new <= 0:
            reason = "expired" if tracked.search.has_expired else "absent"
        elif not self._should_load(sources):
            reason = "not_worth_it"
        is_first, tracked.is_matched = not tracked.is_matched, True
        if is_first and reason is None:
            seconds = time.perf_counter() - begun
            self._context.stats.record("match", seconds=seconds, tokens=new, trace_id=trace_id)
        elif is_first and reason is not None:
            self._context.stats.fail("match", reason)
        if reason is not None:
            return 0, False
        tracked.sources = sources
        return new, self._in_background

    def _held(self, tracked: Tracked, start: int, usable: int) -> tuple[int, tuple[Runs, ...]] | None:
        """The end of the tokens from ``start`` on that every worker can load, and their sources; ``None``:
        not known yet.
        """
        page_tokens = self._page_tokens
        # The last page may reach beyond the usable tokens: only its first tokens are loaded.
        reach = min(len(tracked.request.token_ids), usable + page_tokens - 1)
        chains = tracked.chains.upto(tracked.request.token_ids, reach)
        first, last = start // page_tokens, min(len(chains), -(-usable // page_tokens))
        found = self._matcher.held(tracked.search, chains[:last], first)
        if found is None:
            return None
        count, sources = found
        if count < last - first:  # after a preemption: pages that no store has are computed and saved again
            tracked.num_saved = min(tracked.num_saved, first + count)
        return (first + count) * page_tokens, sources

    def _should_load(self, sources: tuple[Runs, ...]) -> bool:
        if self._context.options.load_policy == "always" or not sources:
            return True
        num_tokens: dict[str, int] = {}
        for name, count in sources[0]:
            num_tokens[name] = num_tokens.get(name, 0) + count * self._page_tokens
        return self._costs.should_load(num_tokens, num_tokens.keys() - self._media.keys())

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._track(request)
        tracked.allocate(num_external_tokens)
        if num_external_tokens == 0:
            return
        start = tracked.num_computed_at_match
        end = start + num_external_tokens
        tracked.is_loading = self._in_background
        first, last = start // self._page_tokens, -(-end // self._page_tokens)
        tokens = request.token_ids[first * self._page_tokens : last * self._page_tokens]
        self._planned_loads.append(
            LoadPlan(
                request_id=request.request_id,
                first_page=first,
                parent=tracked.chains.parent_of(first),
                packed_tokens=pack_tokens(tokens),
                block_ids=self._groups.tables(block_ids, end),
                start=start,
                end=end,
                sources=tuple(first_of(runs, last - first) for runs in tracked.sources),
                in_background=self._in_background,
                traceparent=self._context.spans.traceparent_of(request.request_id),
            )
        )
        # Pages that the first store holds, or that are loaded whole, need no save, except for another engine.
        if not tracked.has_reader:
            tracked.num_saved = max(tracked.num_saved, end // self._page_tokens)

    def get_hit_sources(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not tracked.sources:
            return super().get_hit_sources(request, num_external_tokens)
        start = tracked.num_computed_at_match
        runs = tracked.sources[0]  # other workers may load from other sources
        found: dict[str, int] = {}
        for name, num in tokens_of(runs, self._page_tokens, start, start + num_external_tokens):
            medium = self._media.get(name, "peer")
            found[medium] = found.get(medium, 0) + num
        return found

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._tracked.pop(request.request_id, None)
        # Workers never report a load that is in no step's plan yet, so nothing may wait for it.
        was_planned = self._drop_loads({request.request_id})
        if tracked is not None and tracked.is_loading and not was_planned:
            self._forget.append(request.request_id)
            return True, None
        if tracked is None or self._kept.is_read(tracked.saved_in) or not any(block_ids):
            self._forget.append(request.request_id)
            return False, None
        if not self._kept.keep(request.request_id, block_ids) or end is not RequestEnd.FINISHED:
            self._forget.append(request.request_id)  # the blocks are free when the workers stop reading
        return True, None

    def _drop_loads(self, request_ids: Collection[str]) -> bool:
        """Drop loads for these requests that are in no step's plan yet. Return whether there were any."""
        before = len(self._planned_loads)
        self._planned_loads = [load for load in self._planned_loads if load.request_id not in request_ids]
        return len(self._planned_loads) != before

    # -- of the whole --------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """In the next step the workers forget all saved pages, and use new keys in stores shared with other
        engines.

        No page of theirs is promised until they have reported the reset. Returns ``False`` on a consumer,
        unless each producer was reset before or was never connected.
        """
        if not self._saves:
            self._engines.update(self._sources)
            held = [source.name for source in self._sources if not source.is_cleared]
            if held:
                _log.warning(
                    "the cache is not reset: this engine loads KV that its producer holds; first"
                    " reset that engine (%s)",
                    ", ".join(held),
                )
            return not held
        self._reset = os.urandom(16)
        for tracked in self._tracked.values():
            tracked.is_old = True
            tracked.restart_saves()
        return True

    def has_pending_push_work(self) -> bool:
        """Whether steps are needed without requests: to send a reset, or to get the workers' reports."""
        return bool(self._reset or self._kept) or any(source.is_expecting for source in self._own[:1])

    def _note_reset(self) -> None:
        self._num_reset += 1
        if self._num_reset == self._context.parallelism.num_workers:
            self._reset_step = None
            for source in self._own:
                source.drop()

    # -- of one step ---------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        forget = list(self._forget)
        if output.preempted_request_ids:
            # A request preempted after its allocation has lost its blocks: nothing may be loaded into them.
            scheduled = {one.request_id for one in output.scheduled}
            self._drop_loads(output.preempted_request_ids - scheduled)
        for request_id in output.preempted_request_ids:
            if (tracked := self._tracked.get(request_id)) is not None:
                tracked.preempt(self._search(), is_read=self._kept.is_read(tracked.saved_in))
                forget.append(request_id)
        if self._reset:
            self._salt = self._reset
            self._name_series()
        self._engines.update(self._sources)
        left, joined = self._engines.take_changes()
        plan = StepPlan(
            step=output.step,
            last_report=self._last_report,
            loads=tuple(self._planned_loads),
            saves=tuple(self._save_planner.plans(output, self._tracked)) if self._saves else (),
            forget=tuple(forget),
            ended=self._kept.take_new(),
            reset=self._reset,
            doubted=self._doubts.take(),
            num_tokens=num_tokens_timed(output, self._tracked),
            left=left,
            joined=joined,
        )
        self._planned_loads, self._forget = [], []
        if self._reset:
            self._reset, self._reset_step, self._num_reset = b"", output.step, 0
        return plan.to_plain()

    def update_connector_output(self, output: WorkerOutput) -> None:
        self._kept.free(output.finished_sending)
        self._doubts.report(output.invalid_block_ids)
        for request_id in output.finished_recving:
            if request_id in self._tracked:
                self._tracked[request_id].is_loading = False
        for plain in output.worker_metadata:
            self._take_report(StepReport.from_plain(plain))

    def _take_report(self, report: StepReport) -> None:
        """Apply one worker's report after a step."""
        rank = report.rank
        self._last_report = max(self._last_report, report.step)
        if report.shard is not None:
            self._note_shard(rank, report.shard)
        if report.reset and report.step == self._reset_step:
            self._note_reset()
        if report.costs:
            self._costs.update(rank, report.costs)
        for source in self._sources:
            if source.name in report.stalled:
                source.doubt()
            if source.name in report.slow:
                source.rest()
            if source.name in report.refused:
                source.refuse()
        self._matcher.note_unreadable(report.unreadable)
        for source in self._own[:1]:
            source.settle(report.settled, rank)
        self._kept.note_read(rank, report.read_until)
        requests = self._tracked
        for request_id in requests.keys() & report.unsaved.keys():
            requests[request_id].miss(report.unsaved[request_id])
        for request_id in requests.keys() & report.failed_loads:
            requests[request_id].has_failed = True
            requests[request_id].restart_saves()
        for request_id in requests.keys() & report.spoilt_saves:
            requests[request_id].restart_saves()
