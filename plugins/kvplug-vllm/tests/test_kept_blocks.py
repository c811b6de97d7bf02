"""Blocks that vLLM keeps until a connector names their request: named late, early, twice, or never kept.

What a connector names wrongly must not end an engine: vLLM asserts that it waits for every name.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.smoke

PROMPT = list(range(1, 101))


@pytest.fixture
def it(made, errors: pytest.LogCaptureFixture):
    """In the end, the engine serves another request, and has all its blocks."""
    it = made()
    yield it
    it.decides.keeps = False
    it.engine.add("next", [token + 5000 for token in PROMPT], max_tokens=1)
    assert it.engine.step(token=7) == {"next": [7]}
    it.engine.step()
    assert not it.engine.scheduler.has_requests()
    assert it.engine.num_used_blocks == 0


def steps(it: Any, times: int) -> None:
    for _ in range(times):
        it.engine.step()


@pytest.mark.parametrize("how", ["sent", "received"])
def test_a_name_that_vllm_does_not_wait_for_is_not_passed_on(how, it, errors):
    names = getattr(it.moves, how)
    it.engine.add("a", PROMPT, max_tokens=2)
    names |= {"of another", "request"}
    it.engine.step()
    assert f"of another, request as {how}" in errors.text
    if how == "received":  # it runs, and waits for nothing
        it.moves.received.add("a")
        it.engine.step()
    else:
        it.engine.step()
        it.moves.sent.add("a")  # it has ended, and nothing was kept
        it.engine.step()
    assert f"named a as {how}" in errors.text
    assert it.decides.ended == {"a": "finished"}


def test_an_idle_engine_frees_what_it_kept_when_the_connector_names_it_and_once_only(it, errors):
    it.decides.keeps = True
    it.engine.add("a", PROMPT, max_tokens=1)
    steps(it, 5)
    assert list(it.engine.scheduler.requests) == ["a"]
    assert it.engine.scheduler.has_requests(), "it has reason to step"
    assert it.engine.num_used_blocks == 4
    it.moves.sent.add("a")
    it.engine.step()
    assert it.engine.num_used_blocks == 0
    assert it.decides.heard[-1].finished_sending == {"a"}
    assert "named" not in errors.text
    it.moves.sent.add("a")
    it.engine.step()
    assert "named a as sent" in errors.text


@pytest.mark.parametrize("keeps", [True, False])
def test_a_request_may_be_named_before_the_worker_is_told_that_it_is_kept(keeps, it, errors):
    """A peer may have read the blocks before the step that tells this worker that they are kept."""
    it.decides.keeps = keeps
    it.engine.add("a", PROMPT, max_tokens=3)
    it.engine.step()
    it.moves.sent.add("a")
    steps(it, 5)
    assert not it.engine.scheduler.requests
    assert ("named a as sent" in errors.text) is not keeps


def test_a_load_is_received_once_and_what_failed_is_computed(it, errors):
    it.decides.offers["a"], it.decides.in_background = 64, True
    it.moves.start_load_kv = lambda: None  # it takes long
    it.engine.add("a", PROMPT, max_tokens=4)
    steps(it, 5)
    assert list(it.engine.scheduler.requests) == ["a"], "it waits"
    it.moves.received.add("a")
    it.moves.failed = frozenset(it.decides.tables["a"][0][:2])
    it.engine.step()
    assert "named" not in errors.text
    it.moves.received.add("a")
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 0}
    it.engine.report(plan, it.engine.run(plan))
    assert "named a as received" in errors.text
    steps(it, 3)
    assert it.decides.ended == {"a": "finished"}


def test_one_that_ends_while_it_loads_is_freed_when_received_and_not_when_sent(it, errors):
    it.decides.offers["a"], it.decides.in_background, it.decides.keeps = 64, True, True
    it.moves.start_load_kv = lambda: None
    it.engine.add("a", PROMPT)
    it.engine.step()
    it.engine.abort("a")
    it.moves.sent.add("a")
    steps(it, 3)
    assert "named a as sent" in errors.text
    assert list(it.engine.scheduler.requests) == ["a"], "something may still write to its blocks"
    errors.clear()
    it.moves.received.add("a")
    it.engine.step()
    assert "named" not in errors.text


def test_pending_work_keeps_an_engine_stepping_that_has_no_request(it):
    it.decides.has_pending_push_work = lambda: True
    assert it.engine.scheduler.has_requests()
    it.decides.has_pending_push_work = lambda: False
    assert not it.engine.scheduler.has_requests()
