"""The scheduler side of the connector "lookup"."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from typing import Any

import attrs

from kvplug import ConfigError, KvplugError
from kvplug.engine import (
    BlockIds,
    ConnectorContext,
    PeerLink,
    Plain,
    Request,
    RequestEnd,
    Role,
    SchedulerConnector,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug_lookup.connector.plan import LoadPlan, SavePlan, StepPlan
from kvplug_lookup.connector.replica import Fence, Replica

_log = logging.getLogger(__name__)


@attrs.define
class _Tracked:
    """What is remembered of a request between its first call and its last."""

    request: Request
    fences: list[Fence] = attrs.field(factory=list)
    num_computed_at_match: int = 0
    num_promised: int = 0
    """When it was last asked about, and its blocks were not allocated yet."""
    num_saved: int = 0
    has_failed: bool = False
    """A load failed: it is computed from now on, without another try."""
    is_loading: bool = False
    """A background load is writing into its blocks."""
    is_old: bool = False
    """It may hold KV from before a reset: nothing of it is saved until its first token is computed again."""


class LookupScheduler(SchedulerConnector):
    """Promises what the peer's store holds, plans loads and saves. Touches no tensor, waits for nobody.

    As consumer it keeps a :class:`Replica` of each of the peer engine's stores (of its own workers', in
    the role "both") and promises what all of them hold. As producer it plans, step by step, what the
    workers gather.
    """

    def __init__(self, context: ConnectorContext) -> None:
        if len(context.cache.groups) != 1:
            raise ConfigError(
                f"connector 'lookup' serves models with one KV cache group, and this one has"
                f" {len(context.cache.groups)}"
            )
        self._context = context
        self._block_size = context.cache.groups[0].block_size
        self._granule = context.cache.groups[0].layout.granule
        role = context.config.role
        self._saves = role in (Role.PRODUCER, Role.BOTH)
        self._loads = role in (Role.CONSUMER, Role.BOTH)
        self._in_background = context.options.async_load or context.loads_in_background
        self._tracked: dict[str, _Tracked] = {}
        self._planned_loads: list[LoadPlan] = []
        self._forget: list[str] = []
        self._heard = -1
        """The latest step that a worker has reported something about; -1: none."""
        self._must_reset = False
        """The next plan tells the workers to forget everything."""
        self._reset_step: int | None = None
        """The step that told them so last, until all of them have reported it."""
        self._num_reset = 0
        """How many have."""
        self._replicas: tuple[Replica, ...] = ()
        try:
            for rank in range(context.parallelism.num_workers) if self._loads else ():
                fence_s = context.options.fence_timeout_s
                replica = Replica(self._connector_to(rank), rank=rank, fence_timeout_s=fence_s)
                self._replicas += (replica,)
        except BaseException:
            self.shutdown()
            raise

    def _connector_to(self, rank: int) -> Any:
        def connect(timeout: float) -> PeerLink:
            return self._context.peers.connect(rank, "events", timeout=timeout)

        return connect

    @property
    def links(self) -> tuple[PeerLink, ...]:
        """Of the replicas that are connected: what was agreed on, and with whom."""
        return tuple(replica.link for replica in self._replicas if replica.link is not None)

    # -- at start and at the end ---------------------------------------------------------------

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._context.config.connect_timeout_s)
        for replica in self._replicas:
            replica.wait_until_ready(deadline)

    def shutdown(self) -> None:
        self._context.peers.close()  # wakes those that are connecting
        for replica in self._replicas:
            replica.close()
        self._context.close()

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    # -- of one request ------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._track(request)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(request, fences=[replica.fence() for replica in self._replicas])
            self._tracked[request.request_id] = tracked
        tracked.request = request
        return tracked

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._track(request)
        tracked.num_promised = 0
        if not self._loads or tracked.has_failed:
            return 0, False
        usable = (len(request.token_ids) - 1) // self._block_size * self._block_size
        if usable <= num_computed_tokens or num_computed_tokens % self._granule:
            return 0, False
        held = self._held(tracked, usable)
        if held is None:
            return None, False
        new = held // self._block_size * self._block_size - num_computed_tokens
        if new <= 0:
            return 0, False
        tracked.num_computed_at_match, tracked.num_promised = num_computed_tokens, new
        return new, self._in_background

    def _held(self, tracked: _Tracked, usable: int) -> int | None:
        """Of the first ``usable`` tokens those that every store holds; ``None``: not known yet."""
        if self._must_reset or self._reset_step is not None:
            return 0  # the stores may have entries that must not be loaded, and soon have none at all
        begun = time.perf_counter()
        token_ids, extra = tracked.request.token_ids[:usable], tracked.request.extra
        held = usable
        for replica, fence in zip(self._replicas, tracked.fences, strict=True):
            found = replica.match(token_ids, extra) if replica.has_passed(fence) else None
            if found is None:
                return None
            held = min(held, found)
        self._context.stats.record("match", seconds=time.perf_counter() - begun, tokens=held)
        return held

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._track(request)
        promised, tracked.num_promised = tracked.num_promised, 0
        if num_external_tokens == 0:
            return
        if num_external_tokens > promised:
            raise KvplugError(
                f"update_state_after_alloc was called for {num_external_tokens} external tokens of request"
                f" {request.request_id}, and get_num_new_matched_tokens had last promised {promised}"
            )
        start = tracked.num_computed_at_match
        end = start + num_external_tokens
        tracked.is_loading = self._in_background
        self._planned_loads.append(
            LoadPlan(
                request_id=request.request_id,
                token_ids=request.token_ids[:end],
                extra=request.extra,
                block_ids=tuple(block_ids[0][: -(-end // self._block_size)]),
                start=start,
                in_background=self._in_background,
            )
        )

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._tracked.pop(request.request_id, None)
        self._forget.append(request.request_id)
        # A load that no step has started yet will never be named, so nothing may wait for that.
        was_planned = self._drop_loads({request.request_id})
        return tracked is not None and tracked.is_loading and not was_planned, None

    def _drop_loads(self, request_ids: Collection[str]) -> bool:
        """Loads that were planned for these and not yet told to the workers; whether there were any."""
        before = len(self._planned_loads)
        self._planned_loads = [load for load in self._planned_loads if load.request_id not in request_ids]
        return len(self._planned_loads) != before

    # -- of the whole --------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        """In the next step the workers forget what they have gathered and stored.

        Nothing that they hold is promised any more until they have said so. A consumer's entries are not its
        own to forget: refused, unless there was no producer yet.
        """
        if not self._saves:
            if not any(replica.was_connected for replica in self._replicas):
                return True
            _log.warning(
                "the cache is not reset: what this engine loads is held by its producer; reset that engine"
            )
            return False
        self._must_reset = True
        for tracked in self._tracked.values():
            tracked.is_old = True
        return True

    def has_pending_push_work(self) -> bool:
        """The workers are told of a reset by a step, and an engine without requests makes none otherwise."""
        return self._must_reset

    def _note_reset(self) -> None:
        self._num_reset += 1
        if self._num_reset == self._context.parallelism.num_workers:
            self._reset_step = None
            for replica in self._replicas:
                replica.drop()

    # -- of one step ---------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        forget = list(self._forget)
        # One preempted after its blocks were allocated has lost them: nothing may be loaded into them.
        scheduled = {one.request_id for one in output.scheduled}
        self._drop_loads(output.preempted_request_ids - scheduled)
        for request_id in output.preempted_request_ids:
            if request_id in self._tracked:
                self._tracked[request_id].num_saved = 0
                forget.append(request_id)
        plan = StepPlan(
            step=output.step,
            heard=self._heard,
            loads=tuple(self._planned_loads),
            saves=tuple(self._plan_saves(output)) if self._saves else (),
            forget=tuple(forget),
            reset=self._must_reset,
        )
        self._planned_loads, self._forget = [], []
        if self._must_reset:
            self._must_reset, self._reset_step, self._num_reset = False, output.step, 0
        return plan.to_plain()

    def _plan_saves(self, output: SchedulerOutput) -> Any:
        for scheduled in output.scheduled:
            tracked = self._tracked.get(scheduled.request_id)
            if tracked is None:
                continue
            if tracked.is_old and scheduled.num_computed_tokens:
                continue
            tracked.is_old = False
            request = tracked.request
            # An engine that went back computes again from there, and what was gathered beyond is void.
            start = self._whole(min(tracked.num_saved, scheduled.num_computed_tokens))
            last = self._whole(request.num_prompt_tokens)
            end = min(self._whole(scheduled.num_computed_tokens + scheduled.num_scheduled_tokens), last)
            if end <= start:
                continue
            tracked.num_saved = end
            yield SavePlan(
                request_id=request.request_id,
                token_ids=request.token_ids[:last] if start == 0 else (),
                extra=request.extra,
                block_ids=tuple(output.block_ids(request.request_id)[0][: -(-end // self._block_size)]),
                start=start,
                end=end,
                is_last=end == last,
            )

    def _whole(self, num_tokens: int) -> int:
        """So many of the leading tokens as can be moved without the rest of a block."""
        return num_tokens // self._granule * self._granule

    def update_connector_output(self, output: WorkerOutput) -> None:
        for request_id in output.finished_recving:
            if request_id in self._tracked:
                self._tracked[request_id].is_loading = False
        for part in output.worker_metadata:
            assert isinstance(part, Mapping)
            self._heard = max(self._heard, part["step"])
            if part["reset"] and part["step"] == self._reset_step:
                self._note_reset()
            if part["timed_out"]:
                for replica in self._replicas:
                    replica.doubt()
            if part["refused"]:
                for replica in self._replicas:
                    replica.refuse()
            for request_id in part["failed_loads"]:
                if request_id in self._tracked:
                    self._tracked[request_id].has_failed = True
                    self._tracked[request_id].num_saved = 0
            for request_id in part["spoilt_saves"]:
                if request_id in self._tracked:
                    self._tracked[request_id].num_saved = 0
