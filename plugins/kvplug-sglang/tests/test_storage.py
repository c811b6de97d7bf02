"""The storage over SGLang's own pools of host memory, without an engine around it."""

from __future__ import annotations

import dataclasses
import random
import signal
import sys
import time
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from kvplug import ConfigError, UnsupportedError
from kvplug_sglang.pause import Pause
from kvplug_sglang.settings import config_of
from kvplug_testing.resources import Resources
from kvplug_testing.waits import until
from redis_server import RedisServer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt.mem_cache.hicache_storage import (
        HiCacheFile,
        HiCacheStorageConfig,
        HiCacheStorageExtraInfo,
        PoolHitPolicy,
        PoolName,
        PoolTransfer,
    )
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
    from sglang.srt.plugins.hook_registry import HookRegistry

    from kvplug_sglang import facts, names, plugin
    from kvplug_sglang.storage import LIVE, KvplugStorage

pytestmark = pytest.mark.timeout(120)

LAYERS, PAGE, NUM_PAGES, HEADS, DIM, LATENT = 3, 4, 6, 2, 8, 12
KEYS = [f"{index:064x}" for index in range(3)]
CONFIG: dict[str, Any] = {
    "tp_rank": 0,
    "tp_size": 2,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_cp_rank": 0,
    "attn_cp_size": 1,
    "is_mla_model": False,
    "enable_storage_metrics": False,
    "is_page_first_layout": True,
    "model_name": "model",
}
LAYOUTS = {
    MHATokenToKVPoolHost: ("layer_first", "page_first", "page_first_direct", "page_head"),
    MLATokenToKVPoolHost: ("layer_first", "page_first", "page_first_direct"),
}


def pool_of(kind: type, layout: str, *, page_size: int = PAGE, dtype: torch.dtype = torch.float32) -> Any:
    """A pool with SGLang's own arithmetic over memory of ours: its maker wants an engine's cache."""
    pool = kind.__new__(kind)
    pool.layout, pool.dtype, pool.page_size, pool.layer_num = layout, dtype, page_size, LAYERS
    pool.page_num, pool.size, pool.device, pool.pin_memory = NUM_PAGES, NUM_PAGES * page_size, "cpu", False
    pool.start_layer, pool.end_layer = 0, LAYERS
    if kind is MHATokenToKVPoolHost:
        pool.head_num, pool.head_dim = HEADS, DIM
        shapes = {
            "layer_first": (2, LAYERS, pool.size, HEADS, DIM),
            "page_first": (2, pool.size, LAYERS, HEADS, DIM),
            "page_first_direct": (2, NUM_PAGES, LAYERS, page_size, HEADS, DIM),
            "page_head": (2, NUM_PAGES, HEADS, page_size, LAYERS, DIM),
        }
    else:
        pool.kv_cache_dim = LATENT
        shapes = {
            "layer_first": (LAYERS, pool.size, 1, LATENT),
            "page_first": (pool.size, LAYERS, 1, LATENT),
            "page_first_direct": (NUM_PAGES, LAYERS, page_size, 1, LATENT),
        }
    pool.kv_buffer = torch.zeros(shapes[layout], dtype=dtype)
    return pool


def rows(*pages: int, page_size: int = PAGE) -> torch.Tensor:
    """The indices of the rows of these pages of a pool."""
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., KvplugStorage]]:
    """``make(pool, weights="a", extra=…, tp_rank=1)``: a storage in a folder, of a worker of a model."""
    monkeypatch.setattr(names, "_agreed_token", lambda: b"token")
    made: list[KvplugStorage] = []

    def make_one(
        pool: Any, *, weights: str = "a", extra: dict[str, Any] | None = None, **changes: Any
    ) -> KvplugStorage:
        monkeypatch.setattr(names, "model_facts", lambda path=None: {"weights": path or weights})
        own = {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path)}}} if extra is None else extra
        storage = KvplugStorage(HiCacheStorageConfig(**{**CONFIG, **changes}, extra_config=own))
        made.append(storage)
        storage.register_mem_pool_host(pool)
        return storage

    yield make_one
    for storage in made:
        storage.close()


