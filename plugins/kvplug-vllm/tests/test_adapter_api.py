"""vLLM's connector API as its engine calls it: every method is known, and answers in vLLM's types."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import Config, connector_class
from kvplug.engine import BlocksRemoved, BlocksStored

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm.distributed.kv_events import BlockRemoved, BlockStored
    from vllm.distributed.kv_transfer.kv_connector.v1 import supports_hma
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

    from kvplug_vllm.metadata import KvplugHandshakeMetadata
    from kvplug_vllm.releases.base import FAILS_BY_REQUEST, unknown_names
    from kvplug_vllm.releases.cache import declares_layout

pytestmark = pytest.mark.smoke

PROMPT = list(range(1, 101))


def has(method: str) -> Any:
    """Skips a test where vLLM has no such method."""
    lacks = not hasattr(KVConnectorBase_V1, method)
    return pytest.mark.skipif(lacks, reason=f"vLLM {vllm.__version__} has no {method}")


def test_every_method_of_the_api_was_looked_at():
    """A method that a release adds asks for a decision."""
    assert unknown_names(KVConnectorBase_V1) == []
    assert unknown_names(type("Newer", (), {"shutdown": None, "renew": None})) == ["renew"]


@pytest.fixture
def it(made):
    return made()


def test_what_the_scheduler_asks_at_any_time(it):
    connector = it.engine.scheduler.connector
    assert supports_hma(connector) is FAILS_BY_REQUEST, "else vLLM makes one group of all layers"
    assert getattr(connector, "supports_divergent_local_hybrid_hits", False) is False
    assert connector.requires_kv_delivery is False
    assert connector.get_finished_count() is None
    assert connector.has_pending_push_work() is False
    assert connector.get_kv_connector_stats() is None
    assert list(connector.take_events()) == []
    assert connector.get_required_kvcache_layout(it.engine.config) == (None if declares_layout() else "HND")
    assert connector.supports_sleep_mode(it.engine.config.kv_transfer_config) is False


@pytest.mark.parametrize(
    "extra",
    [{}, {"role": "producer"}, {"role": "consumer"}, {"options": {"lookup": {"async_load": True}}}],
    ids=["nothing stated", "producer", "consumer", "loads in the background"],
)
def test_vllm_may_replay_whole_steps_beside_lookup(extra, it):
    """All loads are in the background then, and what is saved is gathered when the step is complete."""
    connector = it.engine.scheduler.connector
    assert connector.requires_piecewise_for_cudagraph({"connector": "lookup", **extra}) is False


def test_vllm_replays_no_whole_steps_beside_a_connector_that_saves_by_layer(it, monkeypatch):
    lookup = connector_class(Config(connector="lookup"))
    monkeypatch.setattr(lookup, "needs_layer_hooks", classmethod(lambda *_: True))
    assert it.engine.scheduler.connector.requires_piecewise_for_cudagraph({"connector": "lookup"}) is True


@has("register_finished_partial_tail")
@has("get_loaded_kv_cache_group_ids")
def test_what_the_scheduler_asks_about_partial_blocks_and_what_was_loaded(it):
    connector = it.engine.scheduler.connector
    assert connector.has_pending_block_frees() is False
    assert connector.register_finished_partial_tail(SimpleNamespace(request_id="a"), ([],), []) is False
    it.engine.add("a", PROMPT)
    request = it.engine.scheduler.requests["a"]
    assert connector.get_loaded_kv_cache_group_ids(request) == (0,)
    assert sum(connector.get_external_cache_hit_sources(request, 96).values()) == 96


def test_what_a_worker_answers_without_anything_to_do(it):
    worker = it.engine.worker
    assert worker.has_connector_metadata() is False
    assert worker.get_handshake_metadata() is None
    assert worker.get_finished(set()) == (set(), set())
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.get_kv_connector_stats() is None
    assert worker.get_kv_connector_kv_cache_events() is None
    assert worker.build_connector_worker_meta() is None


@has("get_transfer_results")
@has("get_mem_pool_context")
def test_what_a_worker_answers_to_calls_that_came_with_0_30(it):
    worker = it.engine.worker
    worker.finish_forward()
    worker.reset_capture_state()
    results = worker.get_transfer_results(set())
    assert not (results.finished_sending or results.finished_recving or results.failed_recving)
    assert worker.get_mem_pool_context() is None, "vLLM allocates the cache"


def test_a_step_has_metadata_until_it_is_over(it):
    it.engine.add("a", PROMPT)
    plan = it.engine.plan()
    it.engine.worker.bind_connector_metadata(plan.kv_connector_metadata)
    assert it.engine.worker.has_connector_metadata() is True
    it.engine.worker.clear_connector_metadata()
    assert it.engine.worker.has_connector_metadata() is False


def test_what_the_workers_of_every_rank_said_arrives_by_rank(it):
    connector = it.engine.scheduler.connector
    it.moves.says = {"port": 1}
    said = it.engine.worker.get_handshake_metadata()
    assert isinstance(said, KvplugHandshakeMetadata)
    for metadata in ({0: said, 1: said}, {}):
        connector.set_xfer_handshake_metadata(metadata)
        assert it.decides.metadata == {rank: {"port": 1} for rank in metadata}
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): said, (3, 0): said})
    assert it.decides.metadata == {0: {"port": 1}, 3: {"port": 1}}
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): SimpleNamespace()})
    assert it.decides.metadata == {}, "a sibling's"


def test_events_of_both_sides_are_vllms_once_each(it):
    stored = BlocksStored(block_hashes=(b"h",), token_ids=(1, 2), block_size=2, medium="there")
    removed = BlocksRemoved(block_hashes=(b"h",))
    it.moves.take_events = lambda: [stored, removed]
    it.decides.take_events = lambda: [removed]
    published: list[Any] = []
    it.engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
    it.engine.add("a", PROMPT, max_tokens=1)
    it.engine.step()
    first, second, third = published
    assert isinstance(first, BlockStored) and isinstance(second, BlockRemoved)
    hashes = [maybe_convert_block_hash(b"h")]  # integers, unless vLLM was told otherwise
    assert (first.block_hashes, first.token_ids) == (hashes, [1, 2])
    assert (first.block_size, first.medium) == (2, "there")
    assert (second.block_hashes, second.medium) == (hashes, None)
    assert third == second
    it.moves.take_events = it.decides.take_events = list
    it.engine.step()
    assert len(published) == 3


def test_figures_of_both_sides_are_put_together(it):
    one = {"ops": {}, "failures": {"load": {"timeout": 1}}}
    it.moves.get_stats = it.decides.get_stats = lambda: one
    it.engine.add("a", PROMPT)
    plan = it.engine.plan()
    output = it.engine.run(plan)
    assert isinstance(output.kv_connector_output.kv_connector_stats, KVConnectorStats)
    told = it.engine.scheduler.update_from_output(plan, output)
    (stats,) = {id(each.scheduler_stats): each.scheduler_stats for each in told.values()}.values()
    assert stats.kv_connector_stats["failures"] == {"load": {"timeout": 2}}
    assert one["failures"] == {"load": {"timeout": 1}}


def test_a_request_that_is_never_scheduled_is_forgotten(it):
    it.decides.known = []

    def not_yet(request: Any, computed: int) -> tuple[None, bool]:
        it.decides.known[:] = [request]
        return None, False

    it.decides.get_num_new_matched_tokens = not_yet
    it.engine.add("a", PROMPT)
    it.engine.step()
    it.engine.abort("a")
    assert it.decides.ended == {"a": "aborted"}
    known = weakref.ref(it.decides.known.pop())
    gc.collect()
    assert known() is None


def test_a_name_that_comes_again_is_another_request(it):
    for first in (1, 5000):
        prompt = [token + first for token in PROMPT]
        asked: list[tuple[int, ...]] = []
        it.decides.on_new_request = lambda request, asked=asked: asked.append(request.token_ids)
        it.engine.add("a", prompt, max_tokens=1)
        it.engine.step()
        assert asked == [tuple(prompt)]
        assert it.engine.scheduler.requests == {}


def test_a_connector_may_be_shut_down_before_it_has_a_cache_and_twice(it):
    for side in (it.engine.scheduler.connector, it.engine.worker):
        side.shutdown()
        side.shutdown()
