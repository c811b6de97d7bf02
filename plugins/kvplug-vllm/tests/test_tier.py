"""A kvplug store as a secondary tier, under vLLM's own TieringOffloadingManager and its shared region."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from kvplug import ConfigError
from kvplug.transport import Deadline, Job, Presence
from kvplug_testing.waits import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.kv_offload.tiering.backpressure", reason="tiers since vLLM 0.31")
    from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
    from vllm.v1.kv_offload.config import (
        OffloadingCacheConfig,
        OffloadingConfig,
        OffloadingGroupConfig,
        OffloadingModelConfig,
        OffloadingParallelConfig,
    )
    from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

    from kvplug_vllm.tier import KvplugTier, Lookups

pytestmark = pytest.mark.timeout(90)

CHUNK = 8192
NUM_CHUNKS = 16
STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def key(number: int, group: int = 0) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), group)


ONE = dict.fromkeys(("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size", "data_parallel_size"), 1)


def config(tier: dict[str, Any], engine_id: str) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=CHUNK,
        enable_kv_cache_events=False,
        extra_config={"cpu_bytes_to_use": NUM_CHUNKS * CHUNK, "secondary_tiers": [tier]},
        engine_id=engine_id,
        model=OffloadingModelConfig(name="model", dtype="float16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0, data_parallel_index=0, data_parallel_rank_local=None, is_parallelism_agnostic=False, **ONE
        ),
        kv_cache_layout="NHD",
    )


@attrs.define
class Engine:
    """What vLLM's scheduler does with its manager; the worker's copies are written by hand."""

    manager: Any
    slowest_s: float = 0.0
    """Of a call that must not wait."""

    @property
    def tier(self) -> KvplugTier:
        (tier,) = self.manager.secondary_tiers
        return tier  # type: ignore[no-any-return]

    def call(self, method: str, *arguments: Any) -> Any:
        began = time.monotonic()
        result = getattr(self.manager, method)(*arguments)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return result

    def step(self) -> None:
        self.call("on_schedule_end", STEP)

    def forget(self) -> None:
        """The primary tier is empty afterwards. Waits for transfers."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):  # since 0.33: the workers have ended their copies
            self.manager.on_reset_flushed()

    def begin(self, name: str) -> ReqContext:
        request = ReqContext(req_id=name)
        self.call("on_new_request", request)
        return request

    def row(self, chunk: int) -> memoryview:
        whole = self.manager.primary_tier.get_kv_memoryview().cast("B")
        return whole[chunk * CHUNK : (chunk + 1) * CHUNK]

    def store(self, *numbers: int) -> None:
        """Chunks come from the device, filled with their numbers, and are stored in every tier."""
        keys = [key(number) for number in numbers]
        request = self.begin(f"store {numbers}")
        prepared = self.call("prepare_store", keys, request)
        assert prepared.keys_to_store == keys
        for chunk, number in zip(prepared.store_spec.chunk_ids, numbers, strict=True):
            self.row(int(chunk))[:] = bytes([number]) * CHUNK
        self.call("complete_store", keys, request)
        self.call("on_request_finished", request)

    def settle(self, within: float = 20) -> None:
        """Step until no transfer is under way."""

        def has_settled() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        until(has_settled, within, "the end of the transfers")
        self.step()

    def find(self, *keys: Any, request: ReqContext | None = None, within: float = 20) -> list[bool]:
        """Step until each key is known to be a hit in the primary tier, or a miss."""
        asking, found = request or self.begin(f"at {time.monotonic()}"), []

        def is_known() -> bool:
            found[:] = [self.call("lookup", each, asking) for each in keys]
            return set(found) <= {LookupResult.HIT, LookupResult.MISS} or self.step()

        until(is_known, within, "the answers")
        return [each is LookupResult.HIT for each in found]

    def load(self, *numbers: int, request: ReqContext) -> None:
        """The device gets the chunks as they were stored."""
        keys = [key(number) for number in numbers]
        spec = self.call("prepare_load", keys, request)
        rows = [bytes(self.row(int(chunk))) for chunk in spec.chunk_ids]
        assert rows == [bytes([number]) * CHUNK for number in numbers]
        self.call("complete_load", keys, request)


