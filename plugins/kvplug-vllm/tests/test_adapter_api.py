"""vLLM's connector API as its engine calls it: every method is known, and answers in vLLM's types."""

from __future__ import annotations

import copy
import dataclasses
import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import Config, ConnectorInfo
from kvplug.engine import CacheEvent, TransferStats
from stepping import PROMPT

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import msgspec
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
        MultiKVConnectorStats,
    )
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from kvplug_vllm.metadata import KvplugHandshakeMetadata, KvplugStats
    from kvplug_vllm.plugin import NAME, register
    from kvplug_vllm.releases.base import FAILS_BY_REQUEST, unknown_names
    from kvplug_vllm.releases.cache import declares_layout

pytestmark = pytest.mark.smoke


def test_every_method_of_the_api_was_looked_at():
    """A method that a release adds asks for a decision."""
    assert unknown_names(KVConnectorBase_V1) == []
    assert unknown_names(type("Newer", (), {"shutdown": None, "renew": None})) == ["renew"]


@pytest.fixture
def it(made):
    return made()


def test_what_the_scheduler_asks_at_any_time(it):
    connector = it.connector
    assert supports_hma(connector) is FAILS_BY_REQUEST, "else vLLM makes one group of all layers"
    assert getattr(connector, "supports_divergent_local_hybrid_hits", False) is False
    assert connector.requires_kv_delivery is False
    assert connector.get_finished_count() is None
    assert connector.has_pending_push_work() is False
    assert connector.get_kv_connector_stats() is None
    assert list(connector.take_events()) == []
    assert connector.get_required_kvcache_layout(it.config) == (None if declares_layout() else "HND")
    assert connector.supports_sleep_mode(it.config.kv_transfer_config) is False


def test_vllm_may_replay_whole_steps_unless_the_connector_saves_by_layer(it, monkeypatch):
    """Beside "lookup": all its loads are in the background then, and a complete step is gathered."""
    asked = it.connector.requires_piecewise_for_cudagraph
    loads = {"options": {"lookup": {"async_load": True}}}
    for extra in ({}, {"role": "producer"}, {"role": "consumer"}, loads):
        assert asked({"connector": "lookup", **extra}) is False
    lookup = ConnectorInfo(Config(connector="lookup")).connector_class
    monkeypatch.setattr(lookup, "needs_layer_hooks", classmethod(lambda *_: True))
    assert asked({"connector": "lookup"}) is True


def test_handshake_metadata_of_the_workers_arrives_whole_and_by_rank(it):
    sent = it.moves.handshake = {
        "text": "Grüße, 世界",
        "bytes": bytes(range(256)),
        "numbers": [0, -1, 2**62, 0.5],
        "nested": [[], [None, True, [b"\x00", {"deep": [1, {2: b"two"}]}]]],
        3: "a key that is a number",
    }
    handshake = it.worker.get_handshake_metadata()
    assert isinstance(handshake, KvplugHandshakeMetadata)
    for metadata in ({0: handshake, 1: handshake}, {}):
        it.connector.set_xfer_handshake_metadata(metadata)
        assert it.decides.metadata == dict.fromkeys(metadata, sent)
    it.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake, (3, 0): handshake})
    assert it.decides.metadata == {0: sent, 3: sent}
    it.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
    assert it.decides.metadata == {}, "a sibling's"


def test_events_of_both_sides_are_vllms_once_each(it):
    stored = CacheEvent(kind="stored", block_hashes=(b"h",), token_ids=(1, 2), block_size=2, medium="there")
    removed = CacheEvent(kind="removed", block_hashes=(b"h",))
    it.moves.take_events = lambda: [stored, removed]
    it.decides.take_events = lambda: [removed]
    published: list[Any] = []
    it.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    it.add("a", max_tokens=1)
    it.step()
    first, second, third = published
    assert isinstance(first, BlockStored) and isinstance(second, BlockRemoved)
    hashes = [maybe_convert_block_hash(b"h")]  # integers, unless vLLM was told otherwise
    assert (first.block_hashes, first.token_ids) == (hashes, [1, 2])
    assert (first.block_size, first.medium) == (2, "there")
    assert (second.block_hashes, second.medium) == (hashes, None)
    assert third == second
    it.moves.take_events = it.decides.take_events = list
    it.step()
    assert len(published) == 3


