"""Staging between stores and devices: what the conformance kit's suite of stores does not reach."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug.net.deadline import Deadline
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob
from kvplug.transport.store.results import MissReason
from kvplug.transport.store.staging import transfers
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages
from kvplug.transport.store.staging.staging import Staging
from kvplug.transport.store.store import Store
from kvplug_testing import peers, simulated, waits
from kvplug_testing.contract.store.devices import Cache
from kvplug_testing.contract.store.pages import Batch, batch, kv_format
from kvplug_testing.memory.store import MemoryStore

pytestmark = pytest.mark.timeout(60)


# -- memory ----------------------------------------------------------------------------------------


def test_memory_goes_to_those_that_wait_in_the_order_of_coming() -> None:
    memory = PinnedMemory(4096)
    memory.prepare(torch.device("cpu"))
    first = memory.take(4096, "first")
    assert first is not None
    assert memory.take(4096, "second") is None
    assert memory.take(256, "third") is None
    memory.give_back(first)
    assert memory.take(256) is None and memory.take(256, "third") is None
    assert memory.take(4096, "second") is not None


# -- requests --------------------------------------------------------------------------------------


@pytest.fixture
def staged() -> Iterator[tuple[Store, Batch, Cache]]:
    """A store that has six pages, and a cache for them."""
    with MemoryStore(Store.Context(options=None, credentials=Credentials())) as store:
        store.staging = Staging(store)
        pages = batch(6, kv_format(3), seal=PageSeal())
        assert not any(store.submit_put(pages.filled()).wait(waits.patience_s))
        yield store, pages, Cache(pages)


def test_a_copy_that_cannot_be_queued_fails_the_load_and_those_before_it_settle_it(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages, cache = staged
    scatter = transfers.queue_scatter

    def fail_at_the_last(
        staged: tuple[Store, Batch, Cache], blocks: Any, first: int, layers: Any, *rest: Any
    ) -> None:
        scatter(staged, blocks, first, layers[:-1], *rest)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transfers, "queue_scatter", fail_at_the_last)
    with simulated.stalled():
        job = store.submit_get(pages.request(cache.blocks()))
        assert job.wait(waits.patience_s) == [MissReason.NO_MEMORY] * 6
        assert not job.wait_settled(0.2), "the device has copies of it to do"
    assert job.wait_settled(waits.patience_s)


def test_layers_that_come_while_others_are_queued_are_copied_too(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages, cache = staged
    scatter, get = transfers.queue_scatter, store._get  # noqa: SLF001 - the pieces of a request are got with it
    slow = GetJob(6, 3, Deadline.after(waits.patience_s))

    def begin(request: Any, timeout: Any) -> GetJob:
        assert get(request, timeout).wait(waits.patience_s) == [None] * 6
        slow.advance(1)
        return slow

    def end_meanwhile(*arguments: Any) -> None:
        scatter(*arguments)
        arguments[-1].synchronize()  # the stream: what is queued has run when it is looked at
        slow.set([None] * 6)

    monkeypatch.setattr(store, "_get", begin)
    monkeypatch.setattr(transfers, "queue_scatter", end_meanwhile)
    assert store.submit_get(pages.request(cache.blocks())).wait(waits.patience_s) == [None] * 6
    assert cache.missing(pages) == []


def test_a_large_load_is_not_held_up_by_small_ones_that_come_later(staged: Any) -> None:
    store, pages, cache = staged
    memory = PinnedMemory(StagedPages.nbytes_of(pages.form, 2) * 4)
    store.staging = Staging(store, memory=memory)
    others = [Cache(pages[:1]) for _ in range(40)]
    jobs = [store.submit_get(pages.request(cache.blocks()))]
    jobs += [store.submit_get(pages[:1].request(each.blocks())) for each in others]
    assert jobs[0].wait(waits.patience_s) == [None] * 6
    assert cache.missing(pages) == []
    for job in jobs[1:]:
        assert job.wait(waits.patience_s) == [None]


def test_a_request_that_comes_as_the_store_is_closed_ends_and_settles(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages, cache = staged
    most_in = StagedPages.most_in

    def close_meanwhile(*given: Any) -> int:
        store.abort()
        return most_in(*given)

    monkeypatch.setattr(StagedPages, "most_in", close_meanwhile)
    late = store.submit_get(pages.request(cache.blocks()))
    assert late.wait(waits.patience_s) == [MissReason.CLOSED] * 6
    assert late.wait_settled(waits.patience_s)


def stage_on_a_gpu(parent: peers.Parent, kernels: int) -> None:
    """In a process without the simulated device, beside which torch cannot pin memory for a GPU."""

    def keep_busy(kernels: int) -> None:
        for _ in range(kernels):
            torch.mm(large, large, out=product)

    large = torch.ones(4096, 4096, device="cuda:0")
    product = torch.empty_like(large)
    pages = batch(6, kv_format(3), seal=PageSeal())
    cache = Cache(pages, "cuda:0")
    with MemoryStore(Store.Context(options=None, credentials=Credentials())) as store:
        store.staging = Staging(store)
        for _ in range(5):
            keep_busy(kernels)
            cache.write(pages)
            put = store.submit_put(pages.request(cache.blocks()))
            cache.overwrite()
            assert put.wait(waits.patience_s) == [None] * 6
            keep_busy(kernels)
            cache.overwrite()
            got = store.submit_get(pages.request(cache.blocks()))
            assert got.wait(waits.patience_s) == [None] * 6
            assert cache.missing(pages) == []
            assert store.submit_remove(pages.keys).wait(waits.patience_s) == [True] * 6


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: staging over real streams is not tested")
@pytest.mark.parametrize("kernels", [0, 20])
def test_pages_leave_a_gpu_and_come_back_in_the_order_of_its_streams(kernels: int) -> None:
    """Earlier kernels take a while, so that what does not wait for them is wrong."""
    with peers.start(stage_on_a_gpu, kernels, timeout_s=60.0) as child:
        child.result(60.0)


class Listened(PinnedMemory):
    """Memory that knows who listens to it."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.listeners: list[Any] = []

    def listen(self, listener: Any) -> None:
        super().listen(listener)
        self.listeners.append(listener)

    def ignore(self, listener: Any) -> None:
        super().ignore(listener)
        self.listeners.remove(listener)


def test_a_load_that_is_given_up_does_not_keep_its_turn(staged: Any) -> None:
    store, pages, cache = staged
    memory = Listened(StagedPages.nbytes_of(pages.form, 2) * 4)
    store.staging = Staging(store, memory=memory)
    with simulated.stalled():  # so that memory is not given back
        first = [store.submit_get(pages.request(cache.blocks())) for _ in range(2)]
        waits.until(lambda: memory.largest() == 0, what="a load that waits for memory")
        for job in first:
            job.cancel()
    assert all(job.wait_settled(waits.patience_s) for job in first)
    waits.until(lambda: memory.largest() == memory.nbytes, what="that nobody waits for memory any more")
    assert memory.listeners
    store.abort()
    assert not memory.listeners