@pytest.fixture
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., Engine]]:
    """``start(tier, change=...)``: an engine with this tier."""
    with ExitStack() as stack:
        names = iter(range(100))

        def started(
            tier: dict[str, Any], change: Callable[[OffloadingConfig], OffloadingConfig] | None = None
        ) -> Engine:
            made = config(
                {"type": "KvplugTier", "module_path": "kvplug_vllm.tier", **tier},
                f"kvplug-test-{os.getpid()}-{next(names)}",
            )
            manager = TieringOffloadingSpec(change(made) if change else made).get_manager()
            stack.callback(manager.shutdown)
            return Engine(manager)

        yield started


@pytest.fixture
def fs(tmp_path: Path) -> dict[str, Any]:
    return {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path / "pages")}}, "weights": "w"}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Any]:
    from redis_server import RedisServer

    server = RedisServer(tmp_path)
    yield server
    if server.process.poll() is None:
        os.kill(server.process.pid, signal.SIGCONT)
    server.kill()


@pytest.fixture
def beside_redis(start, redis) -> Any:
    """An engine that has stored chunk 1 there, and has forgotten it."""
    engine = start({"stores": ["redis"], "options": {"redis": {"address": redis.address}}, "timeout_s": 2})
    engine.store(1)
    engine.settle()
    assert engine.tier.cache.failures == {}
    engine.forget()
    return engine


@pytest.fixture
def filled(start, fs) -> Any:
    """An engine that has stored chunk 1 in "fs"."""
    engine = start(fs)
    engine.store(1)
    engine.settle()
    return engine


def test_chunks_are_found_by_another_engine_bit_for_bit(start, fs):
    first = start(fs)
    first.store(1, 2, 3, 4, 5)
    first.settle()
    second = start(fs)
    request = second.begin("request")
    keys = [key(number) for number in (1, 2, 3, 4, 5, 9)]
    assert second.find(*keys, request=request) == [True] * 5 + [False]
    second.load(1, 2, 3, 4, 5, request=request)
    second.call("touch", keys[:5], request)
    second.call("on_request_finished", request)
    second.step()
    assert (len(second.tier.lookups), second.tier.cache.num_leased) == (0, 0)


@pytest.mark.parametrize(
    "change",
    [
        lambda config: replace(config, model=OffloadingModelConfig(name="other", dtype="float16")),
        lambda config: replace(config, model=OffloadingModelConfig(name="model", dtype="bfloat16")),
        lambda config: replace(config, kv_cache_layout="HND"),
        lambda config: replace(config, parallel=replace(config.parallel, pcp_size=2)),
        lambda config: replace(config, cache=replace(config.cache, tokens_per_hash=32)),
        lambda config: replace(config, groups=(replace(config.groups[0], layer_names=("a", "c")),)),
    ],
    ids=["model", "dtype", "layout", "parallel", "hashes", "layers"],
)
def test_an_engine_that_differs_finds_nothing(start, fs, filled, change):
    assert start(fs, change).find(key(1)) == [False]


def test_groups_and_namespaces_are_apart(start, fs, filled):
    assert start(fs).find(key(1), key(1, group=1)) == [True, False]
    assert start({**fs, "namespace": "revision 2"}).find(key(1)) == [False]


def test_without_a_name_of_the_weights_nothing_is_shared(start, fs, caplog):
    for _ in range(2):
        engine = start({**fs, "weights": ""})
        assert engine.find(key(1)) == [False]
        engine.store(1)
        engine.settle()
    assert "the weights of model are unknown" in caplog.text


def test_a_damaged_chunk_is_a_miss_and_is_not_asked_for_again(start, fs, filled, tmp_path):
    filled.store(2)
    filled.settle()
    files = [path for path in (tmp_path / "pages").rglob("*") if path.is_file()]
    damaged = next(path for path in files if bytes([2]) * CHUNK in path.read_bytes())
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
    second = start(fs)
    request = second.begin("request")
    assert second.find(key(1), key(2), request=request) == [True, False]
    second.load(1, request=request)
    assert second.tier.cache.failures["get"] == {"corrupt": 1}
    second.settle()
    assert second.find(key(2), request=request) == [False]
    second.store(2)  # it is computed, and its place is free
    second.settle()


