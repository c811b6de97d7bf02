"""The adapter with LMCache's own keys, memory objects and event descriptors, over real stores."""

from __future__ import annotations

import dataclasses
import inspect
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.memory_management import (
    BytesBufferMemoryObj,
    GDSMemoryObject,
    MemoryFormat,
    MemoryObjMetadata,
    TensorMemoryObj,
)
from lmcache.v1.platform import consume_fd

from kvplug import ConfigError, UnsupportedError
from kvplug_lmcache import keys as keys_module
from kvplug_lmcache.keys import encode_key
from kvplug_testing.comparison import assert_filled
from kvplug_testing.waits import until

pytestmark = pytest.mark.timeout(60)

LAYOUT = {0: MemoryLayoutDesc(shapes=[], dtypes=[])}


def key(number: int, **more: Any) -> ObjectKey:
    return ObjectKey(chunk_hash=number.to_bytes(16, "big"), **{"model_name": "m", "kv_rank": 7, **more})


def obj(fill: int, nbytes: int = 4096, dtype: torch.dtype = torch.float16) -> TensorMemoryObj:
    raw = torch.full([nbytes + 64], fill, dtype=torch.uint8)[:nbytes]
    shape = torch.Size([2, nbytes // dtype.itemsize // 2])
    meta = MemoryObjMetadata(
        shape=shape, dtype=dtype, address=0, phy_size=nbytes, fmt=MemoryFormat.KV_2LTD, ref_count=1
    )
    return TensorMemoryObj(raw, meta, None)


def wait_for(fd: int, query: Callable[[], Any], within: float = 20) -> Any:
    """What LMCache's controllers do: poll, consume, ask."""
    limit = time.monotonic() + within
    while True:
        readable, _, _ = select.select([fd], [], [], max(0, limit - time.monotonic()))
        assert readable, "the event did not come"
        consume_fd(fd)
        if result := query():
            return result


def store(adapter: Any, keys: Sequence[ObjectKey], objects: Sequence[Any], within: float = 20) -> Any:
    task = adapter.submit_store_task(list(keys), list(objects))
    done = wait_for(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks, within)
    assert list(done) == [task]
    return done[task]


def bits(found: Any, count: int) -> list[bool]:
    return [found.test(index) for index in range(count)]


def lookup(adapter: Any, keys: Sequence[ObjectKey], within: float = 20) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(list(keys), LAYOUT)
    fd = adapter.get_lookup_and_lock_event_fd()
    found = wait_for(fd, lambda: [adapter.query_lookup_and_lock_result(task)], within)
    assert adapter.query_lookup_and_lock_result(task) is None  # each result is given once
    return bits(found[0], len(keys))


def load(adapter: Any, keys: Sequence[ObjectKey], objects: Sequence[Any], within: float = 20) -> list[bool]:
    task = adapter.submit_load_task(list(keys), list(objects))
    found = wait_for(adapter.get_load_event_fd(), lambda: [adapter.query_load_result(task)], within)
    return bits(found[0], len(keys))


@pytest.fixture
def fs(tmp_path: Path) -> dict[str, Any]:
    return {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path / "pages")}}}


# -- what is stored is what is loaded ----------------------------------------------------------


def test_a_batch_of_several_sizes_is_found_by_another_adapter_and_absent_keys_are_misses(make, fs):
    adapter, other = make(**fs), make(**fs)
    keys, sizes = [key(number) for number in range(12)], [1024 * (1 + number % 3) for number in range(12)]
    kept = store(adapter, keys, [obj(n, size) for n, size in enumerate(sizes)])
    assert kept.is_successful()
    assert kept.bytes_transferred() == sum(sizes)
    asked = [*keys, key(99)]
    assert lookup(other, asked) == [True] * 12 + [False]
    into = [*(obj(255, size) for size in sizes), obj(255)]
    assert load(other, asked, into) == [True] * 12 + [False]
    for number, each in enumerate(into[:12]):
        assert_filled(number, each.raw_data)
    assert store(adapter, [], []).is_successful()
    assert lookup(adapter, []) == []
    status = other.report_status()
    assert (status["succeeded"]["get"], status["failed"]["get"]) == (12, {"absent": 1})
    assert status["is_healthy"]


OTHERS = [
    {"model_name": "m2"},
    {"kv_rank": ObjectKey.ComputeKVRank(2, 1, 2, 1)},
    {"object_group_id": 1},
    {"cache_salt": "tenant"},
]


