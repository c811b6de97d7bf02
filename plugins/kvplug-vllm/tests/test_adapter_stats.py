"""Figures on their way through vLLM: put together by it, and left as they were."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from typing import Any

import pytest

from kvplug.engine import TransferStats

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import msgspec
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorStats,
    )

    from kvplug_vllm.connector import KvplugConnector
    from kvplug_vllm.metadata import KvplugStats, KvplugWorkerMetadata
    from kvplug_vllm.plugin import NAME, register

pytestmark = pytest.mark.smoke


def snapshot(count: int = 1) -> dict[str, Any]:
    stats = TransferStats()
    for _ in range(count):
        stats.record("load", 1 << 20, 0.25, tokens=32)
        stats.fail("save", "no_room")
    return stats.snapshot()


def test_two_workers_figures_are_added_up_and_neither_is_changed():
    one, other = KvplugStats(data=snapshot(1)), KvplugStats(data=snapshot(2))
    before = copy.deepcopy((one.data, other.data))
    both = one.aggregate(other)
    assert both.data == snapshot(3)
    assert (one.data, other.data) == before
    both.data["ops"]["load"]["count"] = 99
    assert (one.data, other.data) == before, "nor later"


def test_stats_are_empty_before_the_first_figure_and_after_a_reset():
    nothing = KvplugConnector.build_kv_connector_stats()
    assert nothing.is_empty()
    assert nothing.reduce() == {}
    assert nothing.aggregate(KvplugStats()).is_empty(), "vLLM would print an empty line"
    assert nothing.aggregate(KvplugStats(data=snapshot())).data == snapshot()
    some = KvplugStats(data=snapshot())
    assert not some.is_empty()
    some.reset()
    assert some.is_empty()


def test_what_is_printed():
    assert KvplugStats(data=snapshot(2)).reduce() == {
        "load count": 2,
        "load MiB": 2.0,
        "load tokens": 64,
        "load mean ms": 250.0,
        "save failed: no_room": 2,
    }
    only_failed = KvplugStats(data={"ops": {}, "failures": {"load": {"timeout": 1}}})
    assert only_failed.reduce() == {"load failed: timeout": 1}


def test_figures_that_are_none_are_refused():
    with pytest.raises(ValueError, match="no snapshot"):
        KvplugStats(data=snapshot()).aggregate(KvplugStats(data={"ops": {"load": {"count": "many"}}}))


def received(stats: Any) -> Any:
    """What vLLM's front end makes of what its core sends: plain values since 0.30, before a dataclass."""
    plain = stats.to_dict() if hasattr(stats, "to_dict") else dataclasses.asdict(stats)["data"]
    return MultiConnector.build_kv_connector_stats(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)))


def test_vllm_puts_them_together_again_in_its_front_end():
    """It finds their class by the connector's name."""
    register()
    first, second = (
        received(MultiKVConnectorStats(data={NAME: KvplugStats(data=snapshot(times))})) for times in (1, 2)
    )
    assert type(first.data[NAME]) is KvplugStats
    together = first.aggregate(second)
    assert together.data[NAME].data == snapshot(3)
    assert together.reduce()[NAME]["load count"] == 3


def test_children_of_a_multi_connector_are_observed_in_an_engine_of_one_process():
    """Before 0.30 vLLM reads the object itself as if it had been serialised."""
    assert KvplugStats(data=snapshot(1))["data"] == snapshot(1)


def test_vllms_log_has_what_came_since_the_last_line():
    lines: list[str] = []
    logging = KVConnectorLogging(None)
    logging.connector_cls = KvplugConnector
    data = snapshot()
    for _ in range(2):
        logging.observe(data)
        logging.observe(data)
        logging.log(log_fn=lambda text, *arguments: lines.append(text % arguments))
    assert len(set(lines)) == 1
    assert "load count=2" in lines[0]
    assert data == snapshot(), "the same object goes to Prometheus"


def test_each_workers_part_is_kept_in_the_order_of_the_workers():
    parts = [KvplugWorkerMetadata(parts=({"rank": rank},)) for rank in range(3)]
    together = parts[0].aggregate(parts[1]).aggregate(parts[2])
    assert together.parts == ({"rank": 0}, {"rank": 1}, {"rank": 2})
    assert parts[0].parts == ({"rank": 0},)
