"""A producer with two data-parallel ranks, and a consumer with one, which loads from both."""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(1500)

START_S = 600.0
WAIT_S = 240.0


def test_a_consumer_loads_from_each_data_parallel_rank_of_its_producer(
    model: str, alone: Any, prompts: Any, servers: Any, config_for: Any, free_port: Callable[[], int]
) -> None:
    meeting = free_port()
    peers = [f"127.0.0.1:{meeting}", f"127.0.0.1:{meeting + 1}"]
    settings = {**servers.SETTINGS, "enable-prompt-tokens-details": True, "num-gpu-blocks-override": 192}
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    consumer = config_for("kv_consumer", meeting, kv_load_failure_policy="recompute", peers=peers)
    with ExitStack() as stack:
        started = [
            stack.enter_context(servers.Server(model, config, free_port(), START_S, given, **quiet))
            for config, given in (
                (config_for("kv_producer", meeting), settings | {"data-parallel-size": 2}),
                (consumer, settings),
            )
        ]
        for server in started:
            server.wait_until_ready()
        producer, decode = started

        def complete(server: Any, rank: int, **more: Any) -> Any:
            asked = {
                "model": model,
                "prompt": prompts[300],
                "temperature": 0,
                "return_token_ids": True,
                **more,
            }
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
            headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
            connection.request("POST", "/v1/completions", json.dumps(asked), headers)
            answer = connection.getresponse()
            said = json.loads(answer.read())
            connection.close()
            assert answer.status == 200, said
            return said

        for rank in (0, 1):
            limit = time.monotonic() + WAIT_S
            while True:
                salt = uuid.uuid4().hex
                complete(producer, rank, max_tokens=1, cache_salt=salt)
                said = complete(decode, 0, max_tokens=16, cache_salt=salt)
                assert tuple(said["choices"][0]["token_ids"]) == alone[300]
                cached = (said["usage"]["prompt_tokens_details"] or {}).get("cached_tokens")
                if cached:
                    break
                assert time.monotonic() < limit, f"nothing is loaded from rank {rank}"
            assert cached == 288
