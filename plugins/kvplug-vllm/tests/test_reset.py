"""vLLM forgets what it has cached, inside and outside: KV of other weights is not loaded any more."""

from __future__ import annotations

import time
import warnings
from typing import Any

import pytest

from vllm_engines import MULTIPROCESS, transfer_config
from vllm_servers import Server, new_salt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvplug_vllm.releases.base import fails_where_reset_fails

pytestmark = pytest.mark.timeout(900)

SMALL = {"block_size": 32}


def reset(engine: Any, **how: bool) -> bool:
    return bool(engine.ask("reset_prefix_cache", **how))


def test_after_a_producer_was_reset_its_consumer_loads_nothing_that_was_stored_before(
    start, prompts, alone, port
):
    """Its core has a loop of its own here, and nothing to do: the connector asks for the step.

    A load that was promised just before, and finds nothing any more, is computed.
    """
    with (
        start(transfer_config("kv_producer", port), env=MULTIPROCESS, **SMALL) as prefill,
        start(transfer_config("kv_consumer", port, kv_load_failure_policy="recompute"), **SMALL) as decode,
    ):
        prefill.generate(list(prompts.values()), max_tokens=1)
        assert decode.one(prompts[300]).num_cached > 0
        assert reset(decode, reset_connector=True) is False
        assert "reset that engine" in decode.peer.stderr
        assert reset(prefill, reset_connector=True) is True
        deadline = time.monotonic() + 120
        while (answer := decode.one(prompts[700])).num_cached:  # until that step has run
            assert time.monotonic() < deadline
            assert reset(decode) is True, "what vLLM itself cached"
        assert answer.tokens == alone[700]
        assert [decode.one(prompts[length]).num_cached for length in (100, 1500)] == [0, 0]
        assert reset(decode, reset_connector=True) is True
        prefill.one(prompts[700], max_tokens=1)
        answer = decode.one(prompts[700])
        assert answer.num_cached > 0
        assert answer.tokens == alone[700]


@pytest.fixture(scope="module")
def engine(start, shared_port):
    """It loads what it has stored itself, and computes long prompts in chunks."""
    with start(transfer_config("kv_both", shared_port), max_num_batched_tokens=256, **SMALL) as engine:
        yield engine


def cold(engine: Any, prompt: Any) -> tuple[int, ...]:
    """What the engine says to a prompt of which it finds nothing anywhere."""
    answer = engine.one(prompt, salt=new_salt())
    assert answer.num_cached == 0
    return tuple(answer.tokens)


def test_an_engine_whose_weights_change_loads_nothing_that_the_old_ones_computed(engine, prompts):
    prompt = prompts[700]
    old = engine.one(prompt).tokens
    assert reset(engine) is True
    answer = engine.one(prompt)
    assert (answer.num_cached > 0, answer.tokens) == (True, old), "loaded from its own store"

    engine.ask("change_weights")
    new = cold(engine, prompt)
    assert reset(engine) is True
    answer = engine.one(prompt)
    assert answer.num_cached > 0
    assert answer.tokens != new, "the control: old KV makes a difference"

    assert reset(engine, reset_connector=True) is True
    assert engine.ask("connector_wants_a_step")
    answer = engine.one(prompt)
    assert (answer.num_cached, answer.tokens) == (0, new)
    assert not engine.ask("connector_wants_a_step")
    assert reset(engine) is True
    answer = engine.one(prompt)
    assert (answer.num_cached > 0, answer.tokens) == (True, new)


def begun(engine: Any, prompt: Any) -> str:
    """A request whose first chunk has been computed. Before that the connector may have said "not yet"."""
    request_id = str(engine.ask("begin", prompt=prompt, max_tokens=16))
    while not engine.state()["used_blocks"]:
        engine.ask("step")
    return request_id


def test_a_prompt_that_starts_over_with_new_weights_is_stored_as_they_compute_it(engine, prompts):
    prompt = prompts[1500]
    request_id = begun(engine, prompt)
    engine.ask("change_weights")
    assert reset(engine, reset_running_requests=True, reset_connector=True) is True
    tokens = tuple(engine.ask("run")[request_id])
    new = cold(engine, prompt)
    assert tokens == new
    assert reset(engine) is True
    answer = engine.one(prompt)
    assert (answer.num_cached > 0, answer.tokens) == (True, new)


def test_a_prompt_that_goes_on_with_new_weights_is_not_stored(engine, prompts):
    prompt = prompts[300]
    request_id = begun(engine, prompt)
    engine.ask("change_weights")
    assert reset(engine, reset_connector=True) is False, "vLLM's own blocks are in use"
    assert request_id in engine.ask("run")
    assert reset(engine) is True
    answer = engine.one(prompt)
    assert (answer.num_cached, answer.tokens) == (0, cold(engine, prompt))


@pytest.mark.smoke
def test_a_consumers_server_clears_its_cache_unless_a_producer_has_old_kv(
    model, start, prompts, port, free_port
):
    config = transfer_config("kv_consumer", port, kv_load_failure_policy="recompute")
    with Server(model, config, free_port(), VLLM_SERVER_DEV_MODE="1") as server:
        server.wait_until_ready()
        assert (server.post("/pause"), server.post("/resume")) == (200, 200)
        with start(transfer_config("kv_producer", port), **SMALL) as prefill:
            prefill.generate([prompts[300]], max_tokens=1)
            answer = server.complete(prompts[300])
            assert server.transfers("load") > 0
            if fails_where_reset_fails():
                assert server.post("/pause") != 200
                assert "POST /pause?clear_cache=false" in server.log
            else:
                num_loads = server.transfers("load")
                assert server.post("/pause") == 200
                assert "loads nothing until a reset succeeds" in server.log
                assert server.post("/resume") == 200
                assert server.complete(prompts[300]) == answer
                assert server.transfers("load") == num_loads
            assert server.post("/resume") == 200
            assert (server.post("/pause?clear_cache=false"), server.post("/resume")) == (200, 200)
            assert server.complete(prompts[300]) == answer
