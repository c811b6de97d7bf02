"""Prefill's store is full: decode still loads every prompt, since what it waits for is evicted last."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

import proxied
from vllm_engines import transfer_config
from vllm_servers import CACHED, QUIET_CORES, answer_of, completion, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

NUM_TOKENS, BLOCK = 300, 32
WHOLE = (NUM_TOKENS - 1) // BLOCK * BLOCK
PAGE_BYTES = 16 * 4096
"""Of 16 tokens of the random llama: keys and values, 4 layers, 4 heads of 32 elements, float32."""
NUM_IN_FLIGHT = 32
STORE_BYTES = 56 << 20
"""Of 45 prompts, headers and waste included: a few more than may be in flight."""


def test_all_whole_blocks_of_prompts_in_sequence_and_in_flight_are_loaded(random_model, free_port):
    model, meeting, rng = random_model("llama"), free_port(), random.Random(0)
    prompts = [[rng.randrange(1000, 40_000) for _ in range(NUM_TOKENS)] for _ in range(284)]
    blocks = 2 * NUM_IN_FLIGHT * NUM_TOKENS // BLOCK
    settings = CACHED | {"max-num-seqs": NUM_IN_FLIGHT, "num-gpu-blocks-override": blocks}
    host = {"host": {"size": STORE_BYTES, "segment_bytes": 4 << 20}}
    configs = [
        (transfer_config("kv_producer", meeting, options=host), settings),
        (transfer_config("kv_consumer", meeting, kv_load_failure_policy="recompute"), settings),
    ]
    quiet = {**QUIET_CORES, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert 200 * NUM_TOKENS // 16 * PAGE_BYTES > 3 * STORE_BYTES
    with (
        started(model, configs, free_port, **quiet) as (prefill, decode),
        proxied.Proxy([prefill.url], [decode.url], {"prefill-timeout-s": "240"}) as proxy,
    ):
        proxy.wait_until_ready()

        def num_loaded(prompt: list[int]) -> int:
            code, answer = proxy.ask(completion(model, prompt, max_tokens=2))
            assert code == 200, answer
            return answer_of(json.loads(answer)).num_cached

        any(num_loaded(prompt) for prompt in prompts[264:])  # until the two have met
        in_sequence = [num_loaded(prompt) for prompt in prompts[:200]]
        assert in_sequence == [WHOLE] * 200
        with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
            assert list(pool.map(num_loaded, prompts[200:264])) == [WHOLE] * 64
