"""Requests that vLLM waits for until a connector names them: late, early, twice, or never waited for.

A name that vLLM does not wait for would end its engine, by an assertion. Of several connectors in a
MultiConnector, each is told what is its own, and vLLM each name once.
"""

from __future__ import annotations

import pytest

from stepping import OTHER_PROMPT, Decides, Moves, Stepping

pytestmark = pytest.mark.smoke

# -- one connector -----------------------------------------------------------------------------------


@pytest.fixture
def it(made, errors: pytest.LogCaptureFixture):
    """In the end, the engine serves another request, and has all its blocks."""
    it = made()
    yield it
    it.decides.keeps = False
    it.add("next", OTHER_PROMPT, max_tokens=1)
    assert it.step() == {"next": [7]}
    it.step()
    assert not it.scheduler.has_requests()
    assert it.num_used_blocks == 0


@pytest.mark.parametrize("how", ["sent", "received"])
def test_a_name_that_vllm_does_not_wait_for_is_not_passed_on(how, it, errors):
    it.add("a", max_tokens=2)
    names = getattr(it.moves, how)
    names |= {"of another", "request"}
    it.step()
    assert f"of another, request as {how}" in errors.text
    if how == "sent":
        it.step()  # it has ended, and nothing was kept; before, it runs and waits for nothing
    getattr(it.moves, how).add("a")
    it.step()
    assert f"reported a as {how}" in errors.text
    assert it.decides.ended == {"a": "finished"}


def test_an_idle_engine_frees_what_it_kept_when_the_connector_names_it_and_once_only(it, errors):
    it.decides.keeps = True
    it.add("a", max_tokens=1)
    it.steps(5)
    assert it.requests == ["a"]
    assert it.scheduler.has_requests(), "it has reason to step"
    assert it.num_used_blocks == 4
    it.moves.sent.add("a")
    it.step()
    assert it.num_used_blocks == 0
    assert it.decides.sent == ["a"]
    assert "reported" not in errors.text
    it.moves.sent.add("a")
    it.step()
    assert "reported a as sent" in errors.text


@pytest.mark.parametrize("keeps", [True, False])
def test_a_request_may_be_named_before_the_worker_is_told_that_it_is_kept(keeps, it, errors):
    """A peer may have read the blocks before the step that tells this worker that they are kept."""
    it.decides.keeps = keeps
    it.add("a", max_tokens=3)
    it.step()
    it.moves.sent.add("a")
    it.steps(5)
    assert not it.requests
    assert ("reported a as sent" in errors.text) is not keeps


def test_a_load_is_received_once_and_what_failed_is_computed(it, errors):
    it.decides.in_background = it.moves.is_slow = True
    it.add("a", offers=64, max_tokens=4)
    it.steps(5)
    assert it.requests == ["a"], "it waits"
    it.moves.received.add("a")
    it.moves.failed = frozenset(it.decides.tables["a"][0][:2])
    it.step()
    assert "reported" not in errors.text
    it.moves.received.add("a")
    plan = it.plan()
    assert it.computed(plan) == {"a": 0}
    it.finish(plan)
    assert "reported a as received" in errors.text
    it.steps(3)
    assert it.decides.ended == {"a": "finished"}


def test_a_request_that_ends_while_it_loads_is_freed_when_received_and_not_when_sent(it, errors):
    it.decides.in_background = it.decides.keeps = it.moves.is_slow = True
    it.add("a", offers=64)
    it.step()
    it.abort("a")
    it.moves.sent.add("a")
    it.steps(3)
    assert "reported a as sent" in errors.text
    assert it.requests == ["a"], "something may still write to its blocks"
    errors.clear()
    it.moves.received.add("a")
    it.step()
    assert "reported" not in errors.text


def test_blocks_are_kept_until_every_worker_has_named_their_request(made):
    it = made(num_workers=3)
    it.decides.keeps = True
    it.add("a", max_tokens=1)
    it.steps(2)
    (workers,) = it.moved.values()
    for rank in (0, 0, 0, 1):  # one worker, over and over, does not make up for the others
        workers[rank].sent.add("a")
        it.steps(2)
        assert it.requests == ["a"]
    workers[2].sent.add("a")
    it.step()
    assert (it.requests, it.decides.sent) == ([], ["a"])


# -- several connectors ------------------------------------------------------------------------------

Child = tuple[Decides, Moves]


@pytest.fixture
def multi(made) -> tuple[Stepping, Child, Child]:
    """vLLM with a MultiConnector, and both sides of its two children."""
    it = made("recompute", 5001, 5002)
    one, other = ((it.decided[port], it.moved[port][0]) for port in (5001, 5002))
    return it, one, other


@pytest.mark.parametrize("loader_keeps", [False, True])
@pytest.mark.parametrize("loader_first", [False, True])
def test_what_one_loads_no_other_can_keep(loader_keeps, loader_first, multi):
    """vLLM frees at the first name and dies of the second one."""
    it, (one, one_moves), (other, other_moves) = multi
    one.offers["a"] = 96
    one.in_background = one_moves.is_slow = other.keeps = True
    one.keeps = loader_keeps
    it.add("a")
    it.step()
    it.abort("a")
    it.step()
    for is_loader in (loader_first, not loader_first):
        assert ("a" in it.requests) == (is_loader or not loader_first)
        (one_moves.received if is_loader else other_moves.sent).add("a")
        it.step()
    assert not it.requests
    assert (one.received, other.received) == (["a"], [])


def test_each_child_gets_the_handshake_metadata_of_its_own_workers(multi):
    """vLLM hands the metadata of the first child that has any to all of them."""
    it, (one, one_moves), (other, other_moves) = multi
    other_moves.handshake = {"of": "the other"}
    for own, got in ((None, [{}, {0: other_moves.handshake}]), ({"of": "one"}, [{0: {"of": "one"}}, {}])):
        one_moves.handshake = own
        metadata = {(0, 0): it.worker.get_handshake_metadata()}
        it.connector.set_xfer_handshake_metadata_pp_aware(metadata)
        assert [one.metadata, other.metadata] == got


def test_a_request_that_shares_a_load_under_way_waits_whichever_child_found_it(multi):
    it, _, (other, other_moves) = multi
    other.offers["a"] = 96
    other_moves.fails.add("a")
    it.add("a")
    it.add("b")
    plan = it.plan()
    assert it.computed(plan) == {"a": 96}
    it.finish(plan)
    assert it.computed(it.plan()) == {"b": 0}


@pytest.mark.parametrize("in_background", [False, True], ids=["in its step", "in the background"])
def test_a_child_can_tell_that_another_one_loads(in_background, multi):
    """It is asked about every prompt, and told of every failure: so it knows what it must not save."""
    it, (one, one_moves), (other, _) = multi
    one.offers["a"] = 96
    one.in_background = in_background
    one_moves.fails.add("a")
    it.add("a")
    it.step()
    assert (other.asked, other.allocated) == ([("a", 0)], [("a", 0)])
    assert other.reports[-1].invalid_block_ids == frozenset(one.tables["a"][0][:3])
    plan = it.plan()
    if in_background:
        assert (it.computed(plan), other.allocated) == ({"a": 0}, [("a", 0)] * 2)
    else:
        assert plan.scheduled_cached_reqs.num_computed_tokens == [0], "which computes all of it"
