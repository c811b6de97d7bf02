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
    assert {*produced} == {f"kvplug.{part}" for part in parts}
    parts = ("request", "queue", "match", "lease", "schedule", "load", "transfer", "prefill")
    assert {*consumed} - {"kvplug.wait"} == {f"kvplug.{part}" for part in parts}
    assert {span.context.trace_id for span in (*produced.values(), *consumed.values())} == {TRACE}
    assert produced["kvplug.request"].parent_id == "b7ad6b7169203331"
    root = consumed["kvplug.request"]
    assert root.parent_id == produced["kvplug.request"].context.span_id
    assert consumed["kvplug.load"].parent_id == root.context.span_id
    assert consumed["kvplug.transfer"].parent_id == consumed["kvplug.load"].context.span_id
    assert consumed["kvplug.transfer"].attributes["kvplug.is_verified"]
    assert consumed["kvplug.load"].attributes["kvplug.verify_seconds"] > 0
    assert root.attributes["kvplug.num_tokens.peer"] == 96
    phases = [consumed[f"kvplug.{name}"] for name in ("queue", "match", "schedule", "prefill")]
    explained = sum(span.duration_ns for span in phases)
    assert explained == pytest.approx(root.attributes["kvplug.time_to_first_token"] * 1e9, rel=0.01)


def test_a_refused_lease_names_its_reason() -> None:
    ours = SpanLog()
    with pair({"lease_s": 0.5}, consumer={"spans": ours}) as (prefill, decode):
        params = stored(prefill)
        until_named(prefill, "stored")
        assert loaded(decode, request_of("a", PROMPT, params=params)) == 0
    lease = next(span for span in ours.of_request("a") if span.name == "kvplug.lease")
    assert lease.reason == "expired"