def test_while_the_server_is_stopped_no_call_waits_and_every_transfer_ends(beside_redis, redis):
    engine = beside_redis
    os.kill(redis.process.pid, signal.SIGSTOP)
    engine.slowest_s = 0.0
    assert engine.find(key(1), within=10) == [False]
    engine.store(2)
    engine.settle(within=10)
    assert engine.slowest_s < 0.5
    engine.store(3)
    began = time.monotonic()
    engine.forget()  # waits for the job, which ends by its deadline
    assert time.monotonic() - began < 10
    os.kill(redis.process.pid, signal.SIGCONT)
    until(lambda: engine.find(key(1)) == [True])


@pytest.mark.parametrize("store", ["fs", "host"])
def test_shutdown_gives_everything_back(start, fs, store, caplog):
    tier = fs if store == "fs" else {"stores": ["host"], "options": {"host": {"size": "64 MiB"}}}

    def opened() -> tuple[int, int, set[str]]:
        shared = {name for name in os.listdir("/dev/shm") if name.startswith("vllm_offload_kvplug-test")}
        return len(os.listdir("/proc/self/fd")), threading.active_count(), shared

    start(tier).manager.shutdown()
    before = opened()
    for number in range(3):
        engine = start(tier)
        engine.store(number)
        engine.call("lookup", key(99), engine.begin("request"))
        engine.step()
        engine.manager.shutdown()
    assert opened() == before
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert not any("mmap" in each for each in warned)  # the region was unmapped: nothing holds a view of it


@pytest.mark.parametrize(
    ("tier", "fault"),
    [
        ({"stores": ["fs", "host"]}, "stores: fs, host was given"),
        ({"stores": ["fs"], "root_dir": "/kv"}, "root_dir: not a known key"),
        ({"stores": ["fs"], "medium": "DISK"}, "medium: 'DISK' was given; allowed is 'CPU', 'STORAGE'"),
    ],
)
def test_a_wrong_configuration_is_refused_by_name(start, tier, fault):
    with pytest.raises(ConfigError, match=fault):
        start(tier)


# -- the answers that are remembered -----------------------------------------------------------

KEYS = [key(number) for number in range(3)]
EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.sampled_from(KEYS), st.sampled_from("ab")),
    st.tuples(st.just("forget"), st.sampled_from("ab")),
    st.tuples(st.just("miss"), st.sampled_from(KEYS)),
    st.tuples(st.just("flush")),
    st.tuples(st.just("answer"), st.booleans()),
)


@given(st.lists(EVENTS, max_size=40))
def test_every_lease_is_given_back_and_nothing_is_remembered_for_ever(events):
    leased: list[Any] = []
    under_way: list[tuple[list[Any], Job[Presence]]] = []

    def lookup(keys: list[Any], *, lease_s: float) -> Job[Presence]:
        assert lease_s == 60
        job: Job[Presence] = Job(len(keys), Deadline.after(None))
        under_way.append((keys, job))
        return job

    def answer(held: bool) -> None:
        if under_way:
            keys, job = under_way.pop(0)
            leased.extend(keys if held else ())
            job.set([Presence.HELD if held else Presence.ABSENT] * len(keys))

    def release(keys: Sequence[Any]) -> None:
        for each in keys:
            leased.remove(each)  # raises where there is none

    lookups = Lookups(lookup, release, 60)
    for event, *arguments in events:
        if event == "ask":
            found = lookups.ask(*arguments)
            assert found is not True or arguments[0] in leased
        elif event == "answer":
            answer(*arguments)
        elif event == "miss":
            lookups.miss(arguments)
            assert lookups.ask(arguments[0], "a") is not True
        else:
            getattr(lookups, event)(*arguments)
    for request in "ab":
        lookups.forget(request)
    lookups.flush()
    while under_way:
        answer(True)
    lookups.flush()
    assert leased == []
    assert len(lookups) == 0
