"""The scheduler side of the connector "p2p"."""

from __future__ import annotations

import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any, Final

import attrs

from kvplug import Config, ConfigError, ResourceExhaustedError
from kvplug.engine import (
    NO_BLOCK,
    BlockIds,
    ConnectorContext,
    Plain,
    Request,
    RequestEnd,
    Role,
    SchedulerConnector,
    SchedulerOutput,
    WorkerOutput,
    reason_of,
)
from kvplug.transport import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug_p2p.engines import Claim, ProducerEngines
from kvplug_p2p.options import P2POptions
from kvplug_p2p.plan import HoldPlan, PullPlan, StepPlan
from kvplug_p2p.reference import OURS, MalformedError, Reference, digest_of, to_text

_log = logging.getLogger(__name__)

_CALLS_WAIT_S: Final = 0.005
"""How long calls about one request wait for the producer's answer, in total. On one host the answer takes
less than a millisecond, but longer while the engine's thread keeps asking."""


@attrs.define(eq=False)
class _Tracked:
    """A request between its first call and its last."""

    request: Request
    begun_at: float
    waits_until: Deadline
    claim: Claim | None = None
    num_computed: int = 0
    """Tokens that the engine had when it last asked."""
    is_counted: bool = False
    """Its match, or the reason for none, is in the statistics."""
    is_over: bool = False
    """Nothing more is pulled for it: the pull is planned, or is not possible."""
    is_loading: bool = False
    is_old: bool = False
    """Some of its KV is from before a reset."""


