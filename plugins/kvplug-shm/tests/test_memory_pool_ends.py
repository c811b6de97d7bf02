"""Receive memory and its users: threads, finalizers, forked children, and the end of the pool."""

from __future__ import annotations

import gc
import queue
import random
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shm_pool_memory as ends
from kvplug_shm.memory.pool import Pool
from kvplug_testing.waits import Call

MIB = 1 << 20
PLENTY = 256 * MIB
of, fill, holds, is_mapped = ends.of, ends.fill, ends.holds, ends.is_mapped
idle, in_forked_child = ends.idle, ends.in_forked_child


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
    shelf: queue.SimpleQueue[tuple[torch.Tensor, int] | None] = queue.SimpleQueue()
    wrong: list[int] = []

    def receive(seed: int) -> None:
        chance = random.Random(seed)
        for number in range(60):
            value = (seed * 60 + number) % 251
            tensor = pool.tensor(of(chance.choice([1, 2, 3, 5]) * MIB))
            fill(tensor, value)
            if chance.random() < 0.5:
                cycle: list[Any] = [tensor]
                cycle.append(cycle)
                shelf.put((tensor, value))
            elif not holds(tensor, value):
                wrong.append(value)

    def consume() -> None:
        kept: list[tuple[torch.Tensor, int]] = []
        while (found := shelf.get()) is not None:
            kept.append(found)
            if len(kept) > 5:
                tensor, value = kept.pop(0)
                if not holds(tensor, value):
                    wrong.append(value)

    receivers = [threading.Thread(target=receive, args=(seed,)) for seed in range(3)]
    consumer = threading.Thread(target=consume)
    for thread in (*receivers, consumer):
        thread.start()
    for thread in receivers:
        thread.join()
    shelf.put(None)
    consumer.join()
    gc.collect()
    assert wrong == []
    assert pool.lent_bytes == 0
    assert 0 < pool.idle_bytes <= 64 * MIB


def test_closing_leaves_what_is_lent_alone() -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(of(4 * MIB))
    fill(tensor, 9)
    [address] = idle(pool, 2 * MIB)
    pool.close()
    pool.close()
    assert not is_mapped(address)
    assert holds(tensor, 9)
    assert (pool.idle_bytes, pool.lent_bytes) == (0, 4 * MIB)
    address = tensor.data_ptr()
    del tensor
    assert (pool.idle_bytes, pool.lent_bytes) == (0, 0)
    assert not is_mapped(address)
    late = pool.tensor(of(2 * MIB))
    fill(late, 3)
    assert holds(late, 3)
    del late
    assert pool.idle_bytes == 0


def test_a_tensor_outlives_its_pool_and_does_not_keep_it() -> None:
    pool = Pool(PLENTY)
    tensor = pool.tensor(of(4 * MIB))
    [address] = idle(pool, 2 * MIB)
    gone = weakref.ref(pool)
    del pool
    assert gone() is None
    assert not is_mapped(address)
    fill(tensor, 5)
    assert holds(tensor, 5)
    address = tensor.data_ptr()
    del tensor
    assert not is_mapped(address)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True])
def test_a_forked_child_has_memory_of_its_own(busy: bool) -> None:
    limit = Limit(PLENTY)
    pool = Pool(limit)
    lent, another = [pool.tensor(of(2 * MIB))], [pool.tensor(of(2 * MIB))]
    fill(lent[0], 1)
    addresses = idle(pool, 4 * MIB, 4 * MIB)

    def child() -> object:
        fill(lent[0], 2)
        lent.clear()
        tensors = [pool.tensor(of(4 * MIB)) for _ in range(3)]
        for tensor in tensors:
            fill(tensor, 3)
        reused = {tensor.data_ptr() for tensor in tensors} >= set(addresses)
        del tensor
        tensors.clear()
        return reused, pool.lent_bytes, pool.idle_bytes // MIB

    taken, release = threading.Event(), threading.Event()

    def hold() -> None:
        limit.meanwhile = lambda: None
        taken.set()
        release.wait(60)

    if busy:
        limit.meanwhile = hold
        holder = Call(another.clear)
        assert taken.wait(60)
    said = in_forked_child(child)
    release.set()
    if busy:
        holder.result()
    another.clear()
    assert said == ("(True, 0, 16)" if busy else "(True, 2097152, 14)")
    assert holds(lent[0], 1)
    assert (pool.lent_bytes, pool.idle_bytes) == (2 * MIB, 10 * MIB)


AT_EXIT = """
import sys
from kvplug.net.wire.tensors import TensorMeta
from kvplug_shm.memory.pool import Pool

pool = Pool(64 << 20)
kept = [pool.tensor(TensorMeta("uint8", (2 << 20,))) for _ in range(3)]
cycle = [pool.tensor(TensorMeta("uint8", (2 << 20,)))]
cycle.append(cycle)
sys.modules["kept for ever"] = pool.tensor(TensorMeta("uint8", (2 << 20,)))
"""


@pytest.mark.full
def test_a_process_may_end_with_memory_lent() -> None:
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