def test_another_model_rank_group_or_salt_is_another_object(make, fs):
    adapter = make(**fs)
    assert store(adapter, [key(1)], [obj(1)]).is_successful()
    others = [key(1, **other) for other in OTHERS]
    assert lookup(adapter, others) == [False] * len(others)
    assert load(adapter, others, [obj(0) for _ in others]) == [False] * len(others)


def test_every_field_of_the_key_is_in_the_encoded_key():
    """Also the fields of a later LMCache: a field that is not in OTHERS has to be added there."""
    names = {field.name for field in dataclasses.fields(ObjectKey)}
    assert names == {"chunk_hash", *(name for other in OTHERS for name in other)}


TEXT = st.text(st.characters(blacklist_characters="@/\\\0", max_codepoint=0x2FF), max_size=6)


@given(
    *2
    * [
        st.builds(
            ObjectKey,
            chunk_hash=st.binary(max_size=6),
            model_name=TEXT,
            kv_rank=st.integers(0, 300),
            object_group_id=st.integers(0, 3),
            cache_salt=TEXT,
        )
    ]
)
def test_encoded_keys_are_equal_exactly_where_keys_are(one, other):
    assert (encode_key(one) == encode_key(other)) == (one == other)


def test_a_field_that_cannot_be_encoded_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(keys_module, "_FIELDS", ("chunk_hash", "window"))
    strange = key(1)
    object.__setattr__(strange, "window", [1])
    with pytest.raises(UnsupportedError, match=r"chunk_hash, window.*\[1\]"):
        encode_key(strange)


@pytest.mark.parametrize("into", [obj(0, dtype=torch.bfloat16), obj(0, 2048)], ids=["dtype", "size"])
def test_an_object_of_another_dtype_or_size_is_never_loaded_and_makes_room(make, fs, into):
    adapter = make(**fs)
    assert store(adapter, [key(1)], [obj(1)]).is_successful()
    assert load(adapter, [key(1)], [into]) == [False]
    assert store(adapter, [key(1)], [into]).is_successful()
    assert load(adapter, [key(1)], [into]) == [True]


def test_a_namespace_divides_a_store(make, fs):
    assert store(make(**fs, namespace="revision 1"), [key(1)], [obj(1)]).is_successful()
    assert lookup(make(**fs, namespace="revision 2"), [key(1)]) == [False]
    assert lookup(make(**fs, namespace="revision 1"), [key(1)]) == [True]


def test_without_a_word_on_the_weights_nothing_is_shared(make, fs, caplog):
    adapter = make(**fs, weights="")
    assert store(adapter, [key(1)], [obj(1)]).is_successful()
    assert lookup(adapter, [key(1)]) == [True]
    assert lookup(make(**fs, weights=""), [key(1)]) == [False], "after a restart"
    assert "set weights to a text" in caplog.text


def test_objects_without_bytes_here_fail_and_nothing_is_raised(make, fs):
    adapter = make(**fs)
    meta = obj(0).metadata
    assert not store(adapter, [key(1)], [GDSMemoryObject(meta)]).is_successful()
    assert load(adapter, [key(1)], [GDSMemoryObject(meta)]) == [False]
    constant = BytesBufferMemoryObj(bytes(100))
    assert store(adapter, [key(2)], [constant]).is_successful()
    assert load(adapter, [key(2)], [constant]) == [False]  # it cannot be written to


# -- locks, deletion, figures ------------------------------------------------------------------


def test_locks_are_counted_and_keep_objects_from_deletion(make):
    adapter = make(stores=["host"], options={"host": {"size": "16 MiB", "segment_bytes": "4 MiB"}})
    keys = [key(1), key(2)]
    assert store(adapter, keys, [obj(1), obj(2)]).is_successful()
    assert lookup(adapter, [keys[0]]) == [True]
    assert lookup(adapter, [keys[0], key(3)]) == [True, False]
    assert adapter.report_status()["locked_key_count"] == 1
    adapter.delete(keys)
    assert lookup(adapter, keys) == [True, False]
    adapter.submit_unlock([keys[0]])
    adapter.submit_unlock([keys[0]])
    adapter.delete(keys)
    assert lookup(adapter, [keys[0]]) == [True]
    adapter.submit_unlock([keys[0], keys[0]])
    adapter.submit_unlock([key(77)])  # was never locked
    assert adapter.report_status()["locked_key_count"] == 0
    adapter.delete(keys)
    assert lookup(adapter, keys) == [False, False]


class Listener(L2AdapterListener):
    def __init__(self) -> None:
        self.stored: list[tuple[ObjectKey, int]] = []
        self.accessed: list[ObjectKey] = []
        self.deleted: list[ObjectKey] = []

    def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
        self.stored += zip(keys, sizes, strict=True)

    def on_l2_keys_accessed(self, keys: list[ObjectKey]) -> None:
        self.accessed += keys

    def on_l2_keys_deleted(self, keys: list[ObjectKey]) -> None:
        self.deleted += keys


