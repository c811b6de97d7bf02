"""Staging between stores and devices: what the conformance kit's suite of stores does not reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvplug.engine import BlockViews, PageBlocks
from kvplug.net.deadline import Deadline
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.store.engine import JobTask
from kvplug.transport.store.format import PageFormat
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob, Job
from kvplug.transport.store.results import MissReason, Presence, PutReason
from kvplug.transport.store.staging import transfers
from kvplug.transport.store.staging.memory import PinnedMemory, StagedPages
from kvplug.transport.store.staging.staging import Staging
from kvplug.transport.store.store import Store
from kvplug_testing import peers, simulated, waits
from kvplug_testing.contract.store.devices import Cache
from kvplug_testing.contract.store.pages import Batch, batch, kv_format
from kvplug_testing.memory.store import MemoryStore

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def staged() -> Iterator[tuple[Store, Batch, Cache]]:
    """A store that has six pages, and a cache for them."""
    with MemoryStore(Store.Context(options=None, credentials=Credentials())) as store:
        store.staging = Staging(store)
        pages = batch(6, kv_format(3), seal=PageSeal())
        assert not any(store.submit_put(pages.filled()).wait(waits.patience_s))
        yield store, pages, Cache(pages)


# -- memory ----------------------------------------------------------------------------------------


class Waiting(JobTask):
    """A task that waits for memory."""

    def __init__(self, memory: PinnedMemory, nbytes: int) -> None:
        super().__init__(Job(0, Deadline.after(None)), None)
        self.call = waits.Call(lambda: memory.take(nbytes, self))


def is_free(memory: PinnedMemory) -> bool:
    """Whether all of it can be had by a caller that does not wait."""
    part = memory.take(memory.nbytes)
    if part is not None:
        memory.give_back(part)
    return part is not None


def test_memory_goes_to_those_that_wait_in_the_order_of_coming(staged: Any) -> None:
    memory = PinnedMemory(4096)
    memory.prepare(torch.device("cpu"), staged[0].staging)
    first = memory.take(4096)
    assert first is not None
    second = Waiting(memory, 4096)
    assert second.call.is_blocked(0.1)
    third = Waiting(memory, 256)
    assert third.call.is_blocked(0.1)
    memory.give_back(first)
    taken = second.call.result()
    assert taken is not None
    assert memory.take(256) is None and third.call.is_blocked(0.05)
    memory.give_back(taken)
    assert third.call.result() is not None


def test_a_waiter_whose_job_has_ended_lets_the_next_one_have_its_turn(staged: Any) -> None:
    memory = PinnedMemory(4096)
    memory.prepare(torch.device("cpu"), staged[0].staging)
    most = memory.take(2048)
    assert most is not None
    first = Waiting(memory, 4096)
    assert first.call.is_blocked(0.1)
    second = Waiting(memory, 256)
    assert second.call.is_blocked(0.1)
    first.end(MissReason.CANCELLED)
    memory.wake()
    assert first.call.result() is None
    assert second.call.result() is not None


# -- requests --------------------------------------------------------------------------------------


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
    slow.verify_seconds = 0.5

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
    job = store.submit_get(pages.request(cache.blocks()))
    assert job.wait(waits.patience_s) == [None] * 6
    assert cache.missing(pages) == []
    assert job.verify_seconds == 0.5, "the time that the store has spent on it"


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


def whole_blocks(form: PageFormat) -> tuple[torch.Tensor, BlockViews]:
    """A cache whose blocks have the size of a page: [layers, parts, blocks, tokens, heads, size]."""
    shape = form.num_layers, 2, 60, *form.parts[0].shape
    cache = torch.rand(shape).to(torch.float16).to("simulated")
    return cache, BlockViews([[*parts] for parts in cache])


def bytes_of(cache: torch.Tensor, table: list[int]) -> bytes:
    """The bytes of the pages in these blocks."""
    return cache[:, :, table].cpu().permute(2, 0, 1, 3, 4, 5).contiguous().numpy().tobytes()


class Operations(TorchDispatchMode):
    """Counts those that copy or allocate."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in ("index_select", "copy_", "empty"):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def test_the_puts_of_a_step_take_two_operations_for_each_layer_and_allocate_nothing(staged: Any) -> None:
    store, form = staged[0], staged[1].form
    cache, views = whole_blocks(form)
    store.staging.prepare("simulated")
    for first, num_requests in ((0, 9), (20, 1), (40, 9)):
        batches = [batch(2, form, seal=store.seal) for at in range(num_requests)]
        tables = [[first + 2 * at + 1, first + 2 * at] for at in range(num_requests)]
        with simulated.stalled(), Operations() as made, store.together():
            jobs = [
                store.submit_put(pages.request(PageBlocks(form, views, table, 0, 2)))
                for pages, table in zip(batches, tables, strict=True)
            ]
        allocates = {"empty": made.counts["empty"]} if first == 0 else {}
        assert made.counts == {"index_select": 3, "copy_": 3, **allocates}
        for job, pages, table in zip(jobs, batches, tables, strict=True):
            assert job.wait(waits.patience_s) == [None, None]
            request = pages.empty()
            assert store.submit_get(request).wait(waits.patience_s) == [None, None]
            assert bytes(request.memory.rows().buffer) == bytes_of(cache, table)


