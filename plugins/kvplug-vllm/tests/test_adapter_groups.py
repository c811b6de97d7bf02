"""Several KV cache groups, in vLLM's own scheduler: what is told of blocks, and of loads that fail."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from kvplug.engine import NO_BLOCK

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvplug_vllm.releases.base import FAILS_BY_REQUEST

pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(not FAILS_BY_REQUEST, reason="this release of vLLM makes one group for any connector"),
]

PROMPT = list(range(1, 301))
WINDOW, BLOCK, OFFERED = 80, 32, 288
ABSENT = (OFFERED - WINDOW + 1) // BLOCK
"""Blocks that the layer with a window needs no more after the load."""
RIGHT, WRONG = 7, 666
"""Tokens. The latter are computed from KV that is not there."""


@pytest.fixture(params=[False, True], ids=["in its step", "in the background"])
def it(request: pytest.FixtureRequest, made):
    it = made(window=WINDOW)
    it.decides.in_background = request.param
    return it


def begin(it: Any, request_id: str, *, fails: bool = False) -> None:
    it.decides.offers[request_id] = OFFERED
    if fails:
        it.moves.fails.add(request_id)
    it.engine.add(request_id, PROMPT)


def test_a_load_is_waited_for_and_has_the_blocks_that_are_needed(it):
    begin(it, "a")
    assert it.engine.step(WRONG) == {}, "it waits for its load, whether that is in the background or not"
    windowed, full = it.decides.tables["a"]
    assert windowed[:ABSENT] == (NO_BLOCK,) * ABSENT
    assert NO_BLOCK not in windowed[ABSENT:] + full
    assert len(set(windowed[ABSENT:] + full)) == len(windowed) - ABSENT + len(full), "of one pool"
    plan = it.engine.plan()
    assert (it.engine.computed(plan), plan.num_scheduled_tokens) == ({"a": OFFERED}, {"a": 12})
    assert it.engine.report(plan, it.engine.run(plan, RIGHT)) == {"a": [RIGHT]}


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_failed_load_is_told_by_its_request(policy, plans_ahead, made):
    it = made(policy, plans_ahead=plans_ahead, window=WINDOW)
    begin(it, "a", fails=True)
    told = it.engine.step(WRONG)
    (heard,) = [each for each in it.decides.heard if each.invalid_block_ids]
    windowed, full = it.decides.tables["a"]
    assert heard.invalid_block_ids == {*windowed[ABSENT:], *full}
    if policy == "fail":
        assert told == {"a": []}
        assert it.engine.scheduler.requests == {}, "freed, once"
        return
    assert told == {}
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 0}, "from the beginning: parts of the window may be gone"
    assert it.engine.report(plan, it.engine.run(plan, RIGHT)) == {"a": [RIGHT]}


def test_a_load_that_fails_is_not_another_requests(it):
    begin(it, "a", fails=True)
    it.decides.offers["b"] = OFFERED
    it.engine.add("b", [token + 1000 for token in PROMPT])
    assert it.engine.step(WRONG) == {}
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 0, "b": OFFERED}


def test_what_an_aborted_request_left_is_not_cached(it):
    begin(it, "a", fails=True)
    plan = it.engine.plan()
    it.engine.abort("a")
    it.engine.report(plan, it.engine.run(plan, WRONG))
    it.engine.step()
    assert it.engine.scheduler.requests == {}
    it.engine.add("b", PROMPT)
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"b": 0}
    free = it.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    it.engine.report(plan, it.engine.run(plan, RIGHT))
    it.engine.abort("b")
    it.engine.step()
    assert it.engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() > free


def test_a_connector_for_one_group_is_refused_with_what_to_do(made, monkeypatch):
    monkeypatch.setattr("kvplug_lookup.connector.scheduler.LookupScheduler.supports_hma", False)
    with pytest.raises(Exception, match=r"'lookup' serves one KV cache group .* --disable-hybrid-kv-cache"):
        made(window=WINDOW)


def test_hints_are_counted_as_ignored(made):
    hints = pytest.importorskip("vllm.v1.kv_hints")
    it = made()
    actions = [hints.KvHintAction(f"{kind}", kind, "1", {}) for kind in ("fetch", "pin", "fetch")]
    given = hints.KvHintsEnvelope(protocol_version="1", message_id="1", actions=actions)
    it.engine.add("a", PROMPT, kv_hints=given)
    stats = it.engine.scheduler.connector.get_kv_connector_stats()
    assert stats.data["failures"] == {"hint": {"ignored": 3}}
