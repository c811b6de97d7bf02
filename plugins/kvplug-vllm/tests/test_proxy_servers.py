"""Two prefill and two decode servers of vLLM's behind the proxy: its tokens are those of one engine alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import proxied
from vllm_engines import transfer_config
from vllm_servers import (
    CACHED,
    QUIET_CORES,
    Answer,
    answer_of,
    completion,
    new_salt,
    started,
    until_loaded,
)

pytestmark = pytest.mark.timeout(1500)


def test_tokens_are_those_of_one_engine_whatever_way_a_request_takes(
    model: str, prompts: dict[int, list[int]], alone: Any, free_port: Callable[[], int]
) -> None:
    meetings = [free_port() for _ in range(2)]
    peers = [f"127.0.0.1:{meeting}" for meeting in meetings]
    consumer = transfer_config("kv_consumer", meetings[0], kv_load_failure_policy="recompute", peers=peers)
    configs = [*(transfer_config("kv_producer", meeting) for meeting in meetings), consumer, consumer]
    # The cores are shared by all processes: a check may take its time.
    options = {"health-interval-s": "1", "health-timeout-s": "20", "prefill-timeout-s": "120"}
    with started(model, [(each, CACHED) for each in configs], free_port, **QUIET_CORES) as servers:
        prefill, decode = servers[:2], servers[2:]
        with proxied.Proxy([one.url for one in prefill], [one.url for one in decode], options) as proxy:
            proxy.wait_until_ready()

            def ask(prompt: list[int]) -> Answer:
                asked = completion(model, prompt, salt=new_salt())
                with proxy.request("POST", "/v1/completions", asked) as answer:
                    said = answer.read()
                    assert answer.status == 200, said
                return answer_of(json.loads(said))

            for server in decode:  # each decode server has met each prefill server
                for _ in prefill:
                    before = server.transfers("load")
                    while server.transfers("load") == before:
                        until_loaded(lambda: ask(prompts[300]), alone[300])
            before = proxy.status
            for length, prompt in prompts.items():
                for _ in range(2):
                    answer = ask(prompt)
                    assert (answer.tokens, answer.num_cached) == (alone[length], (length - 1) // 32 * 32)
            after = proxy.status
            for role in ("prefill", "decode"):
                gained = [
                    b["requests"] - a["requests"] for a, b in zip(before[role], after[role], strict=True)
                ]
                assert gained == [4, 4]
            assert after["prefills_skipped"] == {}
