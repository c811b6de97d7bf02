"""Prefill's store is full: decode still loads every prompt, since what it waits for is evicted last."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

START_S = 600.0
NUM_TOKENS, BLOCK = 300, 32
PAGE_BYTES = 16 * 4096
"""Of 16 tokens of the random llama: keys and values, 4 layers, 4 heads of 32 elements, float32."""
NUM_IN_FLIGHT = 32
STORE_BYTES = 56 << 20
"""Of 45 prompts, headers and waste included: a few more than may be in flight."""


@pytest.fixture(scope="module")
def complete(
    random_llama: str, servers: Any, proxied: Any, config_for: Any, free_port: Callable[[], int]
) -> Iterator[Callable[[list[int]], int]]:
    """``complete(prompt)``: send it to a prefill and a decode server. Returns how many tokens were loaded."""
    meeting = free_port()
    settings = {
        **servers.SETTINGS,
        "enable-prompt-tokens-details": True,
        "max-num-seqs": NUM_IN_FLIGHT,
        "num-gpu-blocks-override": 2 * NUM_IN_FLIGHT * NUM_TOKENS // BLOCK,
    }
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    host = {"host": {"size": STORE_BYTES, "segment_bytes": 4 << 20}}
    configs = (
        config_for("kv_producer", meeting, options=host),
        config_for("kv_consumer", meeting, kv_load_failure_policy="recompute"),
    )
    with ExitStack() as stack:
        prefill, decode = [
            stack.enter_context(servers.Server(random_llama, config, free_port(), START_S, settings, **quiet))
            for config in configs
        ]
        for server in (prefill, decode):
            server.wait_until_ready()
        urls = [[f"http://127.0.0.1:{server.port}"] for server in (prefill, decode)]
        proxy = stack.enter_context(proxied.Proxy(*urls, {"prefill-timeout-s": "240"}))
        proxy.wait_until_ready()

        def ask(prompt: list[int]) -> int:
            asked = {"model": random_llama, "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
            code, answer = proxy.ask(asked)
            assert code == 200, answer
            return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))

        rng = random.Random(0)
        for _ in range(20):  # until the two have met
            if ask(prompt_of(rng)):
                break
        yield ask


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(NUM_TOKENS)]


def test_all_whole_blocks_of_prompts_in_sequence_and_in_flight_are_loaded(
    complete: Callable[[list[int]], int],
) -> None:
    rng = random.Random(1)
    prompts = [prompt_of(rng) for _ in range(264)]
    whole = (NUM_TOKENS - 1) // BLOCK * BLOCK
    assert 200 * NUM_TOKENS // 16 * PAGE_BYTES > 3 * STORE_BYTES
    in_sequence = [complete(prompt) for prompt in prompts[:200]]
    assert in_sequence == [whole] * 200, json.dumps(in_sequence)
    with ThreadPoolExecutor(NUM_IN_FLIGHT) as pool:
        at_once = list(pool.map(complete, prompts[200:]))
    assert at_once == [whole] * 64, json.dumps(at_once)