def test_pages_of_several_caches_are_not_mixed_up(staged: Any) -> None:
    store, form = staged[0], staged[1].form
    given = [(batch(2, form, seal=store.seal), *whole_blocks(form)) for _ in range(3)]
    with store.together():
        jobs = [
            store.submit_put(pages.request(PageBlocks(form, views, [3, 1], 0, 2)))
            for pages, _, views in given
        ]
    for job, (pages, cache, _) in zip(jobs, given, strict=True):
        assert job.wait(waits.patience_s) == [None, None]
        request = pages.empty()
        assert store.submit_get(request).wait(waits.patience_s) == [None, None]
        assert bytes(request.memory.rows().buffer) == bytes_of(cache, [3, 1])


@pytest.mark.parametrize("most", [6, 4, 1])
def test_requests_that_share_memory_keep_their_pages_apart(staged: Any, most: int) -> None:
    store, form = staged[0], staged[1].form
    memory = PinnedMemory(StagedPages.nbytes_of(form, most) * 4)
    store.staging = Staging(store, memory=memory)
    every = [batch(count, form, seal=store.seal) for count in (1, 4, 3, 5)]
    caches = [Cache(pages) for pages in every]
    with store.together():
        jobs = []
        for pages, cache in zip(every, caches, strict=True):
            cache.write(pages)
            jobs.append(store.submit_put(pages.request(cache.blocks())))
        jobs[2].cancel()
    for job, pages in zip(jobs, every, strict=True):
        is_kept = job is not jobs[2]
        assert job.wait(waits.patience_s) == [None if is_kept else PutReason.CANCELLED] * len(pages)
        assert job.wait_settled(waits.patience_s)
        request = pages.empty()
        got = store.submit_get(request).wait(waits.patience_s)
        assert got == [None if is_kept else MissReason.ABSENT] * len(pages)
        assert not pages.unlike(request, got)
    waits.until(lambda: is_free(memory), what="that all memory was given back")


def test_memory_that_is_taken_back_while_the_device_does_nothing_gives_up_what_waits(staged: Any) -> None:
    store, form = staged[0], staged[1].form
    memory = PinnedMemory(StagedPages.nbytes_of(form, 4))
    store.staging = Staging(store, memory=memory)
    pages = batch(6, form, seal=store.seal)
    cache = Cache(pages)
    with simulated.stalled():
        cache.write(pages)
        job = store.submit_put(pages.request(cache.blocks()))
        assert job.take_back(0)
        cache.overwrite()
    assert job.wait(waits.patience_s) == [*[None] * 4, *[PutReason.CANCELLED] * 2]
    assert job.wait_settled(waits.patience_s)
    request = pages.empty()
    got = store.submit_get(request).wait(waits.patience_s)
    assert got == [*[None] * 4, *[MissReason.ABSENT] * 2]
    assert not pages.unlike(request, got)
    assert job.take_back(0), "it has settled"
    waits.until(lambda: is_free(memory), what="that all memory was given back")


