"""Staging between stores and devices: what the conformance kit's suite of stores does not reach."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvplug.net.deadline import Deadline
from kvplug.net.trust.credentials import Credentials
from kvplug.transport.context import StoreContext
from kvplug.transport.store.format import PageFormat, Part
from kvplug.transport.store.header import PageSeal
from kvplug.transport.store.job import GetJob
from kvplug.transport.store.memory import PageBuffers
from kvplug.transport.store.results import MissReason
from kvplug.transport.store.staging import transfers
from kvplug.transport.store.staging.memory import PinnedMemory
from kvplug.transport.store.staging.pages import StagedPages
from kvplug.transport.store.staging.store import StagedStore
from kvplug_testing import peers, simulated, waits
from kvplug_testing.contract.store.devices import FIRST_TOKEN, Cache
from kvplug_testing.contract.store.pages import Batch, batch, kv_format
from kvplug_testing.memory.store import MemoryStore

pytestmark = pytest.mark.timeout(60)
CPU = torch.device("cpu")


# -- memory ----------------------------------------------------------------------------------------


def test_parts_that_are_given_back_are_one_again() -> None:
    memory = PinnedMemory(4096)
    memory.prepare(CPU)
    parts = [memory.take(1000) for _ in range(4)]
    assert all(part is not None and part.numel() == 1000 for part in parts)
    assert memory.take(1) is None
    for part in random.Random(1).sample(parts, 4):
        assert part is not None
        memory.give_back(part)
    assert memory.largest() == 4096


def test_memory_goes_to_those_that_wait_in_the_order_of_coming() -> None:
    memory = PinnedMemory(4096)
    memory.prepare(CPU)
    told: list[int] = []

    def listener() -> None:
        told.append(memory.largest())

    memory.listen(listener)
    first = memory.take(4096, "first")
    assert first is not None
    assert memory.take(4096, "second") is None
    assert memory.take(256, "third") is None
    memory.give_back(first)
    assert told == [0], "there is some, and it is spoken for"
    assert memory.take(256) is None
    assert memory.take(256, "third") is None
    second = memory.take(4096, "second")
    assert second is not None
    memory.forget("third")
    assert memory.take(1) is None
    assert memory.largest() == 0
    memory.ignore(listener)
    memory.give_back(second)
    assert told == [0, 0]


def test_pages_in_host_memory_are_those_in_rows_whatever_their_parts() -> None:
    parts = (
        Part(name="scale", dtype="uint8", shape=(2, 3), token_axis=0),
        Part(name="key", dtype="float16", shape=(2, 5), token_axis=0),
    )
    form = PageFormat(page_tokens=2, num_layers=3, parts=parts)
    rows = PageBuffers.empty(form, 5)
    rows.rows().buffer[:] = random.Random(1).randbytes(5 * form.nbytes)
    memory = torch.zeros(StagedPages.nbytes_of(form, 5), dtype=torch.uint8)
    staged = StagedPages(form, 5, memory)
    staged.scatter(0, rows.rows())
    for layer in range(3):
        for part, (at, nbytes) in enumerate(form.spans):
            mine = staged.part(staged.layer(layer), part, range(1, 4))
            begin = layer * form.layer_nbytes + at
            wanted = b"".join(bytes(rows.rows().row(page)[begin : begin + nbytes]) for page in (1, 2, 3))
            assert bytes(mine.tolist()) == wanted
            mine.view(getattr(torch, parts[part].dtype))  # it begins where its dtype may
    back = PageBuffers.empty(form, 2)
    columns = back.rows().columns(form.layer_nbytes, 3 * form.layer_nbytes)
    staged.gather(2, columns, range(1, 3))
    for index in range(2):
        wanted = bytes(rows.rows().row(2 + index)[form.layer_nbytes :])
        assert bytes(columns.row(index)) == wanted
    assert StagedPages.most_in(form, StagedPages.nbytes_of(form, 5)) == 5
    assert StagedPages.most_in(form, StagedPages.nbytes_of(form, 5) - 1) == 4


# -- requests --------------------------------------------------------------------------------------


@pytest.fixture
def staged() -> Iterator[tuple[StagedStore, Batch, Cache]]:
    """A store that has six pages, and a cache for them."""
    inner = MemoryStore(StoreContext(options=None, credentials=Credentials()))
    with StagedStore(inner) as store:
        pages = batch(6, kv_format(3), seal=PageSeal())
        assert not any(store.submit_put(pages.filled()).wait(waits.patience_s))
        yield store, pages, Cache(pages)


def test_a_copy_that_cannot_be_queued_fails_the_load_and_those_before_it_settle_it(
    staged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, pages, cache = staged
    scatter = transfers.queue_scatter

    def fail_at_the_last(
        staged: tuple[StagedStore, Batch, Cache], blocks: Any, first: int, layers: Any, *rest: Any
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
    scatter, get = transfers.queue_scatter, store.store.submit_get
    slow = GetJob(6, 3, Deadline.after(waits.patience_s))

    def begin(request: Any, **more: Any) -> GetJob:
        assert get(request, **more).wait(waits.patience_s) == [None] * 6
        slow.advance(1)
        return slow

    def end_meanwhile(*arguments: Any) -> None:
        scatter(*arguments)
        arguments[-1].synchronize()  # the stream: what is queued has run when it is looked at
        slow.set([None] * 6)

    monkeypatch.setattr(store.store, "submit_get", begin)
    monkeypatch.setattr(transfers, "queue_scatter", end_meanwhile)
    assert store.submit_get(pages.request(cache.blocks())).wait(waits.patience_s) == [None] * 6
    assert cache.missing(pages) == []


def test_pages_without_a_token_that_may_be_written_harm_no_others(staged: Any) -> None:
    store, pages, cache = staged
    store.submit_remove(pages.keys[1:2]).wait(waits.patience_s)
    tokens = pages.form.page_tokens
    blocks = cache.blocks(writable=range(FIRST_TOKEN + 3 * tokens, FIRST_TOKEN + 6 * tokens))
    results = store.submit_get(pages.request(blocks)).wait(waits.patience_s)
    assert [reason is None for reason in results] == [True, False, True, True, True, True]
    assert cache.missing(pages) == [0, 1, 2]


def test_a_large_load_is_not_held_up_by_small_ones_that_come_later(staged: Any) -> None:
    inner, pages, cache = staged
    memory = PinnedMemory(StagedPages.nbytes_of(pages.form, 2) * 4)
    store = StagedStore(inner, memory=memory)
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
    inner = MemoryStore(StoreContext(options=None, credentials=Credentials()))
    with StagedStore(inner) as store:
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
    inner, pages, cache = staged
    memory = Listened(StagedPages.nbytes_of(pages.form, 2) * 4)
    store = StagedStore(inner, memory=memory)
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
