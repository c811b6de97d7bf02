"""vLLM's servers with connector "p2p": decode pulls the KV out of the blocks of prefill."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import proxied
from kvplug_testing.waits import until
from vllm_engines import transfer_config
from vllm_servers import (
    CACHED,
    QUIET_CORES,
    REQUEST_S,
    Server,
    answer_of,
    completion,
    new_salt,
    started,
)

pytestmark = pytest.mark.timeout(1500)

PATIENT = {"connector": "p2p", "options": {"p2p": {"wait_timeout_s": 60.0, "stall_timeout_s": 60.0}}}


def blocks_in_use(server: Server) -> float:
    """The share of its cache that is in use, by vLLM's own metric."""
    lines = server.request("GET", "/metrics").read().decode().splitlines()
    (line,) = [line for line in lines if line.startswith("vllm:kv_cache_usage_perc{")]
    return float(line.rpartition(" ")[2])


def test_decode_goes_on_from_the_blocks_of_prefill_and_prefill_has_them_back(
    model: str, prompts: dict[int, list[int]], alone: Any, free_port: Callable[[], int]
) -> None:
    meeting = free_port()
    env = {**QUIET_CORES, "KVPLUG_SECRET": ""}  # which a Unix socket does without
    where = {"host": f"unix:@kvplug-p2p-{meeting}"}
    policy = {"kv_load_failure_policy": "recompute"}
    configs = [
        transfer_config("kv_producer", meeting, **where, **PATIENT),
        transfer_config("kv_consumer", meeting, **where, **policy, **PATIENT),
    ]
    with started(model, [(each, CACHED) for each in configs], free_port, **env) as (prefill, decode):
        with proxied.Proxy([prefill.url], [decode.url], {"prefill-timeout-s": "120"}) as proxy:
            proxy.wait_until_ready()

            def ask(length: int) -> None:
                asked = completion(model, prompts[length], salt=new_salt())
                with proxy.request("POST", "/v1/completions", asked) as answer:
                    said = answer.read()
                    assert answer.status == 200, said
                assert answer_of(json.loads(said)).tokens == alone[length]

            def have_met() -> bool:
                ask(300)
                return decode.transfers("load") > 0

            until(have_met, REQUEST_S, "an answer with KV that was pulled")
            for length in prompts:
                before = decode.transfers("load")
                ask(length)
                assert decode.transfers("load") == before + 1, f"no KV of {length} tokens was pulled"

        # The same without a proxy, step by step; a client that gives up before decode costs no block.
        for number in range(3):
            salt = new_salt()
            first = prefill.complete(
                prompts[300], salt=salt, max_tokens=1, kv_transfer_params=dict(proxied.REMOTE_DECODE)
            )
            assert first.params is not None and first.params["do_remote_prefill"] is True
            if number:
                again = decode.complete(prompts[300], salt=salt, kv_transfer_params=first.params)
                assert again.tokens == alone[300]

        def is_free() -> bool:  # the blocks come back in a step
            prefill.complete(prompts[300][:4], max_tokens=1, kv_transfer_params={"do_remote_decode": False})
            return blocks_in_use(prefill) < 0.01

        until(is_free, REQUEST_S, "the end of the lease of what no decode server asked for")
