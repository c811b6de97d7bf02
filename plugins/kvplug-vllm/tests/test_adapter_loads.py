"""What vLLM's scheduler loads, and KV whose load failed: no step under way uses it, nor the next request."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from kvplug import KvplugError
from stepping import BLOCK, OTHER_PROMPT, PROMPT, Stepping

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvplug_vllm.releases.base import FAILS_BY_REQUEST

pytestmark = pytest.mark.smoke

RIGHT, WRONG = 7, 666
"""Tokens. The latter are computed from KV that is not there."""
IN_BACKGROUND = pytest.mark.parametrize(
    "in_background", [False, True], ids=["in its step", "in the background"]
)
PLANS_AHEAD = pytest.mark.parametrize("plans_ahead", [False, True], ids=["step by step", "ahead"])
POLICIES = pytest.mark.parametrize("policy", ["recompute", "fail"])
SEVERAL_GROUPS = pytest.mark.skipif(
    not FAILS_BY_REQUEST, reason="this release of vLLM makes one group for any connector"
)


# -- what a connector answers ------------------------------------------------------------------------


@IN_BACKGROUND
@pytest.mark.parametrize("fails", [False, True], ids=["loaded", "failed"])
def test_a_whole_prompt_may_be_loaded(fails, in_background, made):
    """vLLM computes its last token again, since one must be computed to get another."""
    it = made()
    it.decides.in_background = in_background
    it.add("a", PROMPT[:96], offers=96, fails=fails)
    assert it.step() == {}
    plan = it.plan()
    assert it.computed(plan) == {"a": 0 if fails else 95}
    assert it.finish(plan, RIGHT) == {"a": [RIGHT]}
    assert it.decides.received == (["a"] if in_background else []), "those that began in the background"


def test_a_connector_that_does_not_know_yet_is_asked_again(made):
    it = made()
    it.add("a", offers=64)
    answers, decide = [(None, True), (None, False)], it.decides.get_num_new_matched_tokens
    it.decides.get_num_new_matched_tokens = lambda *asked: answers.pop() if answers else decide(*asked)
    assert it.steps(3) == [{}, {}, {"a": [7]}]


@pytest.mark.parametrize("replays_steps", [False, True])
def test_where_vllm_replays_whole_steps_a_request_waits_for_its_load(replays_steps, made):
    """A step that is replayed calls nothing between its layers that could wait."""
    it = made(replays_steps=replays_steps)
    assert it.loads_in_background is replays_steps
    it.add("a", offers=64)
    assert it.step() == ({} if replays_steps else {"a": [7]})


@IN_BACKGROUND
def test_nothing_is_loaded_for_a_request_that_reads_no_cache(in_background, made):
    """Logits of tokens that were loaded are not computed, and ``prompt_logprobs`` needs all of them."""
    it = made()
    it.decides.in_background = in_background
    it.add("a", offers=64, prompt_logprobs=1)
    plan = it.plan()
    assert it.computed(plan) == {"a": 0}
    assert it.finish(plan) == {"a": [7]}
    assert it.decides.asked == [], "it would be counted as a miss, or as a match that is not loaded"


# -- loads that succeed ------------------------------------------------------------------------------


def test_a_load_that_succeeds_is_part_of_its_step_and_shared_from_then_on(made):
    it = made()
    it.add("a", offers=96)
    it.add("b")
    assert it.step() == {"a": [7]}
    assert it.moves.calls == ["bind", "start", "layer", "layer", "save"]
    plan = it.plan()
    assert it.computed(plan) == {"b": 96}
    assert it.finish(plan) == {"a": [7], "b": [7]}


def test_a_load_is_used_in_the_step_after_it_where_vllm_plans_ahead(made):
    it = made(plans_ahead=True)
    it.add("a", offers=96)
    plan = it.plan()
    output = it.run(plan)
    assert it.moves.calls == ["bind", "start", "save"], "begun once"
    it.report(plan, output)
    plan = it.plan()
    assert (it.computed(plan), plan.num_scheduled_tokens) == ({"a": 96}, {"a": 4})
    assert it.finish(plan) == {"a": [7]}


# -- loads that fail ---------------------------------------------------------------------------------


@POLICIES
def test_a_step_under_way_does_not_use_what_failed(policy, made):
    """vLLM plans the next step before it knows the load's end, and delivers what that step computes."""
    it = made(policy, plans_ahead=True)
    it.add("a", offers=96, fails=True)
    loading = it.plan()
    it.add("b")
    beside = it.plan()
    assert it.computed(beside) == {"b": 0}, "which does not share what may fail; a waits for its load"
    first = it.finish(loading, WRONG)
    assert first == ({"a": []} if policy == "fail" else {})
    assert it.finish(beside, RIGHT) == {"b": [RIGHT]}
    if policy == "fail":
        assert it.requests == ["b"], "freed, once"
    else:
        assert it.step(RIGHT)["a"] == [RIGHT]


def test_a_load_settles_where_vllm_has_not_bound_its_pool_of_blocks(made):
    """Blocks of a load that failed in its step could not be evicted, and vLLM would serve them to others."""
    it = made()
    it.connector.bind_gpu_block_pool(None)
    it.add("a", offers=96, fails=True)
    plan = it.plan()
    it.add("b")
    beside = it.plan()
    assert it.computed(beside) == {"b": 0}, "which does not find the blocks of the other"
    assert it.finish(plan, WRONG) == {}, "it waits for its load"
    assert it.finish(beside, RIGHT) == {"b": [RIGHT]}
    assert "a" in it.step(RIGHT)


