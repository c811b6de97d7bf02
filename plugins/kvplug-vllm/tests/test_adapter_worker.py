"""The worker side: what vLLM calls in inference mode reaches a connector outside it."""

from __future__ import annotations

import functools
import inspect
import warnings
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

from kvplug.engine import CacheEvent, CacheGroup, KVCacheConfig, KVLayout, LayoutError, WorkerConnector
from kvplug_testing.waits import Call

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kvplug_vllm.metadata import KvplugConnectorMetadata, KvplugStats
    from kvplug_vllm.pending import NewlyPending
    from kvplug_vllm.worker import KvplugConnectorWorker

pytestmark = pytest.mark.smoke

LAYOUT = KVLayout("BTHKD", {"B": 4, "T": 8, "H": 2, "D": 3})
CACHE = KVCacheConfig(groups=(CacheGroup(layer_names=("one", "two"), layout=LAYOUT),), num_blocks=4)
SNAPSHOT = {"ops": {}, "failures": {"load": {"timeout": 1}}}


def caches(**more: Any) -> dict[str, torch.Tensor]:
    """As vLLM registers them: of logical shape [B, H, N, C], in another order in memory."""
    return {name: torch.zeros(4, 8, 2, 6, **more).permute(0, 2, 1, 3) for name in ("one", "two", "three")}


ANSWERS: dict[str, Any] = {
    "get_finished": (frozenset({"sent"}), frozenset({"received"})),
    "get_block_ids_with_load_errors": frozenset({1}),
    "get_stats": SNAPSHOT,
    "get_handshake_metadata": {"port": 1},
    "build_worker_metadata": {"step": 1},
    "has_connector_metadata": True,
    "take_events": [CacheEvent(kind="stored", block_hashes=(b"h",), token_ids=(1,), block_size=1)],
}
METHODS = [
    name for name, what in vars(WorkerConnector).items() if inspect.isfunction(what) and name[0] != "_"
]


def noting() -> Any:
    """A connector that notes in ``called`` in which mode each call came."""
    connector = create_autospec(WorkerConnector, instance=True)
    connector.called = {}

    def note(name: str, *_: Any) -> Any:
        connector.called[name] = torch.is_inference_mode_enabled()
        return ANSWERS.get(name)

    for name in METHODS:
        getattr(connector, name).side_effect = functools.partial(note, name)
    return connector


def registered(side: KvplugConnectorWorker) -> dict[str, torch.Tensor]:
    """The tensors that reached the connector."""
    ((caches,), _) = side.connector.register_kv_caches.call_args  # type: ignore[attr-defined]
    return dict(caches)


@pytest.fixture
def side() -> KvplugConnectorWorker:
    return KvplugConnectorWorker(noting(), CACHE, which="it")


def test_every_call_comes_outside_inference_mode(side):
    """A tensor that a connector makes in inference mode could never be written to by its threads."""
    connector: Any = side.connector
    newly_pending = NewlyPending(held=frozenset({"sent"}), loading=frozenset({"received"}))
    metadata = KvplugConnectorMetadata(plan={}, preempted=frozenset({"a"}), newly_pending=newly_pending)
    with torch.inference_mode():
        side.register_kv_caches(caches())
        assert side.get_handshake_metadata().which == "it"
        side.handle_preemptions(metadata)
        side.bind(metadata)
        side.start_load_kv()
        side.wait_for_layer_load("one")
        side.save_kv_layer("one")
        side.wait_for_save()
        assert side.get_finished({"b"}) == ({"sent"}, {"received"})
        assert side.get_block_ids_with_load_errors() == {1}
        assert side.get_stats() == KvplugStats(data=SNAPSHOT)
        assert len(side.build_worker_metadata().events) == 1
        side.clear()
        assert torch.is_inference_mode_enabled(), "the engine's own mode is as it was"
    not_vllms = {"get_status", "has_connector_metadata", "wait_until_ready", "shutdown"}
    assert connector.called == dict.fromkeys({*METHODS} - not_vllms, False)


def test_a_cache_that_was_made_in_inference_mode_can_be_written_by_threads(side):
    with torch.inference_mode():
        theirs = caches()
        side.register_kv_caches(theirs)
    cache = registered(side)["two"]
    Call(lambda: cache.__setitem__((3, 7, 1), torch.arange(6.0))).result()
    assert theirs["two"][3, 1, 7].tolist() == list(range(6)), "it is vLLM's own memory"
    assert not theirs["one"].any()
    LAYOUT.check(cache)


def test_a_view_into_a_larger_tensor_stays_one(side):
    with torch.inference_mode():
        packed = torch.zeros(4, 2, 8, 2, 6)  # two layers in each block
        theirs = {name: packed[:, at].permute(0, 2, 1, 3) for at, name in enumerate(("one", "two"))}
        side.register_kv_caches(theirs)
    registered(side)["two"].fill_(1)
    assert (packed[:, 0].sum(), packed[:, 1].sum()) == (0, packed[:, 1].numel())


def test_only_layers_that_have_a_cache_of_their_own_reach_the_connector(side):
    """vLLM runs its model once without a cache, to see how much memory that takes; layers may share one."""
    side.save_kv_layer("one")
    assert side.connector.called == {}
    with pytest.raises(LayoutError, match="no cache for two"):
        side.register_kv_caches({"one": caches()["one"]})
    side.register_kv_caches(caches())
    assert registered(side).keys() == {"one", "two"}
    side.wait_for_layer_load("three")
    side.save_kv_layer("three")
    side.handle_preemptions(KvplugConnectorMetadata(plan={}))  # there are none
    assert side.connector.called.keys() == {"register_kv_caches"}
