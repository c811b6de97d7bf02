"""The worker side of the connector "lookup"."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvplug import ClosedError
from kvplug.engine import (
    ConnectorContext,
    LayoutError,
    PageBlocks,
    PeerLink,
    Plain,
    Role,
    StalledError,
    WorkerConnector,
)
from kvplug.net.wire import to_plain
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, DeviceMark, PageEvent, Timeout
from kvplug_lookup.connector.groups import Groups
from kvplug_lookup.connector.keys import hello_of, shard_of
from kvplug_lookup.connector.load import Load, Part
from kvplug_lookup.connector.load_cost import MeasuredCosts
from kvplug_lookup.connector.peers import PeerStore
from kvplug_lookup.connector.plan import StepPlan, StepReport
from kvplug_lookup.connector.save import Saver, Tier
from kvplug_lookup.connector.serve import Service
from kvplug_lookup.connector.sources import peers_of
from kvplug_lookup.connector.warnings import CountedWarnings, at_location

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)


class LookupWorker(WorkerConnector):
    """Saves the pages that its engine computes into stores, and loads pages from stores and peer engines.

    A producer saves, and serves its first store to peers. A consumer loads from the workers of its own rank
    in peer engines, and from stores that every process reaches. The role "both" does all of this."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context = context
        config, options = context.config, context.options
        self._groups = Groups(context.cache)
        self._layer_names = self._groups.layer_names
        self._index_of = {name: index for index, name in enumerate(self._layer_names)}
        self._layout = self._groups.layout
        self.shard = shard_of(context.cache, context.model, context.parallelism, options.page_tokens)
        """The part of the model's KV in its pages."""
        self._page_tokens = self.shard.format.page_tokens
        self._caches: tuple[Tensor, ...] = ()
        self._views: Sequence[Sequence[Tensor]] = ()
        self._plan = StepPlan()
        self._loads: dict[str, Load] = {}
        """Loads of this step, and in the background."""
        self._unsettled: list[Load] = []
        """Failed loads whose blocks may still be written."""
        self._num_evicted: dict[str, int] = {}
        """Pages evicted by stores without events that were counted."""
        self._ended_at: dict[str, float] = {}
        """By source, when the last page of ended loads arrived."""
        self._step = 0
        self._step_began: DeviceMark | None = None
        """Set if the step's time measures prefill."""
        self._suspect: dict[int, int] = {}
        """Blocks that must not be saved from, each with a step. Blocks of failed loads: later steps may have
        been planned before the scheduler side received the report. With several workers, blocks of any load
        that its step needs: it may have failed at another worker. And blocks that the plan doubts."""
        self._doubts_loads = context.parallelism.num_workers > 1
        self._failed_blocks: set[int] = set()
        self._news = StepReport()
        """For the next report."""
        self._ended: set[str] = set()
        """Requests that ended, whose blocks are kept until the stores have read their pages."""
        self._read_until = -1
        """The last step whose pages were reported as read."""
        self._has_sent_shard = False
        self._costs = MeasuredCosts()
        self._warnings = CountedWarnings(_log)
        self._saves = config.role in (Role.PRODUCER, Role.BOTH)
        loads = config.role in (Role.CONSUMER, Role.BOTH)
        self.tiers: dict[str, Tier] = {}
        """The stores that it saves into or loads from, by name, in the order of the config."""
        self.saver: Saver | None = None
        """Saves the pages, once the caches are registered; ``None`` on a consumer."""
        self._service: Service | None = None
        self.peers: dict[str, PeerStore] = {}
        """The peer engines' workers that it loads from, by name."""
        self.last_route = ""
        """The source and transport of the last load, for display."""
        self.contact = ""
        """The contact for peers; empty if this worker serves none."""
        try:
            self._open_stores()
            if loads:
                for name, address in peers_of(config, self._saves or bool(self.tiers)):
                    self.peers[name] = PeerStore(context, address, self.shard, name)
            if self._saves and not self.first_tier.store.is_shared:
                tier = self.first_tier
                hello = hello_of(self.shard, context.model, tier.name, tier.store.seal.id)
                self._service = Service(context.peers, tier, hello)
                self.contact = self._service.contact
                if context.members is not None:
                    context.members.announce(self.contact)
        except BaseException:
            self.shutdown()
            raise

    def _open_stores(self) -> None:
        for name in self._context.config.stores:
            store = self._context.open_store(name)
            if self._saves or store.is_shared:
                self.tiers[name] = Tier(name, store, self.shard.series(store.seal.id))
                if store.has_events and not store.is_shared:
                    store.subscribe(self._count_evicted)
            else:
                store.abort()  # a store in this process that would stay empty

    def _count_evicted(self, event: PageEvent) -> None:
        if event.kind == "removed" and event.reason is PageEvent.Removal.EVICTED:
            self._context.stats.record("evict", count=len(event.keys))

    @property
    def first_tier(self) -> Tier:
        """The store that pages are saved into."""
        return next(iter(self.tiers.values()))

    @property
    def link(self) -> PeerLink | None:
        """The link to the first connected peer, if there is one."""
        return next((peer.link for peer in self.peers.values() if peer.link is not None), None)

    # -- at start and at the end ---------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        missing = [name for name in self._layer_names if name not in kv_caches]
        if missing:
            raise LayoutError(
                f"no cache was registered for {', '.join(missing)}, which the cache config names"
            )
        for name in self._layer_names:
            self._layout.check(kv_caches[name])
            dtype = str(kv_caches[name].dtype).removeprefix("torch.")
            if dtype != self._context.model.dtype:
                stated = self._context.model.dtype
                raise LayoutError(f"the cache of {name} has the dtype {dtype}, but the model has {stated}")
        self._caches = tuple(kv_caches[name] for name in self._layer_names)
        self._views = self._layout.page_views(self._caches)
        blocks = PageBlocks(self.shard.format, self._views, (), 0, 0)
        for tier in self.tiers.values():
            tier.store.register_memory(blocks)
        if self._saves:
            tiers = list(self.tiers.values())
            self.saver = Saver(self._context, tiers, self._groups, self._views, self._warnings)

    def get_handshake_metadata(self) -> Plain:
        return {"shard": to_plain(self.shard)}

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._context.config.connect_timeout_s)
        for peer in self.peers.values():
            peer.connected(deadline, retry=True)

    def shutdown(self) -> None:
        # First wake waiting threads, then close what may need a moment to end.
        closing = ClosedError("the connector was shut down")
        if self._context.members is not None:
            self._context.members.close()
        for load in list(self._loads.values()):
            load.fail(closing)
        self._context.peers.close()
        for peer in self.peers.values():
            peer.close()
        if self.saver is not None:
            self.saver.close()
        if self._service is not None:
            self._service.close()
        for tier in self.tiers.values():
            tier.store.close(timeout=1.0)
        if self.saver is not None:
            self.saver.join()
        self._warnings.flush(at_once=True)
        self._context.close()

    # -- each step -----------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
            if (load := self._loads.get(request_id)) is not None:
                self._wait_settled(load)  # the engine uses the blocks again when this returns

    def _wait_settled(self, load: Load) -> None:
        """Wait until nothing is copied into the load's blocks: at most the time of one copy.

        Raises:
            StalledError: the copy does not end, so the engine must not use the blocks.
        """
        timeout_s = self._context.config.timeout_s
        if not load.wait_settled(timeout_s):
            raise StalledError(
                f"blocks of request {load.request_id!r:.100} are still being written from {load.route},"
                f" {timeout_s:g} s after the load ended: restart this engine and the process of that source"
            )

    def _forget(self, request_id: str) -> None:
        if self.saver is not None:
            self.saver.forget(request_id)
        load = self._loads.get(request_id)
        if load is not None:
            load.fail(ClosedError(f"request {request_id!r:.100} ended or was preempted"))

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._plan = plan = StepPlan.from_plain(metadata)
        self._step = plan.step
        while self._unsettled:  # from here on the engine recomputes their blocks
            self._wait_settled(self._unsettled[0])
            del self._unsettled[0]
        waits = self.has_connector_metadata()  # then its time does not measure prefill
        self._step_began = self._timed_mark() if plan.num_tokens and self._caches and not waits else None
        self._suspect = {block: step for block, step in self._suspect.items() if step > plan.last_report}
        self._suspect |= dict.fromkeys(plan.doubted, plan.step)
        if plan.reset and self.saver is not None:
            series = {
                name: self.shard.series(tier.store.seal.id, plan.reset) for name, tier in self.tiers.items()
            }
            self.saver.reset(series)
        for request_id in plan.forget:
            self._forget(request_id)
        for name in plan.left:
            self._leave(name)
        for name, contacts in plan.joined:
            self.peers[name] = PeerStore(self._context, dict(enumerate(contacts)), self.shard, name)
        self._ended.update(plan.ended)
        if self.saver is not None:
            self.saver.begin(plan.step, plan.saves)

    def has_connector_metadata(self) -> bool:
        return any(not load.in_background for load in self._plan.loads)

    def _leave(self, name: str) -> None:
        """Drop a peer engine that has left. Its loads fail."""
        peer = self.peers.pop(name, None)
        if peer is not None:
            peer.close_in_background()
        self._ended_at.pop(name, None)
        self._news.refused.discard(name)
        self._costs.forget(name)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._plan = StepPlan()

    def start_load_kv(self) -> None:
        if not self._plan.loads:
            return
        if not self._caches:
            raise LayoutError("there is no cache to load into: call register_kv_caches first")
        # A queued forward pass of the blocks' previous requests may still use them.
        free = DeviceMark(self._caches[0].device)
        for plan in self._plan.loads:
            load = Load(
                plan, self._context, self._groups, self._views, self._page_tokens, self.progressed_at, free
            )
            self._loads[load.request_id] = load
            if self._doubts_loads and not load.plan.in_background:
                self._suspect |= dict.fromkeys(load.block_ids, self._step)
            for part in load.parts:
                self._begin_part(load, part)

    def progressed_at(self, source: str) -> float:
        """When something last arrived from a source, for any load."""
        parts = [part for load in self._loads.values() for part in load.parts if part.source == source]
        return max([self._ended_at.get(source, 0.0), *(part.job.progressed_at for part in parts if part.job)])

    def _begin_part(self, load: Load, part: Part) -> None:
        tier, peer = self.tiers.get(part.source), self.peers.get(part.source)
        if tier is not None:
            load.begin(part, tier.store, tier.series)
        elif peer is not None:
            peer.use(
                lambda store, series: load.begin(part, store, series),
                lambda error: load.give_up(part, error),
                load.deadline,
            )
        else:
            load.give_up(part, ClosedError(f"this worker does not have the source {part.source!r}"))

    def wait_for_layer_load(self, layer_name: str) -> None:
        for load in self._loads_in_step():
            load.wait_for_layer(self._index_of[layer_name])

    def _loads_in_step(self) -> list[Load]:
        return [load for load in self._loads.values() if not load.plan.in_background]

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        return None  # pages are saved when the step is complete

    def wait_for_save(self) -> None:
        if self._step_began is not None:
            self._costs.note_step(self._plan.num_tokens, self._step_began, self._timed_mark())
            self._step_began = None
        self._settle_loads()
        if self.saver is not None:
            self.saver.end()

    def _timed_mark(self) -> DeviceMark:
        return DeviceMark(self._caches[0].device, timed=True)

    def _settle_loads(self) -> None:
        """End the loads that this step needs. The first call after the step, whichever it is, does this."""
        for load in self._loads_in_step():
            load.wait_for_layer(len(self._layer_names) - 1)
            self._end(load)
        # Requests may share blocks, so pages gathered from the blocks of a failed load are wrong. So are
        # pages computed from them, here and, since workers share the model, at every other worker. The
        # scheduler side plans these saves again.
        if self.saver is not None and self._suspect:
            self._news.spoilt_saves |= self.saver.spoil(frozenset(self._suspect))

    def _end(self, load: Load) -> None:
        """End a load. If it failed, its blocks are not used or saved."""
        request_id = load.request_id
        del self._loads[request_id]
        for part in load.parts:
            if part.job is not None:
                ended_at = max(self._ended_at.get(part.source, 0.0), part.job.progressed_at)
                self._ended_at[part.source] = ended_at
        if not load.wait_settled(self._context.options.stall_timeout_s):
            self._unsettled.append(load)
        load.end()
        if load.error is not None:
            self._note_failure(load)
            return
        self.last_route = load.route
        for part in load.parts:
            if part.job is not None:
                ended = part.ended_at or time.monotonic()
                self._costs.note_load(part.source, part.count * self._page_tokens, part.begun_at, ended)
            if self.saver is not None and self._context.options.promote:
                self.saver.promote(part.source, list(zip(*load.pages_of(part), strict=True)))

    def _note_failure(self, load: Load) -> None:
        request_id = load.request_id
        failed = load.failed_block_ids
        self._failed_blocks |= failed
        self._suspect |= dict.fromkeys(failed, self._step)
        news = self._news
        news.failed_loads.add(request_id)
        news.unreadable += load.unreadable()
        if load.stalled is not None:
            news.stalled.add(load.stalled)
        if load.slow is not None:
            news.slow.add(load.slow)
        news.refused |= {name for name, peer in self.peers.items() if peer.is_refused}
        if self.saver is not None:
            self.saver.forget(request_id)
        if not isinstance(load.error, ClosedError):
            tier = self.tiers.get(load.failed_source)
            where = at_location(load.failed_source, "" if tier is None else tier.store.location)
            count = load.plan.end - load.plan.start
            self._warnings.warn(count, f"tokens from {where} could not be loaded: {load.reason}")

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        self._settle_loads()
        received = []
        for load in [load for load in self._loads.values() if load.plan.in_background]:
            load.check_stall()
            if load.has_ended:
                received.append(load.request_id)
                self._end(load)
        sent = frozenset(name for name in self._ended if not (self.saver and self.saver.lends(name)))
        self._ended -= sent
        return sent, frozenset(received)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        self._settle_loads()
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        news = self._news
        news.read_until, news.costs, news.reset = self._read_until, self._costs.take(), bool(self._plan.reset)
        if self.saver is not None:
            settled, news.unsaved = self.saver.take_settled(), self.saver.take_unsaved()
            news.read_until = self.saver.read_until
            if self.first_tier.store.is_shared:  # a store with events reports its pages itself
                news.settled = settled
        has_suspects = self._step in self._suspect.values()
        failed = news.failed_loads or news.spoilt_saves or news.refused or has_suspects
        saved = news.settled or news.unsaved or news.read_until != self._read_until
        if not (failed or saved or news.costs or news.reset or not self._has_sent_shard):
            return None
        news.rank, news.step = self._context.parallelism.worker_rank, self._step
        if not self._has_sent_shard:
            news.shard, self._has_sent_shard = self.shard, True
        self._read_until, self._news = news.read_until, StepReport()
        return news.to_plain()

    def get_stats(self) -> Mapping[str, Any] | None:
        self._warnings.flush()
        for name, tier in self.tiers.items():
            evicted = 0 if tier.store.has_events else tier.store.usage().num_evicted
            if new := evicted - self._num_evicted.get(name, 0):
                self._num_evicted[name] = evicted
                self._context.stats.record("evict", count=new)
        return self._context.stats.take()

    def get_status(self) -> Mapping[str, Plain]:
        return {"loads": [load.status() for load in list(self._loads.values())], "num_held": len(self._ended)}
