"""Several KvplugConnectors in a MultiConnector: each hears of what is its own, and vLLM of each name once."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.smoke

PROMPT = list(range(1, 101))
ONE, OTHER = 5001, 5002


@pytest.fixture
def it(made):
    return made("recompute", ONE, OTHER)


def named(outputs: list[Any], how: str) -> list[str]:
    return [name for output in outputs for name in getattr(output, how)]


def test_blocks_that_both_keep_are_freed_when_both_have_named_them(it):
    (one, one_moves), (other, other_moves) = it.child(ONE), it.child(OTHER)
    one.keeps = other.keeps = True
    it.engine.add("a", PROMPT, max_tokens=1)
    it.engine.step()
    one_moves.sent.add("a")
    it.engine.step()
    assert list(it.engine.scheduler.requests) == ["a"]
    other_moves.sent.add("a")
    it.engine.step()
    assert not it.engine.scheduler.requests
    assert named(one.heard, "finished_sending") == named(other.heard, "finished_sending") == ["a"]


@pytest.mark.parametrize("loader_keeps", [False, True])
@pytest.mark.parametrize("loader_first", [False, True])
def test_what_one_loads_no_other_can_keep(loader_keeps, loader_first, it):
    """vLLM frees at the first name and dies of the second one."""
    (one, one_moves), (other, other_moves) = it.child(ONE), it.child(OTHER)
    one.offers["a"] = 96
    one.in_background = True
    one.keeps, other.keeps = loader_keeps, True
    one_moves.start_load_kv = lambda: None  # it goes on and on
    it.engine.add("a", PROMPT)
    it.engine.step()
    it.engine.abort("a")
    it.engine.step()
    for is_loader in (loader_first, not loader_first):
        assert ("a" in it.engine.scheduler.requests) == (is_loader or not loader_first)
        (one_moves.received if is_loader else other_moves.sent).add("a")
        it.engine.step()
    assert not it.engine.scheduler.requests
    assert (named(one.heard, "finished_recving"), named(other.heard, "finished_recving")) == (["a"], [])


def test_a_request_that_waited_for_one_may_be_kept_by_another_when_it_has_run(it):
    (one, _), (other, other_moves) = it.child(ONE), it.child(OTHER)
    one.offers["a"] = 96
    one.in_background = other.keeps = True
    it.engine.add("a", PROMPT, max_tokens=1)
    it.engine.step()
    assert it.engine.step(token=7) == {"a": [7]}
    other_moves.sent.add("a")
    it.engine.step()
    assert not it.engine.scheduler.requests
    assert named(other.heard, "finished_sending") == ["a"]


def test_each_hears_what_its_own_workers_say_at_start(it):
    """vLLM hands the metadata of the first child that has any to all of them."""
    (one, one_moves), (other, other_moves) = it.child(ONE), it.child(OTHER)
    other_moves.says = {"of": "the other"}
    for says, heard in (None, [{}, {0: other_moves.says}]), ({"of": "one"}, [{0: {"of": "one"}}, {}]):
        one_moves.says = says
        metadata = {(0, 0): it.engine.worker.get_handshake_metadata()}
        it.engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(metadata)
        assert [one.metadata, other.metadata] == heard


def test_the_first_that_offers_something_loads_it(it):
    (one, _), (other, _) = it.child(ONE), it.child(OTHER)
    one.offers["a"] = other.offers["a"] = 64
    other.in_background = True
    it.engine.add("a", PROMPT)
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 64}
    it.engine.report(plan, it.engine.run(plan, 7))
    assert other.offers == {"a": 64}, "it was not told to load"


def test_whoever_shares_a_load_under_way_waits_whichever_child_found_it(it):
    (_, _), (other, other_moves) = it.child(ONE), it.child(OTHER)
    other.offers["a"] = 96
    other_moves.fails.add("a")
    it.engine.add("a", PROMPT)
    it.engine.add("b", PROMPT)
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 96}
    it.engine.report(plan, it.engine.run(plan))
    assert it.engine.computed(it.engine.plan()) == {"b": 0}


def test_a_child_can_tell_that_another_one_loads_within_the_step(it):
    """It is asked about every prompt, and hears of every failure: so it knows what it must not save."""
    (one, one_moves), (other, _) = it.child(ONE), it.child(OTHER)
    one.offers["a"] = 96
    one_moves.fails.add("a")
    it.engine.add("a", PROMPT)
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 96}
    assert (other.asked, other.allocated) == ([("a", 0)], [("a", 0)])
    it.engine.report(plan, it.engine.run(plan))
    assert other.heard[-1].invalid_block_ids == frozenset(one.tables["a"][0][:3])
    assert it.engine.plan().scheduled_cached_reqs.num_computed_tokens == [0], "which computes all of it"


def test_a_child_can_tell_that_another_one_has_loaded_in_the_background(it):
    (one, _), (other, _) = it.child(ONE), it.child(OTHER)
    one.offers["a"] = 96
    one.in_background = True
    it.engine.add("a", PROMPT)
    it.engine.step()
    assert other.allocated == [("a", 0)]
    it.engine.step()
    assert (other.asked, other.allocated) == ([("a", 0)], [("a", 0)] * 2)
