"""Derives the spans of requests from the calls that an engine makes to a connector's scheduler side.

So every connector has them, whoever wrote it. The time to a request's first token is divided without a gap:

- ``queue``: until the engine first asks what can be loaded;
- ``match``: until the connector has answered; its part ``wait`` begins when the first answer is
  "ask again later";
- ``schedule``: until the engine builds the first step that computes the request; a load in the
  background lies in it;
- ``prefill``: until the step that computes the prompt's last token has ended.

All are parts of ``request``, which ends with the request. The same calls show which requests wait for
an answer now, and how long each wait took. They also show whether the engine loads more tokens than the
connector has promised, which no connector has to check.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from kvplug.engine.connector.scheduler import SchedulerConnector
from kvplug.engine.connector.values import (
    BlockIds,
    Plain,
    Request,
    RequestEnd,
    ScheduledRequest,
    SchedulerOutput,
    WorkerOutput,
)
from kvplug.errors import KvplugError
from kvplug.metrics.spans import TRACEPARENT, Attribute, SpanContext, SpanLog
from kvplug.metrics.stats import TransferStats


@attrs.define(eq=False)
class _Times:
    """When the parts of a request began, by ``time.perf_counter``; 0: not yet."""

    request_id: str
    context: SpanContext
    parent: SpanContext | None
    num_prompt_tokens: int
    arrived_at: float
    asked_at: float = 0.0
    put_off_at: float = 0.0
    """When the connector first answered that the engine must ask later, until it answers otherwise, or the
    request has blocks."""
    matched_at: float = 0.0
    scheduled_at: float = 0.0
    num_promised: int = 0
    """Tokens that the connector promised in its last answer, until the request has blocks."""
    is_computed: bool = False
    """The steps planned so far compute the whole prompt."""
    attributes: dict[str, Attribute] = attrs.field(factory=dict)


class RequestSpans:
    """Records the spans of one connector's requests, and their waits."""

    def __init__(self, connector: SchedulerConnector, spans: SpanLog, stats: TransferStats) -> None:
        """Make the connector's methods pass through this object."""
        self._spans = spans
        self._stats = stats
        self._requests: dict[str, _Times] = {}
        self._before_token: set[str] = set()
        """Requests whose first token is not known to be computed."""
        self._stepped_at = 0.0
        """When the engine last reported the end of a step."""
        self._hit_sources = connector.get_hit_sources
        for observe in (
            self.on_new_request,
            self.get_num_new_matched_tokens,
            self.update_state_after_alloc,
            self.build_connector_meta,
            self.update_connector_output,
            self.request_finished,
            self.get_status,
        ):
            name = observe.__name__
            setattr(connector, name, functools.partial(observe, getattr(connector, name)))

    def _of(self, request: Request) -> _Times:
        times = self._requests.get(request.request_id)
        if times is None:
            parent = SpanContext.parse(request.params.get(TRACEPARENT))
            context = self._spans.begin(request.request_id, parent)
            num_tokens, now = request.num_prompt_tokens, time.perf_counter()
            times = _Times(request.request_id, context, parent, num_tokens, now)
            self._requests[request.request_id] = times
            self._before_token.add(request.request_id)
        return times

    def _record(
        self, part: str, times: _Times, begun: float, ended: float, reason: str = "", **more: Attribute
    ) -> None:
        request_id, parent = times.request_id, times.context
        self._spans.record(part, request_id, begun, ended, parent=parent, context=None, reason=reason, **more)

    def _end_wait(self, times: _Times, ended: float) -> None:
        if times.put_off_at:
            self._record("wait", times, times.put_off_at, ended)
            self._stats.record("wait", seconds=ended - times.put_off_at, trace_id=times.context.trace_id)
            times.put_off_at = 0.0

    def _record_rest(self, times: _Times, ended: float, reason: str) -> None:
        """Record the part in which a request without a token ended."""
        begins = {
            "queue": times.arrived_at,
            "match": times.asked_at,
            "schedule": times.matched_at,
            "prefill": times.scheduled_at,
        }
        part, begun = [(part, begun) for part, begun in begins.items() if begun][-1]
        self._record(part, times, begun, ended, reason)

    # -- what the engine calls -----------------------------------------------------------------

    def on_new_request(self, call: Any, request: Request) -> None:
        self._of(request)
        call(request)

    def get_num_new_matched_tokens(
        self, call: Any, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        times = self._of(request)
        if not times.asked_at:
            times.asked_at = time.perf_counter()
            self._record("queue", times, times.arrived_at, times.asked_at)
        found: tuple[int | None, bool] = call(request, num_computed_tokens)
        num_tokens, now = found[0], time.perf_counter()
        times.num_promised = num_tokens or 0
        if num_tokens is None:
            times.put_off_at = times.put_off_at or now
        else:
            self._end_wait(times, now)
        if num_tokens is not None and not times.matched_at:
            times.matched_at = now
            about: dict[str, Any] = {"num_tokens": num_tokens, "num_computed_tokens": num_computed_tokens}
            self._record("match", times, times.asked_at, now, **about)
        return found

    def update_state_after_alloc(
        self, call: Any, request: Request, block_ids: BlockIds, num_external_tokens: int
    ) -> None:
        """Raises KvplugError: fewer tokens were promised."""
        times = self._of(request)
        promised, times.num_promised = times.num_promised, 0
        if num_external_tokens > promised:
            raise KvplugError(
                f"update_state_after_alloc got {num_external_tokens} external tokens of request"
                f" {request.request_id!r:.100}, but get_num_new_matched_tokens last promised {promised}"
            )
        call(request, block_ids, num_external_tokens)
        self._end_wait(times, time.perf_counter())  # it may not have been asked again
        if num_external_tokens:
            hits = self._hit_sources(request, num_external_tokens)
            times.attributes |= {f"num_tokens.{name}": num for name, num in hits.items()}

    def build_connector_meta(self, call: Any, output: SchedulerOutput) -> Plain:
        if self._before_token:
            now = time.perf_counter()
            for each in output.scheduled:
                if each.request_id in self._before_token:
                    self._schedule(each, output.token_ids, now)
        plan: Plain = call(output)
        return plan

    def _schedule(
        self, each: ScheduledRequest, token_ids: Callable[[str], Sequence[int]] | None, now: float
    ) -> None:
        request_id, times = each.request_id, self._requests[each.request_id]
        # The engine may plan ahead of the last step's end, or compute a prompt again after a failed load.
        if times.is_computed and (token_ids is None or len(token_ids(request_id)) > times.num_prompt_tokens):
            self._note_token(times, self._stepped_at if self._stepped_at > times.scheduled_at else now)
        elif not times.scheduled_at:
            times.scheduled_at = now
            self._record("schedule", times, times.matched_at or times.arrived_at, now)
        times.is_computed = each.num_computed_tokens + each.num_scheduled_tokens >= times.num_prompt_tokens

    def update_connector_output(self, call: Any, output: WorkerOutput) -> None:
        self._stepped_at = time.perf_counter()
        call(output)

    def request_finished(
        self, call: Any, request: Request, block_ids: BlockIds, end: RequestEnd
    ) -> tuple[bool, dict[str, Any] | None]:
        found: tuple[bool, dict[str, Any] | None] = call(request, block_ids, end)
        request_id, times, now = request.request_id, self._of(request), time.perf_counter()
        if times.is_computed and end is RequestEnd.FINISHED:
            self._note_token(times, now)
        reason = "" if end is RequestEnd.FINISHED else str(end)
        if reason and request_id in self._before_token:
            self._record_rest(times, now, reason)
        self._before_token.discard(request_id)
        del self._requests[request_id]
        self._spans.record(
            "request",
            request_id,
            times.arrived_at,
            now,
            context=times.context,
            parent=times.parent,
            reason=reason,
            num_prompt_tokens=times.num_prompt_tokens,
            **times.attributes,
        )
        self._spans.end(request_id)
        keeps_blocks, params = found
        if params is not None or request.params.get("do_remote_decode") is True:
            params = {**(params or {}), TRACEPARENT: str(times.context)}
        return keeps_blocks, params

    def get_status(self, call: Any) -> Mapping[str, Plain]:
        now = time.perf_counter()
        waiting = [
            {"request_id": request_id, "seconds": now - times.put_off_at}
            for request_id, times in list(self._requests.items())
            if times.put_off_at
        ]
        return {"waiting": waiting, **call()}

    def _note_token(self, times: _Times, ended: float) -> None:
        """Note when the first token was computed."""
        if times.request_id not in self._before_token:
            return
        self._before_token.discard(times.request_id)
        self._record("prefill", times, times.scheduled_at, ended)
        times.attributes["time_to_first_token"] = ended - times.arrived_at
