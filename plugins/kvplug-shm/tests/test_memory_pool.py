"""Receive memory that is used again: never under a tensor that is still somewhere, and not without bound."""

from __future__ import annotations

import gc
import mmap
import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shm_pool_memory as ends
from kvplug import ResourceExhaustedError, UnsupportedError
from kvplug.net.wire.tensors import DTYPES, TensorMeta, memory_of, memory_of_writable
from kvplug_shm.memory import pool as room
from kvplug_shm.memory.pool import POOLED_FROM, Pool

MIB = 1 << 20
PLENTY = 256 * MIB
HUGE_PAGE = 2 * MIB
of, fill, holds, is_mapped = ends.of, ends.fill, ends.holds, ends.is_mapped
idle, in_forked_child = ends.idle, ends.in_forked_child


# -- what is lent ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_of_every_dtype(dtype: str) -> None:
    pool = Pool(PLENTY)
    meta = TensorMeta(dtype, (2 * POOLED_FROM // 64 // DTYPES[dtype][1], 8, 8))
    try:
        tensor = pool.tensor(meta)
    except UnsupportedError:
        assert not hasattr(torch, dtype)
        assert pool.lent_bytes == 0
        return
    assert tensor.dtype is getattr(torch, dtype)
    assert tuple(tensor.shape) == meta.shape
    assert tensor.is_contiguous() and tensor.is_cpu and not tensor.requires_grad and not tensor._is_view()
    assert tensor.untyped_storage().nbytes() == meta.nbytes == pool.lent_bytes
    fill(tensor, 1)
    assert holds(tensor, 1)


@pytest.mark.parametrize("shape", [(0,), (0, 1 << 40), (), (3, 5), (POOLED_FROM - 1,)])
def test_a_small_tensor_is_not_the_pools(shape: tuple[int, ...]) -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(TensorMeta("uint8", shape))
    assert tuple(tensor.shape) == shape
    assert pool.lent_bytes == 0
    del tensor
    assert pool.idle_bytes == 0


def test_memory_goes_back_and_is_lent_again() -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(of(POOLED_FROM))
    address = tensor.data_ptr()
    assert (pool.lent_bytes, pool.idle_bytes) == (POOLED_FROM, 0)
    other = pool.tensor(of(POOLED_FROM))
    assert other.data_ptr() != address
    del tensor
    assert (pool.lent_bytes, pool.idle_bytes) == (POOLED_FROM, POOLED_FROM)
    again = pool.tensor(TensorMeta("float64", (POOLED_FROM // 16, 2)))
    assert again.data_ptr() == address
    assert pool.idle_bytes == 0


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a slice": lambda t: t[5:10],
    "another dtype": lambda t: t.view(torch.int32),
    "another shape": lambda t: t.view(2, -1),
    "its storage": lambda t: t.untyped_storage(),
    "a parameter of it": lambda t: torch.nn.Parameter(t.view(torch.float32)),
    "numpy's": lambda t: t.numpy()[3:],
    "another library's": lambda t: t.__dlpack__(),
    "its bytes": lambda t: memory_of(t)[7:],
    "a dictionary in a cycle": lambda t: (lambda d: d.setdefault("self", (d, t)))({}),
}


@pytest.mark.parametrize("what", VIEWS)
def test_memory_stays_lent_as_long_as_anybody_looks_at_it(what: str) -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(of(2 * MIB))
    fill(tensor, 7)
    address = tensor.data_ptr()
    view = VIEWS[what](tensor)
    del tensor
    assert pool.lent_bytes == 2 * MIB
    others = [pool.tensor(of(2 * MIB)) for _ in range(3)]
    assert address not in {other.data_ptr() for other in others}
    del view
    gc.collect()
    assert pool.lent_bytes == 6 * MIB
    assert pool.tensor(of(2 * MIB)).data_ptr() == address


def test_a_graph_gives_it_back_from_its_own_threads() -> None:
    pool = Pool(PLENTY)
    weight = pool.tensor(TensorMeta("float32", (1024, 1024))).fill_(1.0)
    x = torch.ones(1024, requires_grad=True)
    loss = (weight @ x).sum()
    del weight
    assert pool.lent_bytes == 4 * MIB
    loss.backward()
    assert x.grad is not None and x.grad[0] == 1024
    assert pool.lent_bytes == 0


# -- which block, and how many of them -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [(8 * MIB, 8), (7 * MIB, 8), (5 * MIB, 8), (4 * MIB, 4), (3 * MIB, 4), (9 * MIB, 16), (17 * MIB, None)],
)
def test_the_smallest_that_will_do_is_taken(wanted: int, found: int | None) -> None:
    pool = Pool(PLENTY)
    sizes = (16, 4, 8)
    addresses = dict(zip(sizes, idle(pool, *(size * MIB for size in sizes)), strict=True))
    tensor = pool.tensor(of(wanted))
    if found is None:
        assert tensor.data_ptr() not in addresses.values()
    else:
        assert tensor.data_ptr() == addresses[found]
        assert pool.lent_bytes == found * MIB


def test_nothing_is_lent_a_block_more_than_twice_its_size() -> None:
    pool = Pool(PLENTY)
    [address] = idle(pool, 8 * MIB)
    assert pool.tensor(of(4 * MIB - 4096)).data_ptr() != address
    assert pool.tensor(of(4 * MIB)).data_ptr() == address


def test_of_equals_the_last_that_came_back_is_taken() -> None:
    pool = Pool(PLENTY)
    addresses = idle(pool, 2 * MIB, 2 * MIB, 2 * MIB)
    assert pool.tensor(of(2 * MIB)).data_ptr() == addresses[-1]


def test_no_more_is_kept_than_was_allowed() -> None:
    pool = Pool(10 * MIB)
    addresses = idle(pool, 4 * MIB, 3 * MIB, 2 * MIB, 2 * MIB)
    assert pool.idle_bytes == 7 * MIB
    assert [is_mapped(address) for address in addresses] == [False, True, True, True]
    [large] = idle(pool, 11 * MIB)
    assert pool.idle_bytes == 7 * MIB  # it would have thrown all others out
    assert not is_mapped(large)


def test_a_pool_of_nothing_keeps_nothing() -> None:
    pool = Pool(0)
    [address] = idle(pool, 4 * MIB)
    assert pool.idle_bytes == 0
    assert not is_mapped(address)


def test_sizes_are_whole_pages() -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(of(POOLED_FROM + 1))
    assert pool.lent_bytes == POOLED_FROM + mmap.PAGESIZE
    assert tensor.untyped_storage().nbytes() == POOLED_FROM + 1


def test_large_memory_asks_for_huge_pages() -> None:
    with open("/sys/kernel/mm/transparent_hugepage/enabled", encoding="ascii") as f:
        if "[never]" in f.read():
            pytest.skip("there are no transparent huge pages here")
    tensor = Pool(0).tensor(of(5 * MIB))
    assert tensor.data_ptr() % HUGE_PAGE == 0
    with open("/proc/self/smaps", encoding="ascii") as f:
        smaps = f.read()
    mapping = smaps[smaps.index(f"{tensor.data_ptr():x}-") :]
    flags = mapping[mapping.index("VmFlags:") :].splitlines()[0]
    assert " hg" in flags


def test_memory_that_is_used_again_costs_no_pages() -> None:
    pool = Pool(PLENTY)
    source = memoryview(b"x" * (16 * MIB))
    for _ in range(3):
        memory_of_writable(pool.tensor(of(16 * MIB)))[:] = source
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        memory_of_writable(pool.tensor(of(16 * MIB)))[:] = source
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000  # of 81920 pages


# -- no memory -------------------------------------------------------------------------------------------


def limited(addresses: int) -> None:
    with open("/proc/self/statm", encoding="ascii") as f:
        used = int(f.read().split()[0]) * mmap.PAGESIZE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + addresses, hard))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_limit_that_is_met_is_named() -> None:
    pool = Pool(PLENTY)

    def child() -> object:
        limited(32 * MIB)
        try:
            pool.tensor(of(64 * MIB))
        except ResourceExhaustedError as e:
            return str(e), pool.lent_bytes
        return "nothing"

    said = in_forked_child(child)
    assert str(64 * MIB) in said
    assert "RLIMIT_AS is " in said
    assert said.endswith(", 0)")


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_idle_memory_is_given_up_where_there_is_no_other() -> None:
    pool = Pool(PLENTY)
    idle(pool, 24 * MIB, 24 * MIB, 24 * MIB)

    def child() -> object:
        limited(16 * MIB)
        tensor = pool.tensor(of(60 * MIB))
        return tensor.numel() // MIB, pool.idle_bytes

    assert in_forked_child(child) == "(60, 0)"


@pytest.mark.parametrize("nbytes", [1 << 50, (1 << 63) - 1])
def test_more_than_there_can_be_is_refused(nbytes: int) -> None:
    pool = Pool(PLENTY)
    with pytest.raises(ResourceExhaustedError, match=str(nbytes)):
        pool.tensor(of(nbytes))
    assert pool.lent_bytes == 0


def test_a_small_tensor_that_cannot_be_had_is_torchs_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: TensorMeta) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(room, "empty_like_meta", none_left)
    with pytest.raises(RuntimeError, match="can't allocate memory"):  # which calls of the transport translate
        Pool(PLENTY).tensor(of(100))


def test_a_dtype_that_is_not_there_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e5m2")
    pool = Pool(PLENTY)
    [address] = idle(pool, 2 * MIB)
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        pool.tensor(TensorMeta("float8_e5m2", (2 * MIB,)))
    assert (pool.lent_bytes, pool.idle_bytes) == (0, 2 * MIB)
    assert is_mapped(address)