@pytest.mark.parametrize(
    ("kind", "layout"), [(kind, name) for kind, names in LAYOUTS.items() for name in names]
)
def test_pages_of_every_layout_come_back_as_they_were(make, kind, layout):
    source, target = pool_of(kind, layout), pool_of(kind, layout)
    source.kv_buffer.copy_(torch.randn(source.kv_buffer.shape))
    is_mla = kind is MLATokenToKVPoolHost
    assert make(source, is_mla_model=is_mla).batch_set_v1(KEYS, rows(4, 0, 2)) == [True] * 3
    assert make(target, is_mla_model=is_mla).batch_get_v1(KEYS, rows(1, 5, 3)) == [True] * 3
    for there, here in ((4, 1), (0, 5), (2, 3)):
        assert torch.equal(source.get_data_page(there * PAGE), target.get_data_page(here * PAGE))
    for other in (0, 2, 4):
        assert not target.get_data_page(other * PAGE).any(), "a page was written that was not asked for"


def test_the_answer_is_the_number_of_first_pages_without_a_gap(make):
    storage = make(pool_of(MHATokenToKVPoolHost, "page_first"))
    assert storage.batch_exists(KEYS) == 0
    storage.batch_set_v1([KEYS[0], KEYS[2]], rows(0, 2))
    assert (storage.batch_exists(KEYS), storage.batch_exists(KEYS[2:]), storage.batch_exists([])) == (1, 1, 0)
    assert [storage.exists(key) for key in KEYS] == [True, False, True]
    assert storage.batch_get_v1(KEYS, rows(0, 1, 2)) == [True, False, True]


OTHERS: dict[str, dict[str, Any]] = {
    "weights": {"weights": "b"},
    "rank": {"tp_rank": 1},
    "number of ranks": {"tp_size": 4},
    "pipeline stage": {"pp_rank": 1, "pp_size": 2},
    "part of the context": {"attn_cp_rank": 1, "attn_cp_size": 2},
}


def test_pages_of_another_model_shard_layout_size_or_type_are_not_found(make):
    pool = pool_of(MHATokenToKVPoolHost, "page_first")
    make(pool).batch_set_v1(KEYS, rows(0, 1, 2))
    assert make(pool).batch_exists(KEYS) == 3
    for what, change in OTHERS.items():
        other = make(pool, **change)
        assert other.batch_exists(KEYS) == 0, what
        assert other.batch_get_v1(KEYS, rows(0, 1, 2)) == [False] * 3, what
    for pool in (
        pool_of(MHATokenToKVPoolHost, "page_head"),
        pool_of(MHATokenToKVPoolHost, "page_first", page_size=2 * PAGE),
        pool_of(MHATokenToKVPoolHost, "page_first", dtype=torch.int32),
    ):
        assert make(pool).batch_exists(KEYS) == 0


def test_latent_pages_are_those_of_all_ranks_but_states_and_drafts_with_heads_are_not(make):
    def of_rank(rank: int) -> KvplugStorage:
        storage = make(pool_of(MLATokenToKVPoolHost, "page_first"), is_mla_model=True, tp_rank=rank)
        for name, kind in (
            (PoolName.MAMBA, MLATokenToKVPoolHost),
            (PoolName.DRAFT, MHATokenToKVPoolHost),
            (PoolName.INDEXER, MLATokenToKVPoolHost),
        ):
            storage.register_mem_host_pool_v2(pool_of(kind, "page_first"), name)
        return storage

    pools = (PoolName.MAMBA, PoolName.DRAFT, PoolName.INDEXER)
    transfers = [PoolTransfer(name=name, host_indices=rows(0, 1, 2), keys=KEYS) for name in pools]
    first, second = of_rank(0), of_rank(1)
    first.batch_set_v1(KEYS, rows(0, 1, 2))
    first.batch_set_v2(transfers)
    assert first.batch_get_v2(transfers) == {name: [True] * 3 for name in pools}
    assert second.batch_exists(KEYS) == 3
    assert second.batch_get_v2(transfers) == {
        PoolName.MAMBA: [False] * 3,
        PoolName.DRAFT: [False] * 3,
        PoolName.INDEXER: [True] * 3,
    }


