"""Receive memory that is used again: never under a tensor that is still somewhere, and not without bound."""

from __future__ import annotations

import gc
import mmap
import queue
import random
import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvplug import ResourceExhaustedError
from kvplug.net.wire.tensors import TensorMeta, memory_of, memory_of_writable
from kvplug_shm.memory.pool import POOLED_FROM, Pool
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.waits import Call

MIB = 1 << 20
PLENTY = 256 * MIB


def of(nbytes: int) -> TensorMeta:
    return TensorMeta("uint8", (nbytes,))


def fill(tensor: torch.Tensor, value: int) -> None:
    memory = memory_of_writable(tensor)
    memory[:] = bytes([value]) * memory.nbytes


def holds(tensor: torch.Tensor, value: int) -> bool:
    memory = memory_of(tensor)
    return bytes(memory[:100]) == bytes([value]) * 100 and memory[-1] == value


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps", encoding="ascii") as f:
        spans = (line.split(" ", 1)[0].split("-") for line in f)
        return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def idle(pool: Pool, *sizes: int) -> list[int]:
    """Have blocks of these sizes come back, in this order; their addresses."""
    tensors = [pool.tensor(of(size)) for size in sizes]
    addresses = [tensor.data_ptr() for tensor in tensors]
    while tensors:
        del tensors[0]
    return addresses


# -- what is lent ----------------------------------------------------------------------------------------


def test_memory_goes_back_and_is_lent_again_in_whole_pages() -> None:
    pool = Pool(PLENTY)
    tensor, other = (pool.tensor(of(POOLED_FROM + 1)) for _ in range(2))
    address, nbytes = tensor.data_ptr(), POOLED_FROM + mmap.PAGESIZE
    assert tensor.untyped_storage().nbytes() == POOLED_FROM + 1
    assert other.data_ptr() != address
    assert (pool.lent_bytes, pool.idle_bytes) == (2 * nbytes, 0)
    del tensor
    assert (pool.lent_bytes, pool.idle_bytes) == (nbytes, nbytes)
    again = pool.tensor(TensorMeta("float64", (POOLED_FROM // 16, 2)))
    assert again.data_ptr() == address
    assert pool.idle_bytes == 0


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a slice": lambda t: t[5:10],
    "its storage": lambda t: t.untyped_storage(),
    "a parameter of it": lambda t: torch.nn.Parameter(t.view(torch.float32)),
    "numpy's": lambda t: t.numpy()[3:],
    "another library's": lambda t: t.__dlpack__(),
    "its bytes": lambda t: memory_of(t)[7:],
    "a dictionary in a cycle": lambda t: (lambda d: d.setdefault("self", (d, t)))({}),
}


@pytest.mark.parametrize("what", VIEWS)
def test_memory_stays_lent_as_long_as_anything_refers_to_it(what: str) -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(of(2 * MIB))
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


# -- which block, and how many of them -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (8 * MIB, 8),
        (5 * MIB, 8),
        (17 * MIB, None),
        (2 * MIB, 4),
        (2 * MIB - 4096, None),  # none has at most twice its size
    ],
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


def test_no_more_is_kept_than_was_allowed() -> None:
    pool = Pool(10 * MIB)
    addresses = idle(pool, 4 * MIB, 3 * MIB, 2 * MIB, 2 * MIB)
    assert pool.idle_bytes == 7 * MIB
    assert [is_mapped(address) for address in addresses] == [False, True, True, True]
    [large] = idle(pool, 11 * MIB)
    assert pool.idle_bytes == 7 * MIB  # it would have thrown all others out
    assert not is_mapped(large)


# -- no memory -------------------------------------------------------------------------------------------


def limited(addresses: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + addresses, hard))


def test_idle_memory_is_given_up_where_there_is_no_other_and_a_limit_that_is_met_is_named() -> None:
    pool = Pool(PLENTY)
    idle(pool, 24 * MIB, 24 * MIB, 24 * MIB)

    def child() -> str:
        limited(16 * MIB)
        tensor = pool.tensor(of(60 * MIB))
        assert (tensor.numel(), pool.idle_bytes) == (60 * MIB, 0)
        try:
            pool.tensor(of(64 * MIB))
        except ResourceExhaustedError as e:
            return f"{e}, {pool.lent_bytes // MIB}"
        return "nothing"

    said = in_forked_child(child)
    assert str(64 * MIB) in said
    assert "RLIMIT_AS is " in said and said.endswith(", 60")


# -- threads, finalizers, forked children, and the end of the pool ---------------------------------------


class Limit(int):
    """The most bytes of a pool. When the pool compares it, within its work, ``meanwhile`` is called."""

    meanwhile: Callable[[], object] = staticmethod(lambda: None)

    def __lt__(self, other: int) -> bool:
        self.meanwhile()
        return int(self) < other


def test_memory_that_is_dropped_amid_the_pools_own_work_is_not_forgotten() -> None:
    """As by a collector that runs there. No call waits for its own thread, and no later call is needed."""
    limit = Limit(2 * MIB)
    pool = Pool(limit)
    first, late = [pool.tensor(of(2 * MIB))], [pool.tensor(of(4 * MIB))]
    address = late[0].data_ptr()
    limit.meanwhile = late.clear
    Call(first.clear).result()
    assert not is_mapped(address)
    assert (pool.lent_bytes, pool.idle_bytes) == (0, 2 * MIB)


def test_memory_may_be_dropped_in_any_thread() -> None:
    pool = Pool(64 * MIB)
    received: queue.SimpleQueue[tuple[torch.Tensor, int] | None] = queue.SimpleQueue()

    def receive(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(30):
            tensor = pool.tensor(of(chance.choice([1, 2, 3, 5]) * MIB))
            fill(tensor, seed * 30 + number)
            cycle: list[Any] = [tensor]
            cycle.append(cycle)
            received.put((tensor, seed * 30 + number))

    def consume() -> None:
        kept: list[tuple[torch.Tensor, int]] = []
        while (found := received.get()) is not None:
            kept.append(found)
            if len(kept) > 5:
                assert holds(*kept.pop(0))

    consumer, *receivers = [Call(consume), *(Call(lambda seed=seed: receive(seed)) for seed in range(3))]
    for each in receivers:
        each.result()
    received.put(None)
    consumer.result()
    gc.collect()
    assert pool.lent_bytes == 0
    assert 0 < pool.idle_bytes <= 64 * MIB


def test_a_forked_child_has_memory_of_its_own_though_a_thread_of_the_parent_holds_the_lock() -> None:
    limit, taken, release = Limit(PLENTY), threading.Event(), threading.Event()
    pool = Pool(limit)
    lent, another = [pool.tensor(of(2 * MIB))], [pool.tensor(of(2 * MIB))]
    fill(lent[0], 1)

    def child() -> str:
        fill(lent[0], 2)
        lent.clear()
        tensor = pool.tensor(of(4 * MIB))
        fill(tensor, 3)
        del tensor
        return f"{pool.lent_bytes // MIB}, {pool.idle_bytes // MIB}"

    def hold() -> None:
        limit.meanwhile = lambda: None
        taken.set()
        release.wait(60)

    limit.meanwhile = hold
    holder = Call(another.clear)
    assert taken.wait(60)
    said = in_forked_child(child)
    release.set()
    holder.result()
    assert said == "0, 8"
    assert holds(lent[0], 1)
