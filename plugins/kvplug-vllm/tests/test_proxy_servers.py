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
)

pytestmark = pytest.mark.timeout(1500)


def test_tokens_are_those_of_one_engine_whatever_way_a_request_takes(
    model: str, prompts: dict[int, list[int]], alone: Any, free_port: Callable[[], int]
) -> None:
    meetings = [free_port() for _ in range(2)]
    peers = [f"127.0.0.1:{meeting}" for meeting in meetings]
    consumer = transfer_config("kv_consumer", meetings[0], kv_load_failure_policy="recompute", peers=peers)
    configs = [*(transfer_config("kv_producer", meeting) for meeting in meetings), consumer, consumer]
    with started(model, [(each, CACHED) for each in configs], free_port, **QUIET_CORES) as servers:
        prefill, decode = servers[:2], servers[2:]
        with proxied.Proxy(
            [one.url for one in prefill], [one.url for one in decode], {"prefill-timeout-s": "120"}
        ) as proxy:
            proxy.wait_until_ready()

            def ask(prompt: list[int]) -> Answer:
                asked = completion(model, prompt, salt=new_salt())
                with proxy.request("POST", "/v1/completions", asked) as answer:
                    said = answer.read()
                    assert answer.status == 200, said
                return answer_of(json.loads(said))

            num_loaded = 0
            while num_loaded < 2 * len(prefill) * len(decode):  # so each has loaded from each
                answer = ask(prompts[300])
                assert answer.tokens == alone[300]
                num_loaded = num_loaded + 1 if answer.num_cached else 0
            for length, prompt in prompts.items():
                for _ in range(len(prefill) * len(decode)):
                    answer = ask(prompt)
                    assert (answer.tokens, answer.num_cached) == (alone[length], (length - 1) // 32 * 32)
            assert "no prefill at" not in proxy.log