def test_of_several_pools_it_says_what_sglangs_own_file_storage_says(make, tmp_path):
    chance = random.Random(7)
    pool = pool_of(MHATokenToKVPoolHost, "page_first")
    extras = (PoolName.SWA, PoolName.INDEXER)
    ours = make(pool)
    theirs = HiCacheFile(HiCacheStorageConfig(**CONFIG, extra_config={}), str(tmp_path / "theirs"))
    theirs.register_mem_pool_host(pool)
    for storage in (ours, theirs):
        for name in (PoolName.KV, *extras):
            storage.register_mem_host_pool_v2(pool, name)
    seen = set()
    for round_ in range(30):
        keys = [f"{round_:032x}{index:032x}" for index in range(4)]
        for name in (PoolName.KV, *extras):
            kept = [key for key in keys if chance.random() < 0.8]
            if kept:
                one = PoolTransfer(name=name, host_indices=rows(*range(len(kept))), keys=kept)
                assert ours.batch_set_v2([one]) == theirs.batch_set_v2([one]) == {name: [True] * len(kept)}
        asked = [
            PoolTransfer(
                name=PoolName.SWA, keys=keys[: chance.randint(1, 3)], hit_policy=PoolHitPolicy.TRAILING_PAGES
            ),
            PoolTransfer(name=PoolName.INDEXER, keys=keys),
        ]
        found, wanted = ours.batch_exists_v2(keys, asked), theirs.batch_exists_v2(keys, asked)
        assert found.kv_hit_pages == wanted.kv_hit_pages
        assert found.restorable_prefix_pages == wanted.restorable_prefix_pages
        seen.add(found.kv_hit_pages)
    assert len(seen) > 2


def test_a_storage_without_pages_of_its_own_follows_the_other_pools(make):
    anchor, side = pool_of(MHATokenToKVPoolHost, "page_first"), pool_of(MHATokenToKVPoolHost, "page_first")
    anchor.kv_buffer = None
    storage = make(anchor)
    storage.register_mem_host_pool_v2(side, PoolName.INDEXER)
    one = PoolTransfer(name=PoolName.INDEXER, host_indices=rows(0, 1), keys=KEYS[:2])
    storage.batch_set_v2([one])
    assert storage.batch_exists_v2(KEYS, [PoolTransfer(name=PoolName.INDEXER, keys=KEYS)]).kv_hit_pages == 2


def test_pages_as_tensors_come_back_too(make):
    pool = pool_of(MHATokenToKVPoolHost, "page_first")
    pool.kv_buffer.copy_(torch.randn(pool.kv_buffer.shape))
    storage, page = make(pool), pool.get_data_page(0)
    assert storage.set("k", page)
    target = pool.get_dummy_flat_data_page()
    found = storage.batch_get(["k", "absent"], [target, torch.zeros_like(target)])
    assert found[0] is target and found[1] is None
    assert torch.equal(target, page)
    assert storage.get("absent", torch.zeros_like(target)) is None


def test_while_the_weights_change_there_are_no_pages_and_then_others(make):
    storage = make(pool_of(MHATokenToKVPoolHost, "page_first"))
    indices = rows(0, 1, 2)
    assert all(storage.batch_set_v1(KEYS, indices))

    def update(path: str | None, is_done: bool, *, flush: str) -> int:
        storage.names.begin_weights(path)
        assert storage.batch_exists(KEYS) == 0
        assert not any(storage.batch_set_v1(KEYS, indices))
        if flush == "within":
            storage.names.cache_was_reset()
        storage.names.end_weights(is_done)
        assert flush == "within" or storage.batch_exists(KEYS) == 0
        storage.names.cache_was_reset()
        return storage.batch_exists(KEYS)

    assert update("b", True, flush="within") == 0
    assert all(storage.batch_set_v1(KEYS, indices))
    assert update("a", True, flush="after") == 3, "those of the first weights"
    assert update("b", False, flush="after") == 0, "it failed: which weights these are is not known"
    assert update(None, True, flush="within") == 0
    assert all(storage.batch_set_v1(KEYS, indices))
    assert update(None, True, flush="within") == 0, "others than before"
    assert update("b", True, flush="within") == 3


