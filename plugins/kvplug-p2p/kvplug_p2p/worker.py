"""The worker side of the connector "p2p"."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvplug import ClosedError, HandshakeError, UnsupportedError
from kvplug.engine import (
    NO_BLOCK,
    ConnectorContext,
    LayoutError,
    PeerLink,
    Plain,
    Role,
    StalledError,
    WorkerConnector,
    reason_of,
)
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, DeviceMark, Timeout
from kvplug_p2p.engines import fixed_addresses
from kvplug_p2p.lender import Lender
from kvplug_p2p.plan import PullPlan, StepPlan
from kvplug_p2p.pull import Part, ProducerWorker, Pull
from kvplug_p2p.sharing import HeadRange, head_ranges
from kvplug_p2p.views import CacheViews

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

_IDLE_S: Final = 600.0
"""A connection to a producer ends after it was idle this long."""


class P2PWorker(WorkerConnector):
    """Sends blocks that its engine keeps for other engines, and pulls their blocks into its own."""

    def __init__(self, context: ConnectorContext) -> None:
        super().__init__()
        self._context = context
        layout = context.cache.groups[0].layout
        for number, group in enumerate(context.cache.groups):
            if group.layout.block_size != layout.block_size:
                raise UnsupportedError(
                    f"connector 'p2p' needs blocks of one size, but blocks of KV cache group {number} hold"
                    f" {group.layout.block_size} tokens and blocks of group 0 {layout.block_size}"
                )
        self._views: CacheViews | None = None
        self._plan = StepPlan()
        self._pulls: dict[str, Pull] = {}
        """Pulls of this step, and in the background."""
        self._workers: dict[tuple[str, int], ProducerWorker] = {}
        """Connections by the producer's id and the rank of its worker."""
        self._failed_blocks: set[int] = set()
        self._ended: list[str] = []
        """Claims whose pulls have ended."""
        self._refused: list[str] = []
        """Claims on producers whose worker refused the handshake, or was refused."""
        self._suspect: dict[int, int] = {}
        """Blocks of failed pulls, each with its step. Requests with such blocks are not handed off until the
        scheduler side has received the report."""
        self._is_shut_down = False
        self._unsettled: list[Pull] = []
        self._logged: set[str] = set()
        self.last_route = ""
        """The producer and transport of the last pull, for display."""
        self._lender: Lender | None = None
        if context.config.role is not Role.CONSUMER:
            self._lender = Lender(context)
            if context.members is not None:
                context.members.announce(self._lender.contact)

    @property
    def contact(self) -> str:
        """The contact for decode engines; empty if this worker serves none."""
        return "" if self._lender is None else self._lender.contact

    @property
    def num_held(self) -> int:
        """Number of requests whose blocks are kept for decode engines."""
        return 0 if self._lender is None else self._lender.num_held

    @property
    def link(self) -> PeerLink | None:
        """The link to a connected worker of a producer, if there is one."""
        return next((worker.link for worker in list(self._workers.values()) if worker.link is not None), None)

    # -- at start and at the end ---------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor]) -> None:
        self._views = CacheViews(self._context.cache, kv_caches)
        if self._lender is not None:
            self._lender.register(self._views)

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        deadline = Deadline.after(timeout, self._context.config.connect_timeout_s)
        if self._context.config.role is Role.PRODUCER or self._views is None:
            return
        for address in fixed_addresses(self._context):
            first = ProducerWorker(self._context, self._views, "", address, 0)
            try:
                link, _ = first.connected(deadline, retry=True)
                remote = link.agreement.remote
                size = 1 if remote.engine is None else remote.engine.tensor_parallel_size
                for rank in self._ranks(size):
                    if rank == 0:
                        worker = first
                    else:
                        worker = ProducerWorker(self._context, self._views, "", address, rank)
                    self._workers[remote.engine_id, rank] = worker
                    worker.connected(deadline, retry=True)
            finally:
                if first not in self._workers.values():
                    first.end()

    def shutdown(self) -> None:
        self._is_shut_down = True
        closing = ClosedError("the connector was shut down")
        if self._context.members is not None:
            self._context.members.close()
        for pull in list(self._pulls.values()):
            pull.fail(closing)
        self._context.peers.close()
        workers = list(self._workers.values())
        for worker in workers:
            worker.end()
        if self._lender is not None:
            self._lender.close()
        for worker in workers:
            worker.close()
        self._context.close()

    # -- each step -----------------------------------------------------------------------------

    def handle_preemptions(self, request_ids: frozenset[str]) -> None:
        for request_id in request_ids:
            self._forget(request_id)
            if (pull := self._pulls.get(request_id)) is not None:
                self._wait_settled(pull)

    def _forget(self, request_id: str) -> None:
        if (pull := self._pulls.get(request_id)) is not None:
            pull.fail(ClosedError(f"request {request_id!r:.100} ended or was preempted"))

    def _wait_settled(self, pull: Pull) -> None:
        timeout_s = self._context.config.timeout_s
        if not pull.wait_settled(timeout_s):
            raise StalledError(
                f"blocks of request {pull.request_id!r:.100} are still being written {timeout_s:g} s after"
                f" its pull from {pull.plan.engine_id} ended: restart this engine"
            )

    def bind_connector_metadata(self, metadata: Plain) -> None:
        super().bind_connector_metadata(metadata)
        assert isinstance(metadata, Mapping)
        self._plan = plan = StepPlan.from_plain(metadata)
        while self._unsettled:  # from here on the engine recomputes their blocks
            self._wait_settled(self._unsettled[0])
            del self._unsettled[0]
        self._suspect = {block: step for block, step in self._suspect.items() if step > plan.last_report}
        for request_id in plan.forget:
            self._forget(request_id)
        if self._lender is not None:
            self._lender.begin(plan.epoch, plan.key)
            for request_id in plan.revoked:
                self._lender.revoke(request_id)
            for hold in plan.holds:
                self._lender.hold(hold.request_id, hold.lease, hold.block_ids, hold.traceparent)
                if any(block in self._suspect for table in hold.block_ids for block in table):
                    self._lender.revoke(hold.request_id)
            if plan.is_reset:
                self._lender.reset()

    def has_connector_metadata(self) -> bool:
        return any(not pull.in_background for pull in self._plan.pulls)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._plan = StepPlan()

    def start_load_kv(self) -> None:
        if not self._plan.pulls:
            return
        if self._views is None:
            raise LayoutError("there is no cache to load into: call register_kv_caches first")
        after = DeviceMark(self._views.device)
        num_layers = sum(self._views.num_layers(group) for group in range(len(self._context.cache.groups)))
        for plan in self._plan.pulls:
            pull = Pull(plan, num_layers, after, self._context.config.timeout_s)
            self._pulls[plan.request_id] = pull
            try:
                pull.parts = self._parts_of(pull, plan)
            except Exception as e:  # refused, or no more threads
                pull.fail(e)
            for part in pull.parts:
                part.worker.pull(part)

    def _parts_of(self, pull: Pull, plan: PullPlan) -> list[Part]:
        ranks = self._ranks(plan.tensor_parallel_size)
        return [Part(pull, self._worker_of(plan, rank), heads) for rank, heads in ranks.items()]

    def _ranks(self, their_size: int) -> dict[int, HeadRange]:
        """The heads to pull from each of the producer's workers, by its rank.

        Raises:
            HandshakeError: the sizes are not multiples of each other.
        """
        parallelism, model = self._context.parallelism, self._context.model
        has_heads = self._context.cache.groups[0].layout.has_values
        size, rank = parallelism.tensor_size, parallelism.tensor_rank
        ranges = head_ranges(rank, size, their_size, model.num_kv_heads if has_heads else 0)
        stage = parallelism.worker_rank // size
        return {stage * their_size + heads.rank: heads for heads in ranges}

    def _worker_of(self, plan: PullPlan, rank: int) -> ProducerWorker:
        self._drop_idle()
        key = plan.engine_id, rank
        if key in self._workers and self._workers[key].peer != plan.peer:  # it restarted elsewhere
            self._workers.pop(key).end()
        if key not in self._workers:
            assert self._views is not None
            self._workers[key] = ProducerWorker(self._context, self._views, plan.engine_id, plan.peer, rank)
        worker = self._workers[key]
        if self._is_shut_down:  # by another thread, perhaps before this worker was listed
            worker.end()
        return worker

    def _drop_idle(self) -> None:
        """Drop connections whose producer has left, and those that are no longer used."""
        now = time.monotonic()
        for key, worker in list(self._workers.items()):
            if worker.has_ended or now - worker.last_used > _IDLE_S:
                self._workers.pop(key).end()

    def wait_for_layer_load(self, layer_name: str) -> None:
        for pull in self._pulls_in_step():
            pull.wait_for_layers(self._layer_number(layer_name) + 1)

    def _layer_number(self, layer_name: str) -> int:
        at = 0
        for group in self._context.cache.groups:
            if layer_name in group.layer_names:
                return at + group.layer_names.index(layer_name)
            at += len(group.layer_names)
        raise LayoutError(f"the cache config does not name layer {layer_name!r}")

    def _pulls_in_step(self) -> list[Pull]:
        return [pull for pull in self._pulls.values() if not pull.plan.in_background]

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor) -> None:
        return None

    def wait_for_save(self) -> None:
        self._settle()

    def _settle(self) -> None:
        """End the pulls that this step needs."""
        for pull in self._pulls_in_step():
            pull.wait_for_layers(pull.num_layers)
            self._end(pull)

    def _end(self, pull: Pull) -> None:
        del self._pulls[pull.request_id]
        self._ended.append(pull.plan.claim)
        plan, stats, spans = pull.plan, self._context.stats, self._context.spans
        load = spans.record(
            "load",
            pull.request_id,
            pull.began,
            parent=plan.traceparent,
            reason="" if pull.error is None else str(reason_of(pull.error)),
            source=plan.engine_id,
            num_tokens=plan.end - plan.start,
            verify_seconds=pull.verify_seconds,
        )
        is_verified = pull.verify_seconds > 0
        spans.record_layers(pull.request_id, pull.began, pull.arrivals, load, is_verified=is_verified)
        if pull.error is None:
            seconds = time.perf_counter() - pull.began
            tokens = plan.end - plan.start
            stats.record("load", pull.nbytes, seconds, tokens=tokens, trace_id=load.trace_id)
            routes = {part.worker.route for part in pull.parts}
            self.last_route = f"the blocks of {plan.engine_id}: {', '.join(sorted(routes))}"
            return
        if not pull.wait_settled(self._context.options.stall_timeout_s):
            self._unsettled.append(pull)
        size = self._context.cache.groups[0].block_size
        first, last = plan.start // size, -(-plan.end // size)
        blocks = {block for table in plan.ours for block in table[first:last]} - {NO_BLOCK}
        self._failed_blocks |= blocks
        self._suspect |= dict.fromkeys(blocks, self._plan.step)
        if isinstance(pull.error, HandshakeError):
            self._refused.append(plan.claim)
        reason = reason_of(pull.error)
        stats.fail("load", reason)
        if reason not in self._logged and not isinstance(pull.error, ClosedError):
            self._logged.add(reason)
            _log.warning(
                "could not pull KV from %s (%s; logged once): %s", plan.engine_id, reason, pull.error
            )

    def get_finished(self, finished_request_ids: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
        self._settle()
        received = []
        for pull in list(self._pulls.values()):
            if pull.deadline.expired:
                pull.wait_for_layers(pull.num_layers)  # fails it
            if pull.has_ended:
                received.append(pull.request_id)
                self._end(pull)
        self._drop_idle()
        sent = frozenset() if self._lender is None else self._lender.take_ended()
        return sent, frozenset(received)

    def get_block_ids_with_load_errors(self) -> frozenset[int]:
        self._settle()
        failed, self._failed_blocks = frozenset(self._failed_blocks), set()
        return failed

    def build_worker_metadata(self) -> Plain:
        if not self._ended and not self._suspect:
            return None
        ended, self._ended = self._ended, []
        refused, self._refused = self._refused, []
        return {"step": self._plan.step, "ended": ended, "refused": refused}

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def get_status(self) -> Mapping[str, Plain]:
        now = time.perf_counter()
        loads = [
            {"request_id": pull.request_id, "source": pull.plan.engine_id, "seconds": now - pull.began}
            for pull in list(self._pulls.values())
        ]
        return {"loads": loads, "num_held": self.num_held}
