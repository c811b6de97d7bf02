"""The spans of a request at both ends are one trace, and leave no gap before its first token."""

from __future__ import annotations

import pytest

from kvplug.engine import SpanLog
from kvplug_testing.engine import request_of
from p2p_engines import PROMPT, loaded, pair, stored, until_named

pytestmark = pytest.mark.timeout(60)

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"


@pytest.mark.parametrize("is_async", [False, True])
def test_the_spans_of_a_prompt_at_both_ends_are_one_trace(is_async: bool) -> None:
    theirs, ours = SpanLog(), SpanLog()
    with pair({"async_load": is_async}, producer={"spans": theirs}, consumer={"spans": ours}) as (
        prefill,
        decode,
    ):
        params = stored(prefill, params={"traceparent": CALLER, "do_remote_decode": True})
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 96
        decode.step([])
        until_named(prefill, "stored")
    produced = {span.name: span for span in theirs.of_request("stored")}
    consumed = {span.name: span for span in ours.of_request("a")}
    parts = ("request", "schedule", "prefill", "send", "hold")
    assert {*produced} == {*parts}
    parts = ("request", "queue", "match", "lease", "schedule", "load", "transfer", "prefill")
    assert {*consumed} - {"wait"} == {*parts}
    assert {span.context.trace_id for span in (*produced.values(), *consumed.values())} == {TRACE}
    assert produced["request"].parent_id == "b7ad6b7169203331"
    root = consumed["request"]
    assert root.parent_id == produced["request"].context.span_id
    assert consumed["load"].parent_id == root.context.span_id
    assert consumed["transfer"].parent_id == consumed["load"].context.span_id
    assert consumed["transfer"].attributes["is_verified"]
    assert consumed["load"].attributes["verify_seconds"] > 0
    assert root.attributes["num_tokens.peer"] == 96
    phases = [consumed[name] for name in ("queue", "match", "schedule", "prefill")]
    explained = sum(span.duration_ns for span in phases)
    assert explained == pytest.approx(root.attributes["time_to_first_token"] * 1e9, rel=0.01)


def test_a_refused_lease_names_its_reason() -> None:
    ours = SpanLog()
    with pair({"lease_s": 0.5}, consumer={"spans": ours}) as (prefill, decode):
        params = stored(prefill)
        until_named(prefill, "stored")
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 0
    lease = next(span for span in ours.of_request("a") if span.name == "lease")
    assert lease.reason == "expired"
