"""vLLM forgets what it has cached, inside and outside: KV of other weights is not loaded any more."""

from __future__ import annotations

import time
import uuid
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

SMALL = {"block_size": 32}


# -- in the engine's process ---------------------------------------------------------------------


def reset(llm: Any, **how: bool) -> bool:
    return bool(llm.reset_prefix_cache(**how))


def change_weights(llm: Any) -> None:
    """To other norms, which make other keys and values of every token in every layer; or back."""

    def change(model: Any) -> None:
        model.is_changed = not getattr(model, "is_changed", False)
        for layer in model.model.layers:
            layer.input_layernorm.weight.data[::2] *= 2 if model.is_changed else 0.5

    llm.apply_model(change)


def connector_wants_a_step(llm: Any) -> bool:
    return bool(llm.llm_engine.engine_core.engine_core.scheduler.connector.has_pending_push_work())


# -- tests ---------------------------------------------------------------------------------------


def ask(engine: Any, function: str, **arguments: Any) -> Any:
    return engine.ask("call", where=f"{__file__}:{function}", **arguments)


def test_after_a_producer_was_reset_its_consumer_loads_nothing_that_was_stored_before(
    start: Any, config_for: Any, prompts: Any, alone: Any, port: int, multiprocess: Any
) -> None:
    """Its core has a loop of its own here, and nothing to do: the connector asks for the step.

    A load that was promised just before, and finds nothing any more, is computed.
    """
    with (
        start(config_for("kv_producer", port), env=multiprocess, **SMALL) as prefill,
        start(config_for("kv_consumer", port, kv_load_failure_policy="recompute"), **SMALL) as decode,
    ):
        prefill.generate(list(prompts.values()), max_tokens=1)
        assert decode.one(prompts[300]).num_cached > 0
        assert ask(decode, "reset", reset_connector=True) is False
        assert "reset that engine" in decode.peer.stderr
        assert ask(prefill, "reset", reset_connector=True) is True
        deadline = time.monotonic() + 120
        while (answer := decode.one(prompts[700])).num_cached:  # until that step has run
            assert time.monotonic() < deadline
            assert ask(decode, "reset") is True, "what vLLM itself cached"
        assert answer.tokens == alone[700]
        assert [decode.one(prompts[length]).num_cached for length in (100, 1500)] == [0, 0]
        assert ask(decode, "reset") is True
        prefill.one(prompts[700], max_tokens=1)
        answer = decode.one(prompts[700])
        assert answer.num_cached > 0
        assert answer.tokens == alone[700]


@pytest.fixture(scope="module")
def engine(exits: Any, start: Any, config_for: Any, free_port: Any) -> Any:
    """It loads what it has stored itself, and computes long prompts in chunks."""
    return exits.enter_context(start(config_for("kv_both", free_port()), max_num_batched_tokens=256, **SMALL))


def cold(engine: Any, prompt: Any) -> tuple[int, ...]:
    """What the engine says to a prompt of which it finds nothing anywhere."""
    answer = engine.one(prompt, salt=uuid.uuid4().hex)
    assert answer.num_cached == 0
    return tuple(answer.tokens)


def test_an_engine_whose_weights_change_loads_nothing_that_the_old_ones_computed(
    engine: Any, prompts: Any
) -> None:
    prompt = prompts[700]
    old = engine.one(prompt).tokens
    assert ask(engine, "reset") is True
    answer = engine.one(prompt)
    assert (answer.num_cached > 0, answer.tokens) == (True, old), "loaded from its own store"

    ask(engine, "change_weights")
    new = cold(engine, prompt)
    assert ask(engine, "reset") is True
    answer = engine.one(prompt)
    assert answer.num_cached > 0
    assert answer.tokens != new, "the control: old KV makes a difference"

    assert ask(engine, "reset", reset_connector=True) is True
    assert ask(engine, "connector_wants_a_step")
    answer = engine.one(prompt)
    assert (answer.num_cached, answer.tokens) == (0, new)
    assert not ask(engine, "connector_wants_a_step")
    assert ask(engine, "reset") is True
    answer = engine.one(prompt)
    assert (answer.num_cached > 0, answer.tokens) == (True, new)


def begun(engine: Any, prompt: Any) -> str:
    """A request whose first chunk has been computed. Before that the connector may have said "not yet"."""
    request_id = str(engine.ask("begin", prompt=prompt, max_tokens=16))
    while not engine.state()["used_blocks"]:
        engine.ask("step")
    return request_id


def test_a_prompt_that_starts_over_with_new_weights_is_stored_as_they_compute_it(
    engine: Any, prompts: Any
) -> None:
    prompt = prompts[1500]
    request_id = begun(engine, prompt)
    ask(engine, "change_weights")
    assert ask(engine, "reset", reset_running_requests=True, reset_connector=True) is True
    tokens = tuple(engine.ask("run")[request_id])
    new = cold(engine, prompt)
    assert tokens == new
    assert ask(engine, "reset") is True
    answer = engine.one(prompt)
    assert (answer.num_cached > 0, answer.tokens) == (True, new)


def test_a_prompt_that_goes_on_with_new_weights_is_not_stored(engine: Any, prompts: Any) -> None:
    prompt = prompts[300]
    request_id = begun(engine, prompt)
    ask(engine, "change_weights")
    assert ask(engine, "reset", reset_connector=True) is False, "vLLM's own blocks are in use"
    assert request_id in engine.ask("run")
    assert ask(engine, "reset") is True
    answer = engine.one(prompt)
    assert (answer.num_cached, answer.tokens) == (0, cold(engine, prompt))


@pytest.mark.smoke
def test_a_consumers_server_clears_its_cache_unless_a_producer_has_old_kv(
    model: str, servers: Any, start: Any, config_for: Any, prompts: Any, port: int, free_port: Any
) -> None:
    config = config_for("kv_consumer", port, kv_load_failure_policy="recompute")
    with servers.Server(model, config, free_port(), 300.0, VLLM_SERVER_DEV_MODE="1") as server:
        server.wait_until_ready()
        assert (server.post("/pause"), server.post("/resume")) == (200, 200)
        with start(config_for("kv_producer", port), **SMALL) as prefill:
            prefill.generate([prompts[300]], max_tokens=1)
            answer = server.complete(prompts[300])
            assert server.transfers("load") > 0
            assert server.post("/pause") != 200
            assert "POST /pause?clear_cache=false" in server.log
            assert server.post("/resume") == 200
            assert (server.post("/pause?clear_cache=false"), server.post("/resume")) == (200, 200)
            assert server.complete(prompts[300]) == answer
