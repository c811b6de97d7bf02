"""KV whose load failed is not used: not by a step under way, and not by the next request with the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import KvplugError

pytestmark = pytest.mark.smoke

PROMPT = list(range(1, 101))
RIGHT, WRONG = 7, 666
"""Tokens. The latter are computed from KV that is not there."""


def fails(it: Any, request_id: str, prompt: list[int] = PROMPT) -> None:
    """Begin a request whose first 96 tokens are promised, and do not come."""
    it.decides.offers[request_id] = 96
    it.moves.fails.add(request_id)
    it.engine.add(request_id, prompt)


@pytest.mark.parametrize("plans_ahead", [False, True], ids=["step by step", "ahead"])
def test_a_failed_load_is_computed(plans_ahead, made):
    it = made(plans_ahead=plans_ahead)
    fails(it, "a")
    told = [it.engine.step(token=WRONG)]  # which loads; nothing of it may be seen
    told += [it.engine.step(token=RIGHT) for _ in range(3)]
    assert [tokens for step in told for tokens in step.values()] == [[RIGHT]] * 3


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_a_step_under_way_does_not_use_what_failed(policy, made):
    """vLLM plans the next step before it hears of the load, and delivers what that step computes."""
    it = made(policy, plans_ahead=True)
    fails(it, "a")
    loading = it.engine.plan()
    beside = it.engine.plan()
    assert beside.num_scheduled_tokens == {}, "it waits for its load"
    told = [it.engine.report(loading, it.engine.run(loading, WRONG))]
    told += [it.engine.report(beside, it.engine.run(beside, WRONG))]
    told += [it.engine.step(RIGHT)]
    if policy == "fail":
        assert told[0] == {"a": []}
        assert it.engine.scheduler.requests == {}, "freed, once"
        return
    assert told == [{}, {}, {"a": [RIGHT]}]


def test_who_has_the_same_prompt_does_not_share_a_load_that_may_fail(made):
    it = made(plans_ahead=True)
    fails(it, "a")
    loading = it.engine.plan()
    it.engine.add("b", PROMPT)
    beside = it.engine.plan()
    assert it.engine.computed(beside) == {"b": 0}
    it.engine.report(loading, it.engine.run(loading, WRONG))
    assert it.engine.report(beside, it.engine.run(beside, RIGHT)) == {"b": [RIGHT]}


def test_a_load_that_succeeds_is_used_in_the_step_after_it(made):
    it = made(plans_ahead=True)
    it.decides.offers["a"] = 96
    it.engine.add("a", PROMPT)
    plan = it.engine.plan()
    output = it.engine.run(plan)
    assert it.moves.calls == ["bind", "start", "save"], "begun once"
    it.engine.report(plan, output)
    plan = it.engine.plan()
    assert (it.engine.computed(plan), plan.num_scheduled_tokens) == ({"a": 96}, {"a": 4})
    assert it.engine.report(plan, it.engine.run(plan, RIGHT)) == {"a": [RIGHT]}


def test_a_load_settles_where_vllm_has_not_bound_its_pool_of_blocks(made):
    """Blocks of a load that failed in its step could not be evicted, and vLLM would serve them to others."""
    it = made()
    it.engine.scheduler.connector._scheduler.bind_block_pool(None)
    fails(it, "a")
    plan = it.engine.plan()
    it.engine.add("b", PROMPT)
    beside = it.engine.plan()
    assert it.engine.computed(beside) == {"b": 0}, "which does not find the blocks of the other"
    assert it.engine.report(plan, it.engine.run(plan, WRONG)) == {}, "it waits for its load"
    assert it.engine.report(beside, it.engine.run(beside, RIGHT)) == {"b": [RIGHT]}
    assert "a" in it.engine.step(RIGHT)


@pytest.mark.parametrize("is_reported", [False, True], ids=["before the report", "after the report"])
@pytest.mark.parametrize("plans_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_an_aborted_request_leaves_nothing_of_a_failed_load_in_the_cache(
    policy, plans_ahead, is_reported, made
):
    it = made(policy, plans_ahead=plans_ahead)
    fails(it, "a")
    plan = it.engine.plan()
    output = it.engine.run(plan, WRONG)
    if is_reported:
        it.engine.report(plan, output)
        it.engine.abort("a")  # before it computes what failed
    else:
        it.engine.abort("a")  # vLLM looks for aborts before it takes the report of the step
        it.engine.report(plan, output)
        assert it.engine.scheduler.requests == {}
    it.engine.add("b", PROMPT)
    assert it.engine.computed(it.engine.plan()) == {"b": 0}


def test_who_has_the_same_prompt_waits_until_the_load_is_known_to_have_failed(made):
    """vLLM would let one of them compute it for all, and that one may be aborted before."""
    it = made()
    fails(it, "a")
    it.engine.add("b", PROMPT)
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 96}
    assert it.engine.report(plan, it.engine.run(plan, WRONG)) == {}
    it.engine.abort("a")
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"b": 0}
    assert it.engine.report(plan, it.engine.run(plan, RIGHT)) == {"b": [RIGHT]}


def test_a_load_that_succeeds_is_part_of_its_step_and_shared_from_then_on(made):
    it = made()
    it.decides.offers["a"] = 96
    it.engine.add("a", PROMPT)
    it.engine.add("b", PROMPT)
    assert it.engine.step(RIGHT) == {"a": [RIGHT]}
    assert it.moves.calls == ["bind", "start", "layer", "layer", "save"]
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"b": 96}
    assert it.engine.report(plan, it.engine.run(plan, RIGHT)) == {"a": [RIGHT], "b": [RIGHT]}


def test_who_shares_only_what_was_cached_before_does_not_wait(made):
    it = made()
    it.engine.add("first", PROMPT[:40], max_tokens=1)
    it.engine.step()
    fails(it, "a")
    it.engine.add("b", [*PROMPT[:32], *range(2000, 2040)])
    it.engine.add("c", list(range(3000, 3040)))
    assert it.engine.computed(it.engine.plan()) == {"a": 96, "b": 32, "c": 0}


def test_what_was_loaded_or_cached_before_a_load_failed_stays_cached(made):
    it = made()
    it.engine.add("first", PROMPT[:40], max_tokens=1)
    it.engine.step()
    loaded = [token + 1000 for token in PROMPT]
    it.decides.offers["b"] = 96
    it.engine.add("b", loaded)
    fails(it, "a")
    plan = it.engine.plan()
    output = it.engine.run(plan, WRONG)
    for name in ("a", "b"):
        it.engine.abort(name)
    it.engine.report(plan, output)
    it.engine.add("c", PROMPT)
    it.engine.add("d", loaded)
    assert it.engine.computed(it.engine.plan()) == {"c": 32, "d": 96}


@pytest.mark.parametrize("window", [None, 64], ids=["one group", "a window"])
@pytest.mark.parametrize("in_background", [False, True], ids=["in its step", "in the background"])
@pytest.mark.parametrize("plans_ahead", [False, True], ids=["step by step", "ahead"])
def test_what_the_connector_refuses_to_load_is_computed(plans_ahead, in_background, window, made):
    """An error of ``update_state_after_alloc`` would end vLLM's engine."""
    it = made(plans_ahead=plans_ahead, window=window)
    it.decides.in_background = in_background

    def refuse(request: Any, block_ids: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            it.decides.offers.clear()
            raise KvplugError("more tokens than were promised")

    it.decides.update_state_after_alloc = refuse
    it.decides.offers["a"] = 96
    it.engine.add("a", PROMPT)
    it.engine.add("b", [token + 5000 for token in PROMPT])
    plan = it.engine.plan()
    assert it.engine.scheduler.connector.get_kv_connector_stats().data["failures"] == {"load": {"other": 1}}
    told = [it.engine.report(plan, it.engine.run(plan, WRONG))]
    told += [it.engine.step(token=RIGHT) for _ in range(3)]
    assert {token for step in told for token in step.get("a", ())} == {RIGHT}
    assert all("b" in step for step in told), "the other request is delayed"
