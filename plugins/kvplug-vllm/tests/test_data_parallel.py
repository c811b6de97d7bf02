"""A producer with two data-parallel ranks, and a consumer with one, which loads from both."""

from __future__ import annotations

import pytest

from vllm_engines import transfer_config
from vllm_servers import CACHED, QUIET_CORES, new_salt, started, until_loaded

pytestmark = pytest.mark.timeout(1500)


def test_a_consumer_loads_from_each_data_parallel_rank_of_its_producer(model, alone, prompts, free_port):
    meeting = free_port()
    env = {**QUIET_CORES, "KVPLUG_SECRET": ""}  # which a Unix socket does without
    host = f"unix:@kvplug-ranks-{meeting}"
    peers = [f"{host}-0", f"{host}-1"]
    recompute = {"kv_load_failure_policy": "recompute"}
    consumer = transfer_config("kv_consumer", meeting, host=host, peers=peers, **recompute)
    configs = [
        (transfer_config("kv_producer", meeting, host=host), CACHED | {"data-parallel-size": 2}),
        (consumer, CACHED),
    ]
    with started(model, configs, free_port, **env) as (producer, decode):
        for rank in (0, 1):

            def ask(rank=rank):
                salt = new_salt()
                producer.complete(prompts[300], rank=rank, max_tokens=1, salt=salt)
                return decode.complete(prompts[300], salt=salt)

            assert until_loaded(ask, alone[300]) == 288