class P2PScheduler(SchedulerConnector):
    """Hands out references to the blocks of finished prompts, and promises KV from references of others.

    Law. Tokens are promised only once every worker of the producer has confirmed that it keeps their blocks
    for this request. Blocks that were handed out are kept until their reader has released them or has gone,
    or until the lease is over.
    """

    supports_hma = True

    @classmethod
    def needs_layer_hooks(cls, config: Config, options: P2POptions) -> bool:
        return config.role is not Role.PRODUCER and not options.async_load

    def __init__(self, context: ConnectorContext) -> None:
        self._context = context
        self._options: P2POptions = context.options
        if context.config.integrity not in ("auto", "off") and not context.config.device.startswith("cpu"):
            raise ConfigError(
                f"integrity: got {context.config.integrity!r}, but connector 'p2p' does not hash KV on"
                f" {context.config.device}; set it to 'auto' or 'off', or use connector 'lookup'"
            )
        role = context.config.role
        self._produces = role in (Role.PRODUCER, Role.BOTH)
        self._is_producer = role is Role.PRODUCER
        self._in_background = self._options.async_load or context.loads_in_background
        self._block_size = context.cache.groups[0].block_size
        self._windows = [group.window for group in context.cache.groups]
        self._epoch, self._key = os.urandom(8).hex(), os.urandom(32)
        self._numbers = itertools.count(1)
        self._tracked: dict[str, _Tracked] = {}
        self._held: dict[str, frozenset[int]] = {}
        """The blocks of requests that were handed off, until the workers report them as sent."""
        self._holds: list[HoldPlan] = []
        self._revoked: list[str] = []
        self._pulls: list[PullPlan] = []
        self._forget: list[str] = []
        self._ended: Counter[str] = Counter()
        """How many workers have ended the pull of a claim."""
        self._pulled: dict[str, Claim] = {}
        self._foreign: set[tuple[str, str]] = set()
        """Ids and epochs of producers that a worker of this engine has refused."""
        self._last_report = -1
        self._is_reset = False
        """The next plan withdraws all blocks that were handed off."""
        self._engines: ProducerEngines | None = None
        if role in (Role.CONSUMER, Role.BOTH):
            self._engines = ProducerEngines(context)
        elif context.members is not None:
            context.members.follow(lambda engines, is_stale: None)

    @property
    def num_held(self) -> int:
        """Number of requests whose blocks the engine keeps after handing them off."""
        return len(self._held)

    @property
    def links(self) -> tuple[Any, ...]:
        """Links to worker 0 of each connected producer."""
        every = () if self._engines is None else self._engines.all()
        return tuple(each.link for each in every if each.link is not None)

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        if self._engines is not None:
            self._engines.wait_until_up(Deadline.after(timeout, self._context.config.connect_timeout_s))

    def shutdown(self) -> None:
        self._context.peers.close()
        if self._engines is not None:
            self._engines.close()
        self._context.close()

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def get_status(self) -> Mapping[str, Plain]:
        return {"num_held": self.num_held}

    # -- a request that may be pulled ----------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._track(request)

    def _track(self, request: Request) -> _Tracked:
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            tracked = _Tracked(request, time.perf_counter(), Deadline.after(self._options.wait_timeout_s))
            tracked.is_over = self._engines is None or OURS not in request.params
            self._tracked[request.request_id] = tracked
        tracked.request = request
        return tracked

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._track(request)
        tracked.num_computed = num_computed_tokens
        if tracked.is_over:
            return 0, False
        if tracked.claim is None and (answer := self._make_claim(tracked)) is not None:
            return answer
        claim = tracked.claim
        assert claim is not None and claim.engine is not None
        claim.engine.wait_for(claim)
        if claim.refused:
            return self._miss(tracked, claim.refused)
        if not claim.is_granted:
            return (None, False) if not claim.expires.expired else self._miss(tracked, "timeout")
        end = self._end_of(tracked, claim.reference)
        new = max(0, end - tracked.num_computed)
        if not tracked.is_counted:
            tracked.is_counted = True
            seconds = time.perf_counter() - tracked.begun_at
            trace_id = self._context.spans.trace_id_of(tracked.request.request_id)
            self._context.stats.record("match", seconds=seconds, tokens=new, trace_id=trace_id)
            self._note_lease(tracked.request.request_id, claim)
        return new, bool(new) and self._in_background

    def _make_claim(self, tracked: _Tracked) -> tuple[int | None, bool] | None:
        """Send a claim and return ``None``, or return the answer to the engine."""
        assert self._engines is not None
        request = tracked.request
        try:
            reference = Reference.from_params(request.params)
            text = to_text(request.params)
        except MalformedError:
            return self._miss(tracked, "forged")
        count = reference.num_tokens
        if count > len(request.token_ids) or reference.digest != digest_of(
            request.extra, request.token_ids[:count]
        ):
            return self._miss(tracked, "identity")
        if (reference.engine_id, reference.epoch) in self._foreign:
            return self._miss(tracked, "refused")
        try:
            engine = self._engines.find(reference)
        except ResourceExhaustedError as e:
            return self._miss(tracked, reason_of(e))
        if engine is None or not engine.is_up:
            may_come = engine is not None or self._engines.may_come(reference)
            if may_come and not tracked.waits_until.expired:
                return None, False
            unknown = "refused" if self._engines.have_answered else "peer_gone"
            return self._miss(tracked, "timeout" if may_come else unknown)
        key = f"{self._epoch} {next(self._numbers)}"
        tracked.claim = Claim(
            key, reference, text, Deadline.after(self._options.wait_timeout_s), Deadline.after(_CALLS_WAIT_S)
        )
        engine.send_claim(tracked.claim)
        return None

    def _miss(self, tracked: _Tracked, reason: str) -> tuple[int, bool]:
        """Count the reason: the request is computed, and asks for no other claim."""
        self._context.stats.fail("match", reason)
        if tracked.claim is not None:
            self._note_lease(tracked.request.request_id, tracked.claim, reason)
        tracked.is_over = True
        self._release(tracked)
        return 0, False

    def _note_lease(self, request_id: str, claim: Claim, reason: str = "") -> None:
        """Record how long the producer took to grant or refuse a claim."""
        spans = self._context.spans
        spans.record(
            "lease",
            request_id,
            claim.made_at,
            parent=spans.traceparent_of(request_id),
            reason=reason,
            source=claim.reference.engine_id,
        )

    def _release(self, tracked: _Tracked) -> None:
        claim, tracked.claim = tracked.claim, None
        if claim is not None and claim.engine is not None:
            claim.engine.release(claim)

    def _end_of(self, tracked: _Tracked, reference: Reference) -> int:
        """The end of the tokens that may be pulled: whole blocks, without the last token.

        With sliding windows the last block may be partial: the producer has freed blocks outside the window
        of its last token, and the window of an earlier token may begin in one of them.
        """
        size = self._block_size
        unit = min(size, reference.block_size)
        usable = min(reference.num_tokens, len(tracked.request.token_ids) - 1)
        if not any(self._windows):
            usable = usable // size * size
        if tracked.num_computed % unit or max(size, reference.block_size) % unit:
            return 0
        if len(reference.block_ids) != len(self._windows):
            return 0
        for table, window in zip(reference.block_ids, self._windows, strict=True):
            first = tracked.num_computed if window is None else max(tracked.num_computed, usable - window + 1)
            if NO_BLOCK in table[first // reference.block_size : -(-usable // reference.block_size)]:
                return 0  # the next token attends to blocks that the producer has freed
        return usable

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._track(request)
        if not num_external_tokens:
            if tracked.claim is not None and not tracked.is_loading:
                tracked.is_over = True
                self._release(tracked)
            return
        claim = tracked.claim
        assert claim is not None and claim.engine is not None
        start = tracked.num_computed
        self._pulls.append(
            PullPlan(
                request_id=request.request_id,
                claim=claim.key,
                engine_id=claim.reference.engine_id,
                peer=claim.engine.peer,
                block_size=claim.reference.block_size,
                tensor_parallel_size=claim.reference.tensor_parallel_size,
                theirs=claim.reference.block_ids,
                ours=block_ids,
                start=start,
                end=start + num_external_tokens,
                in_background=self._in_background,
                traceparent=self._context.spans.traceparent_of(request.request_id),
            )
        )
        tracked.is_loading, tracked.is_over = self._in_background, True
        tracked.claim = None
        claim.pull_ends = Deadline.after(self._context.config.timeout_s)
        self._pulled[claim.key] = claim

    def get_hit_sources(self, request: Request, num_external_tokens: int) -> Mapping[str, int]:
        return {"peer": num_external_tokens} if num_external_tokens else {}

    # -- the end of a request ------------------------------------------------------------------

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        request_id = request.request_id
        self._drop_pulls({request_id})
        tracked = self._tracked.pop(request_id, None)
        if tracked is not None:
            self._release(tracked)
            if tracked.is_loading:
                self._forget.append(request_id)
                return True, None
        is_old = tracked is not None and tracked.is_old
        params = self._hand_off(request, block_ids) if end is RequestEnd.FINISHED and not is_old else None
        if params is None:
            self._forget.append(request_id)
        return params is not None, params

    def _hand_off(self, request: Request, block_ids: BlockIds) -> dict[str, Any] | None:
        """Keep the request's blocks for a decode engine; ``None`` if no engine will read them."""
        wanted = request.params.get("do_remote_decode", self._is_producer)
        if not self._produces or wanted is not True or not any(block_ids):
            return None
        config, parallelism = self._context.config, self._context.parallelism
        count = request.num_prompt_tokens
        lease = next(self._numbers)
        reference = Reference(
            engine_id=config.engine_id,
            epoch=self._epoch,
            request_id=request.request_id,
            generation=request.generation,
            lease=lease,
            expires_ms=int((time.time() + self._options.lease_s) * 1000),
            address=config.control_address(0),
            tensor_parallel_size=parallelism.tensor_size,
            block_size=self._block_size,
            num_tokens=count,
            digest=digest_of(request.extra, request.token_ids[:count]),
            block_ids=tuple(tuple(table[: -(-count // self._block_size)]) for table in block_ids),
        )
        self._holds.append(
            HoldPlan(
                request_id=request.request_id,
                lease=lease,
                block_ids=reference.block_ids,
                traceparent=self._context.spans.traceparent_of(request.request_id),
            )
        )
        self._held[request.request_id] = frozenset(itertools.chain(*block_ids)) - {NO_BLOCK}
        return reference.to_params(self._key)

    def _drop_pulls(self, request_ids: Collection[str]) -> None:
        """Drop pulls that are in no step's plan yet, and give the claims back to their requests."""
        dropped = [pull for pull in self._pulls if pull.request_id in request_ids]
        self._pulls = [pull for pull in self._pulls if pull.request_id not in request_ids]
        for pull in dropped:
            tracked = self._tracked[pull.request_id]
            tracked.claim, tracked.is_over, tracked.is_loading = self._pulled.pop(pull.claim), False, False
            tracked.claim.pull_ends = None

    def _end_claim(self, key: str) -> None:
        self._ended.pop(key, None)
        claim = self._pulled.pop(key, None)
        if claim is not None and claim.engine is not None:
            claim.engine.release(claim)

    def reset_cache(self) -> bool:
        """In the next step the workers withdraw what was handed off.

        Returns ``False`` on a decode engine if a producer has handed off KV since its own last reset.
        """
        self._is_reset = self._produces
        for tracked in self._tracked.values():
            tracked.is_old = True
        held = [each.name for each in (self._engines.all() if self._engines else ()) if not each.is_cleared]
        if held:
            _log.warning(
                "the cache is not reset: references to KV from before the reset may still arrive; first"
                " reset the engine that hands them out (%s)",
                ", ".join(held),
            )
        return not held

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        for engine in () if self._engines is None else self._engines.all():
            engine.note_step()
        for each in output.scheduled:
            if not each.num_computed_tokens and each.request_id in self._tracked:
                self._tracked[each.request_id].is_old = False
        if output.preempted_request_ids:
            scheduled = {one.request_id for one in output.scheduled}
            self._drop_pulls(output.preempted_request_ids - scheduled)
            self._forget += output.preempted_request_ids
        plan = StepPlan(
            step=output.step,
            last_report=self._last_report,
            epoch=self._epoch,
            key=self._key,
            holds=tuple(self._holds),
            revoked=tuple(self._revoked),
            pulls=tuple(self._pulls),
            is_reset=self._is_reset,
            forget=tuple(self._forget),
        )
        self._is_reset = False
        self._holds, self._revoked, self._pulls, self._forget = [], [], [], []
        return plan.to_plain()

    def update_connector_output(self, output: WorkerOutput) -> None:
        for request_id in output.finished_sending:
            self._held.pop(request_id, None)
        if output.invalid_block_ids:
            self._revoked += [
                name for name, blocks in self._held.items() if blocks & output.invalid_block_ids
            ]
        for request_id in output.finished_recving:
            if request_id in self._tracked:
                self._tracked[request_id].is_loading = False
        for part in output.worker_metadata:
            assert isinstance(part, Mapping)
            self._last_report = max(self._last_report, part["step"])
            for key in part["refused"]:
                if (claim := self._pulled.get(key)) is not None:
                    self._foreign.add((claim.reference.engine_id, claim.reference.epoch))
            for key in part["ended"]:
                self._ended[key] += 1
                if self._ended[key] == self._context.parallelism.num_workers:
                    self._end_claim(key)

    def has_pending_push_work(self) -> bool:
        """Kept blocks need no extra steps: they come back with the first step after their release."""
        return bool(self._holds or self._revoked or self._is_reset)