def test_copies_that_cannot_be_queued_fail_the_puts_that_share_them(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages, _ = staged
    gather = transfers.queue_gather

    def fail_at_the_end(*arguments: Any) -> None:
        gather(*arguments)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(transfers, "queue_gather", fail_at_the_end)
    more = batch(2, pages.form, seal=store.seal)
    with simulated.stalled():
        with store.together():
            jobs = [store.submit_put(each.request(Cache(each).blocks())) for each in (pages, more)]
        for job in jobs:
            assert job.wait(waits.patience_s) == [PutReason.NO_MEMORY] * job.count
            assert not job.wait_settled(0.1), "the device has copies of it to do"
    assert all(job.wait_settled(waits.patience_s) for job in jobs)
    monkeypatch.undo()
    assert not any(store.submit_put(more.request(Cache(more).blocks())).wait(waits.patience_s))


def test_a_device_that_fails_ends_the_puts_and_no_page_is_kept_that_was_not_copied(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the copies' end can be marked, and the step begins before the job has ended."""
    store, form = staged[0], staged[1].form
    pages = batch(2, form, seal=store.seal)
    store.staging.prepare("simulated")
    end = transfers.Put.end

    def end_late(put: Any, reason: Any) -> bool:
        store.staging._add(store.staging._puts, put)  # noqa: SLF001 - as if an idle thread had been faster
        waits.until(lambda: put.is_over or put._num_read == 1)  # noqa: SLF001
        return end(put, reason)

    def fail(*_: Any) -> Any:
        raise RuntimeError("the device failed")

    monkeypatch.setattr(transfers, "queue_gather", fail)
    monkeypatch.setattr(transfers.Lane, "mark", fail)
    monkeypatch.setattr(transfers.Put, "end", end_late)
    job = store.submit_put(pages.request(Cache(pages).blocks()))
    assert job.wait(waits.patience_s) == [PutReason.OTHER] * 2
    assert job.wait_settled(waits.patience_s)
    monkeypatch.undo()
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 2


@pytest.mark.parametrize("submit", [Store.submit_get, Store.submit_put])
def test_a_request_that_comes_as_the_store_is_closed_ends_and_settles(
    staged: Any, submit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages, cache = staged
    most_in = StagedPages.most_in

    def close_meanwhile(*given: Any) -> int:
        store.abort()
        return most_in(*given)

    monkeypatch.setattr(StagedPages, "most_in", close_meanwhile)
    late = submit(store, pages.request(cache.blocks()))
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


def test_a_load_that_is_given_up_does_not_keep_its_turn(staged: Any) -> None:
    store, pages, cache = staged
    memory = PinnedMemory(StagedPages.nbytes_of(pages.form, 2) * 4)
    with MemoryStore(Store.Context(options=None, credentials=Credentials())) as other:
        assert not any(other.submit_put(pages.filled()).wait(waits.patience_s))
        for each in (store, other):
            each.staging = Staging(each, memory=memory)
        with simulated.stalled():  # so that memory is not given back
            jobs = [store.submit_get(pages.request(cache.blocks())) for _ in range(2)]
            waits.until(lambda: not is_free(memory), what="that the memory is in use")
            jobs.append(other.submit_get(pages.request(Cache(pages).blocks())))
            for job in jobs:
                job.cancel()
        assert all(job.wait_settled(waits.patience_s) for job in jobs)
        waits.until(lambda: is_free(memory), what="that all memory was given back")
