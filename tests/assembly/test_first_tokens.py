"""The time of a request's first token is right whatever the engine does before it."""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest

from kvplug.assembly.request_spans import RequestSpans
from kvplug.engine import RequestEnd, ScheduledRequest, SchedulerOutput, SpanLog, WorkerOutput
from kvplug.metrics.stats import TransferStats
from kvplug_testing.engine import request_of

PROMPT = 100


class Engine:
    """Calls a connector as an engine does that serves one request."""

    def __init__(self, *, is_asked: bool = True, is_found: bool = True) -> None:
        self.spans, self.connector = SpanLog(), Mock()
        self.connector.get_num_new_matched_tokens.return_value = (0 if is_found else None, False)
        self.connector.request_finished.return_value = (False, None)
        RequestSpans(self.connector, self.spans, TransferStats())
        self.request = request_of("a", range(PROMPT))
        self.num_tokens = PROMPT
        self.before = time.perf_counter()
        self.connector.on_new_request(self.request)
        self.behind = time.perf_counter()
        if is_asked:
            self.connector.get_num_new_matched_tokens(self.request, 0)

    def plan(self, num_computed: int, num_scheduled: int) -> None:
        scheduled = ScheduledRequest(
            request_id="a", num_computed_tokens=num_computed, num_scheduled_tokens=num_scheduled
        )
        self.connector.build_connector_meta(
            SchedulerOutput(
                step=1,
                scheduled=(scheduled,),
                block_ids=lambda _: ((),),
                token_ids=lambda _: range(self.num_tokens),
            )
        )

    def end_step(self, *, has_token: bool) -> float:
        """Report the end of a step. Returns when."""
        self.num_tokens += has_token
        now = time.perf_counter()
        self.connector.update_connector_output(WorkerOutput())
        return now

    def first_token(self) -> tuple[float, float]:
        """End the request. Returns when it had its first token, at the earliest and at the latest."""
        self.connector.request_finished(self.request, ((),), RequestEnd.FINISHED)
        parts = {span.name: span for span in self.spans.of_request("a")}
        after = parts["request"].attributes["time_to_first_token"]
        assert isinstance(after, float)
        phases = [parts[name].duration_ns / 1e9 for name in ("queue", "match", "schedule", "prefill")]
        assert sum(phases) == pytest.approx(after, rel=0.01, abs=1e-3)
        return self.before + after, self.behind + after


def test_an_engine_that_plans_ahead_has_its_token_when_the_step_has_ended() -> None:
    engine = Engine()
    engine.plan(0, PROMPT)
    engine.end_step(has_token=False)  # of the step before
    engine.plan(PROMPT, 1)
    ended = engine.end_step(has_token=True)
    engine.plan(PROMPT + 1, 1)
    later = engine.end_step(has_token=True)
    earliest, latest = engine.first_token()
    assert earliest < later and ended <= latest


def test_a_step_whose_load_has_failed_has_no_token() -> None:
    engine = Engine()
    engine.plan(96, PROMPT - 96)
    engine.end_step(has_token=False)
    engine.plan(0, PROMPT)
    ended = engine.end_step(has_token=True)
    engine.plan(PROMPT, 1)
    later = engine.end_step(has_token=True)
    earliest, latest = engine.first_token()
    assert earliest < later and ended <= latest


def test_a_request_that_ends_with_its_first_token_has_it_by_then() -> None:
    engine = Engine()
    engine.plan(0, PROMPT)
    engine.end_step(has_token=False)  # of the step before
    engine.num_tokens += 1
    ended = time.perf_counter()
    assert ended <= engine.first_token()[1]


@pytest.mark.parametrize("part", ["queue", "match", "schedule", "prefill"])
def test_the_part_in_which_a_request_is_aborted_has_that_reason(part: str) -> None:
    engine = Engine(is_asked=part != "queue", is_found=part != "match")
    if part == "prefill":
        engine.plan(0, PROMPT)
    engine.connector.request_finished(engine.request, ((),), RequestEnd.ABORTED)
    spans = {span.name: span for span in engine.spans.of_request("a")}
    last = spans[part]
    request = spans["request"]
    assert (last.reason, request.reason) == ("aborted", "aborted")
    assert last.start_ns + last.duration_ns == pytest.approx(request.start_ns + request.duration_ns, abs=1e6)
    assert sum(span.duration_ns for span in spans.values()) == pytest.approx(2 * request.duration_ns, abs=1e6)
