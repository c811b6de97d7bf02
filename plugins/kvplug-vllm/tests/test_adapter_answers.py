"""What a connector answers, as vLLM can bear it: an answer of the wrong kind ends its engine."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

pytestmark = pytest.mark.smoke

PROMPT = list(range(1, 97))
"""Three whole blocks."""


@pytest.mark.parametrize("in_background", [False, True], ids=["in its step", "in the background"])
def test_a_whole_prompt_may_be_loaded(in_background, made):
    """vLLM computes its last token again, since one must be computed to get another."""
    it = made()
    it.decides.offers["a"] = 96
    it.decides.in_background = in_background
    it.engine.add("a", PROMPT)
    assert it.engine.step() == {}
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 95}
    assert it.engine.report(plan, it.engine.run(plan, 7)) == {"a": [7]}
    received = [name for output in it.decides.heard for name in output.finished_recving]
    assert received == (["a"] if in_background else []), "it hears of what it began in the background"


def test_a_whole_prompt_that_does_not_come_is_computed(made):
    it = made()
    it.decides.offers["a"] = 96
    it.moves.fails.add("a")
    it.engine.add("a", PROMPT)
    assert it.engine.step() == {}
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 0}
    assert it.engine.report(plan, it.engine.run(plan, 7)) == {"a": [7]}


@pytest.mark.parametrize("found", [97, 1000, -1])
@pytest.mark.parametrize("in_background", [False, True])
def test_more_than_is_left_is_not_loaded(found, in_background, made, errors):
    it = made()
    it.decides.get_num_new_matched_tokens = lambda request, computed: (found, in_background)
    it.engine.add("a", PROMPT)
    assert it.engine.step(token=7) == {"a": [7]}
    assert f"{found} tokens of a, where 96 are left" in errors.text


def test_nothing_is_not_loaded_in_the_background(made):
    it = made()
    it.decides.get_num_new_matched_tokens = lambda request, computed: (0, True)
    it.engine.add("a", PROMPT)
    assert it.engine.step(token=7) == {"a": [7]}


def test_not_yet_is_asked_again(made):
    it = made()
    it.decides.offers["a"] = 64
    answers, decide = [(None, True), (None, False)], it.decides.get_num_new_matched_tokens

    def decide_later(request: Any, computed: int) -> Any:
        return answers.pop() if answers else decide(request, computed)

    it.decides.get_num_new_matched_tokens = decide_later
    it.engine.add("a", PROMPT)
    assert [it.engine.step(7) for _ in range(3)] == [{}, {}, {"a": [7]}]


@pytest.mark.parametrize("replays_steps", [False, True])
def test_where_vllm_replays_whole_steps_a_request_waits_for_its_load(replays_steps, made):
    """A step that is replayed calls nothing between its layers that could wait."""
    it = made(replays_steps=replays_steps)
    assert it.loads_in_background is replays_steps
    it.decides.offers["a"] = 64
    it.engine.add("a", PROMPT)
    assert it.engine.step(7) == ({} if replays_steps else {"a": [7]})


@pytest.mark.parametrize("in_background", [False, True], ids=["in its step", "in the background"])
def test_nothing_is_loaded_for_a_request_that_reads_no_cache(in_background, made):
    """Logits of tokens that were loaded are not computed, and ``prompt_logprobs`` needs all of them."""
    it = made()
    it.decides.in_background = in_background
    it.decides.offers["a"] = 64
    asked = it.decides.get_num_new_matched_tokens = Mock(side_effect=it.decides.get_num_new_matched_tokens)
    it.engine.add("a", PROMPT, prompt_logprobs=1)
    plan = it.engine.plan()
    assert it.engine.computed(plan) == {"a": 0}
    assert it.engine.report(plan, it.engine.run(plan, 7)) == {"a": [7]}
    assert asked.call_count == 0, "it would be counted as a miss, or as a match that is not loaded"


def test_a_reset_that_the_connector_cannot_do_names_what_works(made, errors):
    it = made()
    assert it.engine.scheduler.reset_prefix_cache(reset_connector=True) is False
    assert "POST /pause?clear_cache=false" in errors.text
    errors.clear()
    it.decides.reset_cache = lambda: True
    assert it.engine.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert "clear_cache" not in errors.text
