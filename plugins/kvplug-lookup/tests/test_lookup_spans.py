"""The spans of saves and loads: in one trace at both ends, with sources, arrivals and reasons."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from kvplug.engine import SpanLog
from kvplug.transport import Deadline, MissReason
from kvplug_testing import waits
from kvplug_testing.engine import request_of
from lookup_engines import PROMPT, missed, pair, until_promised

pytestmark = pytest.mark.timeout(60)

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARAMS = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@pytest.mark.parametrize(("is_mapped", "integrity"), [(True, "auto"), (False, "auto"), (True, "off")])
def test_a_prompt_that_is_saved_and_loaded_leaves_one_trace_at_both_ends(
    is_mapped: bool, integrity: str
) -> None:
    theirs, ours = SpanLog(), SpanLog()
    given = {"integrity": integrity, "options": {"host": {"map": is_mapped}}}
    spans: dict[str, Any] = {"ours": {"spans": theirs}, "theirs": {"spans": ours}}
    with pair(producer=given, consumer={"integrity": integrity}, **spans) as (prefill, decode):
        saved = request_of("saved", PROMPT, params={**PARAMS, "do_remote_decode": True})
        _, params = prefill.hand_off(saved)
        assert params is not None
        until_promised(decode, PROMPT, 96)
        decode.load(request_of("loaded", PROMPT, params=params))
        parts = {"save", "serve"}
        waits.until(lambda: parts <= {s.name for s in theirs.of_request(TRACE)}, what="save and serve")
    found = {span.name: span for span in (*theirs.of_request(TRACE), *ours.of_request("loaded"))}
    assert {span.context.trace_id for span in found.values()} == {TRACE}
    assert found["save"].attributes == {"source": "host", "num_pages": 6}
    assert found["serve"].attributes == {"num_pages": 6}
    assert found["serve"].parent_id == found["load"].parent_id
    load, get = found["load"], found["get"]
    assert (get.parent_id, load.attributes["num_tokens"]) == (load.context.span_id, 96)
    assert get.attributes["num_pages"] == 6 and get.attributes["source"]
    has_own_pass = integrity == "auto" and not is_mapped  # a pipe writes into the cache itself
    assert (get.attributes["verify_seconds"] > 0) is has_own_pass
    ends = [span.start_ns + span.duration_ns for span in (load, get)]
    assert ends[0] - ends[1] < 1000, "the load ends when its last page has come, not with the step"
    arrivals = [span for span in ours.of_request("loaded") if span.name == "transfer"]
    assert arrivals[-1].attributes["last_layer"] == 2
    assert {span.attributes["is_verified"] for span in arrivals} == {integrity == "auto"}
    assert load.start_ns <= arrivals[0].start_ns <= load.start_ns + load.duration_ns


def test_a_load_that_fails_names_the_reason_and_the_source() -> None:
    ours = SpanLog()
    with pair(theirs={"spans": ours}) as (prefill, decode):
        prefill.prefill(request_of("saved", PROMPT))
        until_promised(decode, PROMPT, 96)
        (peer,) = decode.worker.peers.values()
        store, _ = peer.connected(Deadline.after(10), retry=True)
        with mock.patch.object(store, "submit_get", lambda pages, timeout: missed(pages, MissReason.EVICTED)):
            decode.load(request_of("loaded", PROMPT))
    failed = {span.name: span for span in ours.of_request("loaded") if span.reason}
    assert {*failed} == {"load", "get"}
    assert {span.reason for span in failed.values()} == {"evicted"}
    assert failed["get"].attributes["source"]
