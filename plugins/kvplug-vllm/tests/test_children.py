"""Children of a MultiConnector in vLLM's engines, with stats on, which have ended one before."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_engines import transfer_config

pytestmark = pytest.mark.timeout(600)

SMALL = {"block_size": 32}
WITH_LOG = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "3600"}
"""Below INFO vLLM sums up no stats for its log."""


def kv_transfer_line(engine: Any) -> str:
    """What vLLM's log says of the stats so far."""
    engine.ask("log_stats")
    (line,) = [line for line in engine.peer.stderr.splitlines() if "KV Transfer metrics" in line]
    return str(line)


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": children[0]["kv_role"],
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def test_children_of_a_multi_connector_save_and_load_each_on_its_own_port(start, free_port, prompts, alone):
    """With stats on. The first child of the producer has room for half of the longest prompt, and for nothing
    else then. vLLM loads from the first child that offers anything.

    The consumer's children are given by module path alone, where vLLM loads no plugins: it looks the class
    up by its name all the same when it reads its stats.
    """
    first, second = free_port(), free_port()
    by_path = {"kv_connector_module_path": "kvplug_vllm.connector"}
    producer = multi(
        transfer_config("kv_producer", first, buffer_size="32MiB"),
        transfer_config("kv_producer", second) | by_path,
    )
    consumer = multi(
        transfer_config("kv_consumer", first) | by_path, transfer_config("kv_consumer", second) | by_path
    )
    with (
        start(producer, setup="inside:register_twice", env=WITH_LOG, **SMALL) as prefill,
        start(consumer, env={**WITH_LOG, "VLLM_PLUGINS": ""}, **SMALL) as decode,
    ):
        assert prefill.one(prompts[300], max_tokens=1).tokens == alone[300][:1]
        answer = decode.one(prompts[300])
        assert (answer.tokens, answer.num_cached) == (alone[300], 288)
        assert prefill.one(prompts[300], max_tokens=1, salt="early").tokens == alone[300][:1]
        assert prefill.one(prompts[1500], max_tokens=1).tokens == alone[1500][:1]
        answer = decode.one(prompts[1500])
        assert answer.tokens == alone[1500]
        assert answer.num_cached > 0, "what the first child had room for, unless it is evicted by now"
        answer = decode.one(prompts[300], salt="early")
        assert (answer.tokens, answer.num_cached) == (alone[300], 288), "from the second child"
        assert decode.one(prompts[100]).tokens == alone[100], "which was not saved"
        assert prefill.one(prompts[100]).tokens == alone[100]
        assert decode.count("operations", "op=load") == 3
        assert prefill.count("operations", "op=save") >= 6, "each prompt by both"
        line = kv_transfer_line(decode)
    assert "KvplugConnector={" in line
    assert "'load count': 3" in line


def test_connector_simple_hands_whole_prompts_over(start, free_port, prompts, alone):
    port = free_port()
    producer = transfer_config("kv_producer", port, connector="simple")
    consumer = transfer_config("kv_consumer", port, connector="simple", kv_load_failure_policy="recompute")
    with start(producer, **SMALL) as prefill, start(consumer, **SMALL) as decode:
        for length in (300, 1500):
            assert prefill.one(prompts[length], max_tokens=1).tokens == alone[length][:1]
            prefill.one(prompts[length][:4], max_tokens=1)  # the step that saves: it has no loop of its own
            answer = decode.one(prompts[length])
            assert (answer.tokens, answer.num_cached) == (alone[length], (length - 1) // 32 * 32)