def test_a_request_that_ends_is_forgotten_and_its_name_may_come_again(it):
    known = []

    def not_yet(request: Any, computed: int) -> tuple[None, bool]:
        known[:] = [weakref.ref(request)]
        return None, False

    it.decides.get_num_new_matched_tokens = not_yet
    it.add("a")
    it.step()
    it.abort("a")
    assert it.decides.ended == {"a": "aborted"}
    gc.collect()
    assert known.pop()() is None, "it was never scheduled"
    asked: list[tuple[int, ...]] = []
    it.decides.on_new_request = lambda request: asked.append(request.token_ids)
    prompt = [token + 5000 for token in PROMPT]
    it.add("a", prompt)
    assert asked == [tuple(prompt)]


def test_a_reset_that_the_connector_cannot_do_names_what_works(it, errors, monkeypatch):
    monkeypatch.setattr("kvplug_vllm.scheduler.fails_where_reset_fails", lambda: True)
    assert it.scheduler.reset_prefix_cache(reset_connector=True) is False
    assert "POST /pause?clear_cache=false" in errors.text
    errors.clear()
    it.decides.reset_cache = lambda: True
    assert it.scheduler.reset_prefix_cache(reset_connector=True) is True
    assert "clear_cache" not in errors.text


def test_where_vllm_ignores_that_a_reset_failed_nothing_is_loaded_until_one_succeeds(it, monkeypatch):
    monkeypatch.setattr("kvplug_vllm.scheduler.fails_where_reset_fails", lambda: False)
    it.scheduler.reset_prefix_cache(reset_connector=True)
    it.add("a", offers=96)
    assert it.computed(it.plan()) == {"a": 0}
    it.abort("a")
    it.decides.reset_cache = lambda: True
    it.scheduler.reset_prefix_cache(reset_connector=True)
    it.add("b", [token + 5000 for token in PROMPT], offers=96)
    assert it.computed(it.plan()) == {"b": 96}


def test_a_connector_may_be_shut_down_before_it_has_a_cache_and_twice(it):
    for side in (it.connector, it.worker):
        side.shutdown()
        side.shutdown()


# -- figures -----------------------------------------------------------------------------------------


def snapshot(count: int = 1) -> dict[str, Any]:
    stats = TransferStats()
    for _ in range(count):
        stats.record("load", 1 << 20, 0.25, tokens=32)
        stats.fail("save", "no_room")
    return stats.snapshot()


def test_figures_of_both_sides_are_put_together_and_neither_is_changed(it):
    one = snapshot(1)
    it.moves.get_stats = it.decides.get_stats = lambda: one
    it.add("a")
    plan = it.plan()
    output = it.run(plan)
    assert isinstance(output.kv_connector_output.kv_connector_stats, KVConnectorStats)
    sent = it.scheduler.update_from_output(plan, output)
    (stats,) = {id(each.scheduler_stats): each.scheduler_stats for each in sent.values()}.values()
    assert stats.kv_connector_stats == snapshot(2)
    assert one == snapshot(1)
    first, second = KvplugStats(data=snapshot(1)), KvplugStats(data=snapshot(2))
    before = copy.deepcopy((first.data, second.data))
    both = first.aggregate(second)
    assert both.data == snapshot(3)
    both.data["ops"]["load"]["count"] = 99
    assert (first.data, second.data) == before
    with pytest.raises(ValueError, match="not a snapshot"):
        first.aggregate(KvplugStats(data={"ops": {"load": {"count": "many"}}}))


def received(stats: Any) -> Any:
    """What vLLM's front end makes of what its core sends: plain values since 0.30, before a dataclass."""
    plain = stats.to_dict() if hasattr(stats, "to_dict") else dataclasses.asdict(stats)["data"]
    return MultiConnector.build_kv_connector_stats(msgspec.msgpack.decode(msgspec.msgpack.encode(plain)))


def test_vllm_puts_figures_of_children_together_again_in_its_front_end():
    """It finds their class by the connector's name."""
    register()
    first, second = (
        received(MultiKVConnectorStats(data={NAME: KvplugStats(data=snapshot(times))})) for times in (1, 2)
    )
    assert type(first.data[NAME]) is KvplugStats
    together = first.aggregate(second)
    assert together.data[NAME].data == snapshot(3)
    assert together.reduce()[NAME]["load count"] == 3
    # Before 0.30 vLLM reads the object itself, in an engine of one process, as if it had been serialised.
    assert KvplugStats(data=snapshot(1))["data"] == snapshot(1)