def test_listeners_and_usage_follow_what_is_kept(make, fs):
    adapter, listener = make(**fs), Listener()
    adapter.register_listener(listener)
    salted = key(2, cache_salt="tenant")
    for _ in range(2):  # the second time it is held already
        assert store(adapter, [key(1), salted], [obj(1), obj(2)]).is_successful()
    assert listener.stored == [(key(1), 4096), (salted, 4096)]
    usage = adapter.get_usage()
    assert dict(usage.bytes_by_cache_salt) == {"": 4096, "tenant": 4096}
    assert 2 * 4096 < usage.total_bytes_used < usage.total_capacity_bytes
    assert lookup(adapter, [key(1), key(9)]) == [True, False]
    assert listener.accessed == [key(1)]
    adapter.submit_unlock([key(1)])
    adapter.delete([key(1), salted])
    until(lambda: listener.deleted)
    assert set(listener.deleted) == {key(1), salted}
    assert dict(adapter.get_usage().bytes_by_cache_salt) == {}


def test_a_listener_that_fails_does_not_hold_up_the_task(make, fs):
    class Broken(Listener):
        def on_l2_keys_stored(self, keys: list[ObjectKey], sizes: list[int]) -> None:
            raise RuntimeError("broken")

    adapter = make(**fs)
    adapter.register_listener(Broken())
    assert store(adapter, [key(1)], [obj(1)]).is_successful()


# -- a store that fails ------------------------------------------------------------------------


def redis_params(server: Any, **more: Any) -> dict[str, Any]:
    return {"stores": ["redis"], "options": {"redis": {"address": server.address}}, **more}


def test_every_task_and_the_end_keep_the_deadline_beside_a_stopped_server(make, redis):
    adapter, other = (make(**redis_params(redis, timeout_s=1)) for _ in range(2))
    assert store(adapter, [key(1)], [obj(1)]).is_successful()
    os.kill(redis.process.pid, signal.SIGSTOP)
    try:
        into, began = obj(9), time.monotonic()
        assert lookup(adapter, [key(1)], within=10) == [False]
        assert load(adapter, [key(1)], [into], within=10) == [False]
        assert not store(adapter, [key(2)], [obj(2)], within=10).is_successful()
        assert time.monotonic() - began < 8
        other.submit_store_task([key(2)], [obj(2)])
        began = time.monotonic()
        other.close()
        assert time.monotonic() - began < 10
    finally:
        os.kill(redis.process.pid, signal.SIGCONT)
    until(lambda: load(adapter, [key(1)], [obj(0)]) == [True])
    assert_filled(9, into.raw_data)  # nothing came into it after its task had ended


# -- the end -----------------------------------------------------------------------------------


def test_close_gives_everything_back_and_calls_after_it_raise_nothing(make, redis, tmp_path):
    def opened() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def use(adapter: Any) -> None:
        store(adapter, [key(1)], [obj(1)])
        load(adapter, [key(1)], [obj(0)])

    use(first := make(**redis_params(redis)))
    first.close()
    before = opened()
    for _ in range(3):
        adapter = make(**redis_params(redis))
        use(adapter)
        adapter.submit_lookup_and_lock_task([key(1)], LAYOUT)
        adapter.close()
        adapter.close()
        adapter.submit_store_task([key(1)], [obj(1)])
        adapter.submit_load_task([key(1)], [obj(1)])
        adapter.submit_lookup_and_lock_task([key(1)], LAYOUT)
        adapter.submit_unlock([key(1)])
        adapter.delete([key(1)])
        assert not adapter.report_status()["is_healthy"]
    assert opened() == before


# -- configuration -----------------------------------------------------------------------------


def test_a_wrong_configuration_is_refused_by_name(make):
    for params, why in (
        ({"stores": ["fs", "host"]}, "stores: fs, host was given; allowed is one store for each cache"),
        ({"stroes": ["fs"]}, "did you mean 'stores'"),
        ({"stores": ["fs"], "namespace": 3}, "namespace: 3 was given; allowed is text"),
    ):
        with pytest.raises(ConfigError, match=why):
            make(**params)


def test_lmcache_passes_no_trace_context_of_a_request() -> None:
    """If it does: pass it on to the store, and describe that in trace-requests.md."""
    for call in (L2AdapterInterface.submit_store_task, L2AdapterInterface.submit_load_task):
        assert [*inspect.signature(call).parameters] == ["self", "keys", "objects"]
