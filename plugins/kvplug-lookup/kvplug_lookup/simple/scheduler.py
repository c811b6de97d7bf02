"""The connector "simple": prefill puts the KV of whole prompts into a lookup buffer, decode reads it there.

It is the smallest useful connector. When a request ends, each worker of the engine that computed it inserts
its share of the prompt's KV into its own lookup buffer, as one entry under the prompt's tokens. An engine
that loads asks how long a prefix of its prompt those buffers hold, and its workers read the entry into their
blocks before the step that needs it.

Other connectors do more:

- "lookup" keeps KV page by page: prompts that share a prefix share its pages, and only missing pages are
  moved; here each prompt is held and moved whole. "lookup" also loads in the background and from any number
  of engines, answers from an index of its own instead of asking, keeps KV in files and other stores, and
  serves models with several KV cache groups.
- "p2p" hands blocks from prefill to decode without a copy in a buffer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import attrs

from kvplug import KvplugError
from kvplug.engine import (
    BlockIds,
    ConnectorContext,
    Plain,
    Request,
    RequestEnd,
    SchedulerConnector,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.net.wire.token_ids import pack_tokens
from kvplug.transport import DEFAULT_TIMEOUT, Timeout
from kvplug_lookup.simple.peer import PeerMatcher, Question, group_of


@attrs.define
class Tracked:
    """The state of a request between its first call and its last."""

    question: Question | None = None
    """The question to the peer engine about it."""
    start: int = 0
    """Tokens computed at the last match."""
    num_computed: int = 0
    """Tokens that the steps planned so far compute or have computed."""
    has_failed: bool = False
    """A load failed: the request is computed, without a second load."""
    is_old: bool = False
    """Some of its KV is from before a reset."""


@attrs.define
class Saving:
    """A prompt whose blocks are kept until all workers have inserted it."""

    tokens: tuple[int, ...]
    extra: bytes
    blocks: tuple[int, ...]
    traceparent: str = ""
    """The context of the request in its trace."""
    is_planned: bool = False
    """It is in the plan of a step."""
    is_wrong: bool = False
    """Some of its KV is wrong, or from before a reset: it is not inserted."""


class SimpleScheduler(SchedulerConnector):
    """Decides what to insert and load. Each step's plan lists the loads and saves for the workers."""

    def __init__(self, context: ConnectorContext) -> None:
        self._context, self._layout = context, group_of(context).layout
        role = context.config.require_role()
        self._produces = role.produces
        self._matcher = PeerMatcher(context) if role.consumes else None
        self._tracked: dict[str, Tracked] = {}
        self._loads: list[dict[str, Any]] = []
        self._saving: dict[str, Saving] = {}
        self._is_reset = False
        """The next plan drops all entries."""
        self._last_report = 0
        """The last step with a reported failed load."""

    def wait_until_ready(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        if self._matcher is not None:
            self._matcher.wait_until_ready(timeout)

    # -- one request ---------------------------------------------------------------------------

    def on_new_request(self, request: Request) -> None:
        self._tracked[request.request_id] = Tracked()

    def _of(self, request_id: str, call: str) -> Tracked:
        if request_id not in self._tracked:
            raise KvplugError(
                f"{call} was called for request {request_id!r:.100} before on_new_request or after"
                " request_finished"
            )
        return self._tracked[request_id]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        tracked = self._of(request.request_id, "get_num_new_matched_tokens")
        tracked.start = num_computed_tokens
        if self._matcher is None or tracked.has_failed or num_computed_tokens % self._layout.granule:
            return 0, False
        held = self._held(self._matcher, tracked, request)
        if held is None:
            return None, False
        usable = min(held, len(request.token_ids) - 1)  # at least one token must be computed
        whole = usable // self._layout.block_size * self._layout.block_size
        return max(0, whole - num_computed_tokens), False

    def _held(self, matcher: PeerMatcher, tracked: Tracked, request: Request) -> int | None:
        """How many tokens every worker can load; ``None``: not known yet."""
        matcher.check_open()
        if matcher.is_refused:
            return 0
        question = tracked.question
        if question is None or question.generation != request.generation:
            question = Question(request.token_ids, request.extra, request.generation)
            matcher.ask(question)
            tracked.question = question
        is_late = time.monotonic() > question.asked_at + self._context.options.match_timeout_s
        return 0 if question.answer is None and is_late else question.answer

    def update_state_after_alloc(
        self, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        tracked = self._of(request.request_id, "update_state_after_alloc")
        if num_external_tokens == 0:
            return
        end = tracked.start + num_external_tokens
        self._loads.append(
            {
                "request": request.request_id,
                "tokens": pack_tokens(request.token_ids[:end]),
                "extra": request.extra,
                "start": tracked.start,
                "traceparent": self._context.spans.traceparent_of(request.request_id),
                "blocks": block_ids[0][: -(-end // self._layout.block_size)],
            }
        )

    def request_finished(
        self, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        tracked = self._of(request.request_id, "request_finished")
        del self._tracked[request.request_id]
        self._drop_loads(frozenset({request.request_id}))
        size = self._layout.block_size
        num_blocks = min(tracked.num_computed, request.num_prompt_tokens) // size
        if not self._produces or end is not RequestEnd.FINISHED or tracked.is_old or not num_blocks:
            return False, None
        self._saving[request.request_id] = Saving(
            tokens=request.token_ids[: num_blocks * size],
            extra=request.extra,
            blocks=block_ids[0][:num_blocks],
            traceparent=self._context.spans.traceparent_of(request.request_id),
        )
        return True, None

    def _drop_loads(self, request_ids: frozenset[str]) -> None:
        """Drop loads that are in no step's plan yet."""
        self._loads = [load for load in self._loads if load["request"] not in request_ids]

    # -- one step ------------------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> Plain:
        scheduled = {each.request_id for each in output.scheduled}
        for request_id in output.preempted_request_ids & self._tracked.keys():
            self._tracked[request_id].num_computed = 0
        self._drop_loads(output.preempted_request_ids - scheduled)
        for each in output.scheduled:
            tracked = self._of(each.request_id, "build_connector_meta")
            tracked.is_old &= each.num_computed_tokens > 0
            tracked.num_computed = each.num_computed_tokens + each.num_scheduled_tokens
        saves = []
        for request_id, saving in self._saving.items():
            if not saving.is_planned:
                saving.is_planned = True
                saves.append(
                    {
                        "request": request_id,
                        "tokens": pack_tokens(saving.tokens),
                        "extra": saving.extra,
                        "traceparent": saving.traceparent,
                        "blocks": () if saving.is_wrong else saving.blocks,
                    }
                )
        meta = {
            "step": output.step,
            "last_report": self._last_report,
            "is_reset": self._is_reset,
            "loads": self._loads,
            "saves": saves,
        }
        self._loads, self._is_reset = [], False
        return meta

    def update_connector_output(self, output: WorkerOutput) -> None:
        for saving in self._saving.values():
            # The request ended before its KV was known to be wrong.
            saving.is_wrong |= not output.invalid_block_ids.isdisjoint(saving.blocks)
        for report in output.worker_metadata:
            assert isinstance(report, Mapping)
            self._last_report = max(self._last_report, report["step"])
            for request_id in self._tracked.keys() & report["failed"]:
                self._tracked[request_id].has_failed = True
            if report["is_refused"] and self._matcher is not None:
                self._matcher.is_refused = True
        for request_id in output.finished_sending:
            del self._saving[request_id]

    def has_pending_push_work(self) -> bool:
        return bool(self._saving) or self._is_reset

    # -- the whole -----------------------------------------------------------------------------

    def reset_cache(self) -> bool:
        if not self._produces:
            return False  # the KV that it loads belongs to another engine, which must be reset itself
        self._is_reset = True
        for tracked in self._tracked.values():
            tracked.is_old = True
        for saving in self._saving.values():
            saving.is_wrong = True
        return True

    def get_stats(self) -> Mapping[str, Any] | None:
        return self._context.stats.take()

    def get_status(self) -> Mapping[str, Plain]:
        return {"num_held": len(self._saving)}

    def shutdown(self) -> None:
        if self._matcher is not None:
            self._matcher.close()
        self._context.close()
