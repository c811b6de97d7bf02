"""What has ended one of vLLM's engines before: empty handshakes, stats, and children of a MultiConnector."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Any

import pytest

from kvplug.engine import TransferStats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    from kvplug_vllm.connector import KvplugConnector
    from kvplug_vllm.metadata import KvplugStats
    from kvplug_vllm.plugin import register

pytestmark = pytest.mark.timeout(600)

INSIDE = f"{Path(__file__).parent}/inside.py"
SMALL = {"block_size": 32}
WITH_LOG = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOG_STATS_INTERVAL": "3600"}
"""Below INFO vLLM sums up no stats for its log."""


def total(metrics: dict[str, float], op: str) -> float:
    return sum(metrics[name] for name in metrics if "kvplug_transfers_total{" in name and f"op={op}" in name)


def kv_transfer_line(engine: Any) -> str:
    """What vLLM's log says of the stats so far."""
    engine.ask("call", where=f"{INSIDE}:log_stats")
    (line,) = [line for line in engine.peer.stderr.splitlines() if "KV Transfer metrics" in line]
    return str(line)


# -- stats ------------------------------------------------------------------------------------------


def snapshot(loads: int, seconds: float = 0.5) -> dict[str, Any]:
    stats = TransferStats()
    for _ in range(loads):
        stats.record("load", 3 << 20, seconds, tokens=64)
    stats.fail("load", "timeout")
    return stats.snapshot()


def across_processes(stats: KVConnectorStats) -> dict[str, Any]:
    """As vLLM's front end gets them from its engine core: plain values since 0.30, dataclasses before."""
    sent = stats.to_dict() if hasattr(stats, "to_dict") else stats.data
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(sent))
    return found


def test_stats_are_made_added_up_told_and_forgotten_as_vllm_does_it() -> None:
    assert dataclasses.is_dataclass(KvplugStats)
    assert KvplugConnector.build_kv_connector_stats().is_empty()
    stats = KvplugConnector.build_kv_connector_stats(data=across_processes(KvplugStats(data=snapshot(2))))
    assert isinstance(stats, KvplugStats)
    assert stats.data == snapshot(2)
    assert not stats.is_empty()
    for other in (KvplugStats(data=snapshot(1, 2.0)), KvplugStats()):
        stats = stats.aggregate(other)
    assert stats.reduce() == {
        "load count": 3,
        "load MiB": 9.0,
        "load tokens": 192,
        "load mean ms": 1000.0,
        "load failed: timeout": 2,
    }
    assert KvplugStats().aggregate(stats) == stats
    stats.reset()
    assert stats.is_empty()
    assert stats.reduce() == {}
    assert stats.aggregate(KvplugStats(data=snapshot(1))).data == snapshot(1)


def test_a_multi_connector_finds_the_class_of_stats_by_the_connectors_name() -> None:
    register()
    made = MultiConnector.build_kv_connector_stats({"KvplugConnector": KvplugStats(data=snapshot(1))})
    assert made is not None
    for _ in range(2):
        again = MultiConnector.build_kv_connector_stats(across_processes(made))
        assert again is not None
        made = made.aggregate(again)
    assert type(made.data["KvplugConnector"]) is KvplugStats
    assert made.reduce()["KvplugConnector"]["load count"] == 4


def test_workers_with_nothing_to_say_and_stats_of_a_real_run(
    start: Any, config_for: Any, prompts: Any, alone: Any, port: int
) -> None:
    """vLLM tells the scheduler side just that. The workers say later, with their steps, what they hold."""
    setup = f"{INSIDE}:silence_workers"
    with start(config_for("kv_both", port), setup=setup, env=WITH_LOG, **SMALL) as engine:
        assert engine.ask("call", where=f"{INSIDE}:noted_handshakes") == [{}]
        assert engine.one(prompts[300]).tokens == alone[300]
        assert engine.ask("call", where=f"{INSIDE}:reset_prefix_cache") is True
        answer = engine.one(prompts[300])
        assert (answer.tokens, answer.num_cached) == (alone[300], 288)
        assert engine.one(prompts[100]).tokens == alone[100]
        metrics = engine.metrics()
        assert total(metrics, "load") == 1
        assert total(metrics, "save") == 2
        line = kv_transfer_line(engine)
    assert "load count=1" in line
    assert "load tokens=288" in line


# -- MultiConnector ---------------------------------------------------------------------------------


def multi(*children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": children[0]["kv_role"],
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def test_children_of_a_multi_connector_save_and_load_each_on_its_own_port(
    start: Any, config_for: Any, free_port: Any, prompts: Any, alone: Any
) -> None:
    """With stats on. The first child of the producer has room for half of the longest prompt, and for nothing
    else then. vLLM loads from the first child that offers anything.

    The consumer's children are given by module path alone, where vLLM loads no plugins: it looks the class
    up by its name all the same when it reads its stats.
    """
    first, second = free_port(), free_port()
    by_path = {"kv_connector_module_path": "kvplug_vllm.connector"}
    producer = multi(
        config_for("kv_producer", first, buffer_size="32MiB"),
        config_for("kv_producer", second) | by_path,
    )
    consumer = multi(config_for("kv_consumer", first) | by_path, config_for("kv_consumer", second) | by_path)
    with (
        start(producer, setup=f"{INSIDE}:register_twice", env=WITH_LOG, **SMALL) as prefill,
        start(consumer, env={**WITH_LOG, "VLLM_PLUGINS": ""}, **SMALL) as decode,
    ):
        assert prefill.one(prompts[300], max_tokens=1).tokens == alone[300][:1]
        answer = decode.one(prompts[300])
        assert (answer.tokens, answer.num_cached) == (alone[300], 288)
        assert decode.ask("call", where=f"{INSIDE}:reached") == [True, False]
        assert prefill.one(prompts[300], max_tokens=1, salt="early").tokens == alone[300][:1]
        assert prefill.one(prompts[1500], max_tokens=1).tokens == alone[1500][:1]
        answer = decode.one(prompts[1500])
        assert answer.tokens == alone[1500]
        assert 0 < answer.num_cached < 1472, "what the first child had room for"
        answer = decode.one(prompts[300], salt="early")
        assert (answer.tokens, answer.num_cached) == (alone[300], 288)
        assert decode.ask("call", where=f"{INSIDE}:reached") == [True, True]
        assert decode.one(prompts[100]).tokens == alone[100], "which was not saved"
        assert prefill.one(prompts[100]).tokens == alone[100]
        assert total(decode.metrics(), "load") == 3
        assert total(prefill.metrics(), "save") >= 6, "each prompt by both"
        line = kv_transfer_line(decode)
    assert "KvplugConnector={" in line
    assert "'load count': 3" in line