def test_weights_without_a_fingerprint_are_shared_only_where_the_operator_names_them(
    make, monkeypatch, caplog, tmp_path
):
    monkeypatch.setattr(names, "_agreed_token", lambda: random.randbytes(16))
    pool, fs = pool_of(MHATokenToKVPoolHost, "page_first"), {"fs": {"path": str(tmp_path)}}
    for stated, num_found in (("", 0), ("", 0), ("w at 1", 0), ("w at 1", 3), ("w at 2", 0)):
        storage = make(pool, weights="", extra={"stores": ["fs"], "options": fs, "weights": stated})
        assert storage.batch_exists(KEYS) == num_found
        assert all(storage.batch_set_v1(KEYS, rows(0, 1, 2)))
        assert storage.batch_exists(KEYS) == 3
    assert caplog.text.count("the weights of model are unknown") == 2


UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"


@pytest.fixture
def hooked(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """SGLang's class that updates weights, in a process of a scheduler that has applied all hooks."""
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    monkeypatch.setitem(sys.modules, "sglang.srt.managers.scheduler", types.ModuleType("scheduler"))
    monkeypatch.setattr(plugin, "_registered", [])
    for name in plugin.UPDATES:  # as they were, afterwards
        monkeypatch.setattr(SchedulerWeightUpdaterManager, name, getattr(SchedulerWeightUpdaterManager, name))
    HookRegistry.reset()
    yield SchedulerWeightUpdaterManager
    HookRegistry.reset()


def test_a_storage_starts_only_where_sglang_has_applied_the_hooks(make, hooked, monkeypatch):
    plugin.register()
    HookRegistry.apply_hooks()
    make(pool_of(MHATokenToKVPoolHost, "page_first"))
    monkeypatch.delattr(hooked, "update_weights_from_ipc")
    with pytest.raises(UnsupportedError, match=rf"SGLang has no {UPDATER}\.update_weights_from_ipc, or"):
        make(pool_of(MHATokenToKVPoolHost, "page_first"))


def test_an_adapter_is_another_when_its_files_are_and_weights_without_files_have_no_fingerprint(tmp_path):
    def with_weights(value: float) -> tuple[str, str, str]:
        save_file({"lora_A": torch.full((2, 2), value)}, tmp_path / "adapter_model.safetensors")
        return facts.adapter_of(SimpleNamespace(lora_name="a", lora_path=str(tmp_path)))

    (tmp_path / "adapter_config.json").write_text('{"r": 2, "lora_alpha": 4}')
    found = {with_weights(1.0), with_weights(1.0), with_weights(2.0)}
    assert len(found) == 2 and {each[:2] for each in found} == {("a", str(tmp_path))}
    assert all(each[2].startswith("safetensors:") for each in found)
    assert facts.adapter_of(SimpleNamespace(lora_name="a", lora_path="/nowhere")) == ("a", "/nowhere", "")
    assert facts.fingerprint_of(str(tmp_path), None, "dummy", None) == ""
    assert facts.fingerprint_of(str(tmp_path), None, "auto", None).startswith("safetensors:")


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    redis = RedisServer(folder)
    yield redis
    redis.process.send_signal(signal.SIGCONT)
    redis.kill()


def test_a_stopped_store_costs_one_deadline_and_is_asked_again_later(make, redis):
    options = {"address": [redis.address], "size": "1 GiB", "timeout_s": 30}
    extra = {"stores": ["redis"], "timeout_s": 1, "options": {"redis": options}}
    storage = make(pool_of(MHATokenToKVPoolHost, "page_first"), extra=extra)
    assert all(storage.batch_set_v1(KEYS, rows(0, 1, 2)))
    redis.process.send_signal(signal.SIGSTOP)
    started = time.monotonic()
    assert storage.batch_get_v1(KEYS, rows(0, 1, 2)) == [False] * 3
    assert 0.9 < time.monotonic() - started < 10
    started = time.monotonic()
    for _ in range(5):  # a pause is no shorter than a second
        assert storage.batch_exists(KEYS) == 0
        assert not any(storage.batch_set_v1(KEYS, rows(0, 1, 2)))
    assert time.monotonic() - started < 5, "each of ten calls waited"
    failures = storage.cache.failures
    assert failures["get"] == {"timeout": 3}
    assert failures["lookup"]["store_gone"] >= 3 and failures["put"]["store_gone"] >= 3
    redis.process.send_signal(signal.SIGCONT)
    until(lambda: storage.batch_exists(KEYS), 30)


def test_a_closed_storage_gives_everything_back_and_answers_with_misses(make, redis):
    pool = pool_of(MHATokenToKVPoolHost, "page_first")
    for round_ in range(2):  # what the first one imports and starts once stays
        if round_:
            before = Resources.of()
        options = {"address": [redis.address], "size": "1 GiB"}
        storage = make(pool, extra={"stores": ["redis"], "options": {"redis": options}, "sinks": ["log"]})
        assert all(storage.batch_set_v1(KEYS, rows(0, 1, 2)))
        storage.close()
        storage.close()
    until(lambda: not Resources.of().beyond(before), 10)
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_get_v1(KEYS, rows(0, 1, 2)) == [False] * 3
    assert not any(storage.batch_set_v1(KEYS, rows(0, 1, 2)))
    assert storage not in LIVE


def test_a_pool_that_does_not_say_where_its_pages_are_is_refused(make):
    pool = pool_of(MHATokenToKVPoolHost, "page_first")
    pool.layout = "page_unified"
    with pytest.raises(ConfigError, match=r"'page_unified': Unsupported layout.*--hicache-mem-layout"):
        make(pool)


def test_a_wrong_config_is_refused_with_what_to_change(make):
    for extra, why in (
        ({"stores": ["host", "fs"]}, r"stores: host, fs was given; allowed is one"),
        ({"stores": ["fs"], "role": "producer"}, r"role: .*remove the key"),
        ({"stores": ["fs"], "timout_s": 3}, r"timout_s.*did you mean 'timeout_s'"),
    ):
        with pytest.raises(ConfigError, match=f"(?s){why}"):
            make(pool_of(MHATokenToKVPoolHost, "page_first"), extra=extra)
    with pytest.raises(ConfigError, match="tp_lcm_size: 8 was given"):
        make(pool_of(MHATokenToKVPoolHost, "page_head"), tp_lcm_size=8)


def test_keys_of_sglangs_own_are_passed_over_and_metrics_follow_the_engine():
    given = {"module_path": "m", "class_name": "c", "allocator": "shm", "stores": ["fs"]}
    assert (config_of(given).timeout_s, config_of(given).sinks) == (5.0, ())
    assert config_of(given, metrics=True).sinks == ("prometheus",)
    own = {**given, "timeout_s": 1, "sinks": ["log"]}
    assert (config_of(own, metrics=True).timeout_s, config_of(own, metrics=True).sinks) == (1.0, ("log",))


def test_pauses_grow_and_one_call_at_a_time_finds_out_whether_the_store_answers():
    now = 0.0
    pause = Pause(lambda: now)
    lengths = []
    for _ in range(7):
        assert pause.allows()
        pause.note(answered=False)
        started = now
        while not pause.allows():
            now += 0.5
        assert not pause.allows(), "one call asks, the others do not wait for it"
        lengths.append(now - started)
        now += 100
    assert lengths == [1, 2, 4, 8, 16, 30, 30]
    pause.note(answered=True)
    assert pause.allows() and pause.allows()


def test_sglang_passes_no_trace_context_of_a_request() -> None:
    """If it does: pass it on to the store, and describe that in trace-requests.md."""
    fields = {field.name for field in dataclasses.fields(HiCacheStorageExtraInfo)}
    assert fields == {"prefix_keys", "extra_info"}