@pytest.mark.parametrize("is_reported", [False, True], ids=["before the report", "after the report"])
@PLANS_AHEAD
@POLICIES
def test_an_aborted_request_leaves_nothing_of_a_failed_load_in_the_cache(
    policy, plans_ahead, is_reported, made
):
    it = made(policy, plans_ahead=plans_ahead)
    it.add("a", offers=96, fails=True)
    plan = it.plan()
    output = it.run(plan, WRONG)
    if is_reported:
        it.report(plan, output)
        it.abort("a")  # before it computes what failed
    else:
        it.abort("a")  # vLLM looks for aborts before it takes the report of the step
        it.report(plan, output)
        assert it.requests == []
    it.add("b")
    assert it.computed(it.plan()) == {"b": 0}


def test_a_request_with_the_same_prompt_waits_until_the_load_is_known_to_have_failed(made):
    """vLLM would let one of them compute it for all, and that one may be aborted before."""
    it = made()
    it.add("a", offers=96, fails=True)
    it.add("b")
    plan = it.plan()
    assert it.computed(plan) == {"a": 96}
    assert it.finish(plan, WRONG) == {}
    it.abort("a")
    plan = it.plan()
    assert it.computed(plan) == {"b": 0}
    assert it.finish(plan, RIGHT) == {"b": [RIGHT]}


def test_what_was_loaded_or_cached_before_a_load_failed_stays_cached(made):
    it = made()
    it.add("first", PROMPT[:40], max_tokens=1)
    it.step()
    it.add("b", OTHER_PROMPT, offers=96)
    it.add("a", offers=96, fails=True)
    plan = it.plan()
    output = it.run(plan, WRONG)
    for name in ("a", "b"):
        it.abort(name)
    it.report(plan, output)
    it.add("c")
    it.add("d", OTHER_PROMPT)
    assert it.computed(it.plan()) == {"c": 32, "d": 96}


@pytest.mark.parametrize(
    "window",
    [pytest.param(None, id="one group"), pytest.param(64, id="a window", marks=SEVERAL_GROUPS)],
)
@IN_BACKGROUND
@PLANS_AHEAD
@pytest.mark.parametrize("refuses", [False, True], ids=["fails", "is refused"])
def test_a_load_that_fails_or_that_the_connector_refuses_is_computed(
    refuses, plans_ahead, in_background, window, made
):
    """An error of ``update_state_after_alloc`` would end vLLM's engine."""
    it = made(plans_ahead=plans_ahead, window=window)
    it.decides.in_background = in_background

    def refuse(request: Any, block_ids: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            it.decides.offers.clear()
            raise KvplugError("more tokens than were promised")

    if refuses:
        it.decides.update_state_after_alloc = refuse
    it.add("a", offers=96, fails=True)
    it.add("b", OTHER_PROMPT)
    plan = it.plan()
    stats = it.connector.get_kv_connector_stats()
    assert (stats and stats.data["failures"]) == ({"load": {"other": 1}} if refuses else None)
    sent = [it.finish(plan, WRONG), *(it.step(RIGHT) for _ in range(3))]
    assert [token for step in sent for token in step.get("a", ())][:2] == [RIGHT] * 2
    assert all("b" in step for step in sent), "the other request is delayed"


# -- several KV cache groups -------------------------------------------------------------------------

LONG, WINDOW, OFFERED = list(range(1, 301)), 80, 288
ABSENT = (OFFERED - WINDOW + 1) // BLOCK
"""Blocks that the layer with a window needs no more after the load."""


@pytest.fixture(params=[False, True], ids=["in its step", "in the background"])
def windowed(request: pytest.FixtureRequest, made) -> Stepping:
    it: Stepping = made(window=WINDOW)
    it.decides.in_background = request.param
    return it


@SEVERAL_GROUPS
@PLANS_AHEAD
@POLICIES
def test_a_failed_load_of_groups_is_reported_by_its_request(policy, plans_ahead, made):
    it = made(policy, plans_ahead=plans_ahead, window=WINDOW)
    it.add("a", LONG, offers=OFFERED, fails=True)
    it.add("b", [token + 1000 for token in LONG], offers=OFFERED)
    sent = it.step(WRONG)
    (report,) = [each for each in it.decides.reports if each.invalid_block_ids]
    window, full = it.decides.tables["a"]
    assert report.invalid_block_ids == {*window[ABSENT:], *full}
    assert sent == ({"a": []} if policy == "fail" else {})
    plan = it.plan()
    if policy == "fail":
        assert it.requests == ["b"], "freed, once"
        assert it.computed(plan) == {"b": OFFERED}
    else:  # from the beginning: parts of the window may be gone
        assert it.computed(plan) == {"a": 0, "b": OFFERED}
        assert it.finish(plan, RIGHT) == {"a": [RIGHT], "b": [RIGHT]}


@SEVERAL_GROUPS
def test_what_an_aborted_request_left_in_groups_is_not_cached(windowed):
    it = windowed
    it.add("a", LONG, offers=OFFERED, fails=True)
    plan = it.plan()
    it.abort("a")
    it.finish(plan, WRONG)
    it.step()
    assert it.requests == []
    it.add("b", LONG)
    plan = it.plan()
    assert it.computed(plan) == {"b": 0}
    it.finish(plan, RIGHT)
    it.abort("b")
    it.step()
    assert it.num_used_blocks == 0


@SEVERAL_GROUPS
def test_a_connector_for_one_group_is_refused_with_what_to_do(made, monkeypatch):
    monkeypatch.setattr("kvplug_lookup.connector.scheduler.LookupScheduler.supports_hma", False)
    with pytest.raises(Exception, match=r"'lookup' supports one KV cache group .* --disable-hybrid-kv-cache"):
        made(window=WINDOW)
