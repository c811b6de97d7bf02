"""Pages that a device copies straight into the store's memory."""

from __future__ import annotations

import gc
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvplug
from kvplug import ClosedError
from kvplug.engine import BlockViews, PageBlocks
from kvplug.kit import (
    LinkSettings,
    Part,
    PinnedMemory,
    ResolvedConfig,
    StagedPages,
    Staging,
    StoreServer,
)
from kvplug.transport import (
    Credentials,
    Job,
    JobEngine,
    MissReason,
    PageCopy,
    PageFormat,
    PageRequest,
    Presence,
    PutReason,
    Store,
)
from kvplug.transport.store.staging import staging, transfers
from kvplug.transport.store.staging.staging import MAX_BYTES
from kvplug_host.arena.pinned import PinnedSegments
from kvplug_host.options import HostOptions
from kvplug_host.store import HostStore
from kvplug_testing import peers, simulated, waits
from kvplug_testing.contract.store.pages import Batch, batch, kv_format
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.memory.store import MemoryStore
from kvplug_testing.simulated import registered as registered_memory
from kvplug_testing.simulated.registered import registered

pytestmark = pytest.mark.timeout(60)

FORM = kv_format(3)
LAYERS = FORM.num_layers


class Paged:
    """A paged cache on the device, and pages in it."""

    def __init__(
        self,
        form: PageFormat = FORM,
        *,
        block_tokens: int = 4,
        is_apart: bool = False,
        device: str = "simulated",
    ) -> None:
        if device == "simulated":
            simulated.enable()
        self.form = form
        self.per_page = form.page_tokens // block_tokens
        shape = LAYERS, 2, 64 * self.per_page, block_tokens, *form.parts[0].shape[1:]
        cache = torch.rand(shape, generator=torch.Generator().manual_seed(7)).half()
        self.on_host = cache
        parts = [[each.clone() if is_apart else each for each in layer] for layer in cache.to(device)]
        self.views = BlockViews(parts)

    def table(self, pages: Sequence[int]) -> list[int]:
        """The blocks of pages, the last block of each first."""
        return [page * self.per_page + at for page in pages for at in range(self.per_page)[::-1]]

    def request(self, pages: Batch, places: Sequence[int]) -> PageRequest:
        return pages.request(PageBlocks(self.form, self.views, self.table(places), 0, len(pages)))

    def bytes_of(self, places: Sequence[int]) -> bytes:
        blocks = self.on_host[:, :, self.table(places)].unflatten(2, (len(places), self.per_page))
        return blocks.movedim(2, 0).contiguous().numpy().tobytes()


class Operations(TorchDispatchMode):
    """Counts those that copy or allocate, and fails at one of them."""

    def __init__(self, fail_at: int = 1 << 30, *, are_pinned: bool = True) -> None:
        """``are_pinned``: whether all copies to the host must go to memory that is registered."""
        super().__init__()
        self.are_pinned = are_pinned
        self.counts = Counter[str]()
        self._left = fail_at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).split(".")[1]
        if name in ("index", "index_select", "copy_", "empty", "zero_"):
            self.counts[name] += 1
            self._left -= 1
            if self._left == -1:
                raise torch.OutOfMemoryError("CUDA out of memory")
        if name == "copy_" and args[0].device.type == "cpu" and self.are_pinned:
            begin = args[0].data_ptr()
            within = [at for at, nbytes in registered.items() if at <= begin < at + nbytes]
            assert within, "the device copies into memory that is not pinned"
            assert begin + args[0].numel() <= within[0] + registered[within[0]], "one copy into two segments"
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def no_memory_stays_pinned() -> Iterator[None]:
    yield
    gc.collect()  # an error keeps what its traceback refers to
    waits.until(lambda: not registered, what="that no memory is pinned")


@pytest.fixture
def opened() -> Iterator[Callable[..., HostStore]]:
    """Opens stores whose segments are pinned, beside staging memory that is all in use."""
    stores: list[Store] = []

    def open_store(
        num_pages: int = 24, *, segment_bytes: int = 1 << 16, size: int = 1 << 18, is_pinned: bool = True
    ) -> HostStore:
        options = HostOptions(size=size, segment_bytes=segment_bytes)
        store = HostStore(Store.Context(options=options, credentials=Credentials()))
        stores.append(store)
        memory = PinnedMemory(StagedPages.nbytes_of(FORM, 32) * 4)
        store.staging = Staging(store, memory=memory)
        simulated.enable()
        store.staging.prepare("simulated")
        if is_pinned:
            pin(store, num_pages)
            assert memory.take(memory.nbytes) is not None
        return store

    yield open_store
    for store in stores:
        store.abort()
    stores.clear()


def pin(store: Store, count: int, paged: Paged | None = None) -> int:
    """Wait until the store reserves pinned memory for so many pages. Returns the pitch."""
    pages, found = batch(count, FORM, seal=store.seal), list[int]()
    request = (paged or Paged()).request(pages, range(count))

    def is_pinned() -> bool:
        memory = store._reserve(request, range(count))  # noqa: SLF001 - what staging asks
        if memory is None:
            return False
        found[:] = [memory.pitch]
        store.free(memory)
        return len(memory) == count

    waits.until(is_pinned, what="that the memory is pinned")
    return found[0]


def kept(store: Store, pages: Batch) -> bytes:
    request = pages.empty()
    assert store.submit_get(request).wait(waits.patience_s) == [None] * len(pages)
    return bytes(request.memory.rows().buffer)  # type: ignore[union-attr]


# -- what a step costs -----------------------------------------------------------------------------


def test_the_puts_of_a_step_take_an_operation_for_each_layer_and_run_of_slots_and_copy_nothing_twice(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(*_: Any) -> Any:
        raise AssertionError("the processor copies pages")

    store, paged = opened(), Paged()
    monkeypatch.setattr(PageCopy, "save", save)
    for number, num_requests in enumerate((1, 9, 1, 9)):
        batches = [batch(2, FORM, seal=store.seal) for _ in range(num_requests)]
        places = [[2 * at + 1, 2 * at] for at in range(num_requests)]
        with simulated.stalled(), Operations() as made, store.together():
            jobs = [
                store.submit_put(paged.request(pages, where))
                for pages, where in zip(batches, places, strict=True)
            ]
        first = {} if number else {"empty": 1, "zero_": 1}
        assert made.counts == {"index_select": LAYERS, "copy_": 1, **first}
        for job, pages, where in zip(jobs, batches, places, strict=True):
            assert job.wait(waits.patience_s) == [None, None]
            assert job.wait_settled(waits.patience_s)
            assert kept(store, pages) == paged.bytes_of(where)
        store.submit_remove(None)


def test_slots_that_are_not_adjacent_are_written_one_by_one(opened: Any) -> None:
    store, paged = opened(), Paged()
    pages, more = batch(8, FORM, seal=store.seal), batch(4, FORM, seal=store.seal)
    assert not any(store.submit_put(paged.request(pages, range(8))).wait(waits.patience_s))
    store.submit_remove([pages.keys[at] for at in (0, 1, 4, 6)]).wait(waits.patience_s)
    with Operations() as made:
        job = store.submit_put(paged.request(more, [9, 3, 5, 2]))
    assert job.wait(waits.patience_s) == [None] * 4
    assert made.counts == {"index_select": LAYERS, "copy_": 3}
    assert kept(store, more) == paged.bytes_of([9, 3, 5, 2])
    assert kept(store, pages[[2, 3, 5, 7]]) == paged.bytes_of([2, 3, 5, 7])


def test_no_copy_reaches_over_a_segment(opened: Any) -> None:
    """Slots at the end of a segment and at the beginning of the next one are adjacent, too."""
    pitch = pin(opened(1), 1)
    nbytes = pitch * 4096
    store, paged = opened(64, segment_bytes=nbytes // 128, size=nbytes), Paged()
    pages = batch(48, FORM, seal=store.seal)
    with Operations() as made:
        job = store.submit_put(paged.request(pages, range(48)))
    assert job.wait(waits.patience_s) == [None] * 48
    assert made.counts["copy_"] == 3, "32 slots, and 16 beside those of the piece before"
    assert kept(store, pages) == paged.bytes_of(range(48))


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("block_tokens", [4, 2])
def test_caches_of_other_shapes_are_read_rightly(opened: Any, block_tokens: int, is_apart: bool) -> None:
    store, paged = opened(), Paged(block_tokens=block_tokens, is_apart=is_apart)
    every = [batch(count, FORM, seal=store.seal) for count in (3, 1, 4)]
    places = [[5, 2, 9], [0], [11, 13, 12, 1]]
    with Operations() as made, store.together():
        jobs = [store.submit_put(paged.request(*each)) for each in zip(every, places, strict=True)]
    gathers = made.counts["index_select"] + made.counts["index"]
    assert gathers == LAYERS * (2 if is_apart else 1)
    for job, pages, where in zip(jobs, every, places, strict=True):
        assert not any(job.wait(waits.patience_s))
        assert kept(store, pages) == paged.bytes_of(where)


def test_pages_of_two_caches_are_not_mixed_up(opened: Any) -> None:
    store = opened()
    given = [(batch(2, FORM, seal=store.seal), Paged()) for _ in range(3)]
    for _, paged in given:
        for view in (view for layer in paged.views for view in layer):
            view.mul_(id(paged) % 7 + 1)
        paged.on_host = torch.stack([torch.stack([view.cpu() for view in layer]) for layer in paged.views])
    with store.together():
        jobs = [store.submit_put(paged.request(pages, [3, 1])) for pages, paged in given]
    for job, (pages, paged) in zip(jobs, given, strict=True):
        assert job.wait(waits.patience_s) == [None, None]
        assert kept(store, pages) == paged.bytes_of([3, 1])


# -- where there is no such memory -----------------------------------------------------------------


def staged(store: Store, paged: Paged, pages: Batch) -> int:
    """Put pages. Returns how many the processor has copied."""
    copied = []
    with pytest.MonkeyPatch.context() as patch:
        save = PageCopy.save
        patch.setattr(PageCopy, "save", lambda copy, run: copied.extend(run) or save(copy, run))
        job = store.submit_put(paged.request(pages, range(len(pages))))
        assert job.wait(waits.patience_s) == [None] * len(pages)
        assert job.wait_settled(waits.patience_s)
    assert kept(store, pages) == paged.bytes_of(range(len(pages)))
    return len(copied)


def test_pages_are_staged_until_their_memory_is_pinned(opened: Any) -> None:
    store = opened(is_pinned=False)
    assert staged(store, Paged(), batch(6, FORM, seal=store.seal)) == 6
    pin(store, 12)
    assert staged(store, Paged(), batch(6, FORM, seal=store.seal)) == 0


def test_pages_are_staged_where_no_memory_can_be_pinned(
    opened: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refused = []

    def refuse(*given: int) -> int:
        refused.append(given)
        return 2

    monkeypatch.setattr("kvplug_testing.simulated.registered.cudaHostRegister", refuse)
    store = opened(is_pinned=False)
    for _ in range(4):
        assert staged(store, Paged(), batch(6, FORM, seal=store.seal)) == 6
        waits.until(lambda: caplog.records)
    assert len(refused) == len(caplog.records) == 1
    assert "pages on simulated:0 are staged" in caplog.text


def test_pages_are_staged_where_the_device_lacks_memory_to_order_them(opened: Any) -> None:
    store, paged = opened(is_pinned=False), Paged()
    pin(store, 12)
    pages = batch(6, FORM, seal=store.seal)
    with Operations(fail_at=0, are_pinned=False):
        job = store.submit_put(paged.request(pages, range(6)))
    assert job.wait(waits.patience_s) == [None] * 6
    assert kept(store, pages) == paged.bytes_of(range(6))
    assert staged(store, paged, batch(6, FORM, seal=store.seal)) == 6


def test_gets_are_served_while_memory_is_pinned(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver takes long for each of four segments, and the store has two threads."""
    register, go = registered_memory.cudaHostRegister, threading.Event()

    def register_late(*given: int) -> int:
        go.wait(waits.patience_s)
        return register(*given)

    monkeypatch.setattr(registered_memory, "cudaHostRegister", register_late)
    store = opened(is_pinned=False, segment_bytes=1 << 14, size=1 << 16)
    pages, more = batch(4, FORM, seal=store.seal), batch(48, FORM, seal=store.seal)
    assert store.submit_put(pages.filled()).wait(waits.patience_s) == [None] * 4
    try:
        assert store._reserve(Paged().request(more, range(48)), range(48)) is None  # noqa: SLF001
        job = store.submit_get(request := pages.empty())
        assert job.wait(waits.patience_s / 2) == [None] * 4
        assert bytes(request.memory.rows().buffer) == b"".join(pages.contents)
    finally:
        go.set()
    pin(store, 48)


@pytest.mark.parametrize("num_heads", [1, 4])
def test_pages_in_views_that_do_not_fit_their_format_are_not_kept(opened: Any, num_heads: int) -> None:
    store, paged = opened(), Paged()
    shape = *paged.on_host.shape[:4], num_heads, paged.on_host.shape[5]
    paged.views = BlockViews([[*layer] for layer in torch.rand(shape).half().to("simulated")])
    pages = batch(4, FORM, seal=store.seal)
    job = store.submit_put(paged.request(pages, range(4)))
    assert job.wait(waits.patience_s) == [PutReason.OTHER] * 4
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 4


def test_declared_pages_of_a_put_that_the_device_refuses_are_not_awaited(opened: Any) -> None:
    store, paged = opened(), Paged()
    pages = batch(4, FORM, seal=store.seal)
    store.declare(pages.series, pages.keys)
    with simulated.stalled():
        paged.views[0][0].neg_()  # the put has to wait for it
        with simulated.failing(0):
            job = store.submit_put(paged.request(pages, range(4)))
        assert job.wait(waits.patience_s) == [PutReason.OTHER] * 4
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 4


def test_pages_that_the_store_has_evict_nothing(opened: Any) -> None:
    store, paged = opened(is_pinned=False), Paged()
    pages = batch(6, FORM, seal=store.seal)
    staged(store, paged, pages)
    pin(store, 12)
    before = store.usage()
    assert store.submit_put(paged.request(pages, range(6))).wait(waits.patience_s) == [None] * 6
    assert store.usage() == before


def test_what_finds_no_room_in_the_store_is_not_kept_and_the_rest_is(opened: Any) -> None:
    store, paged = opened(8, segment_bytes=4096 * 4, size=4096 * 4), Paged()
    room = 0
    while (memory := store.allocate(batch(1, FORM, seal=store.seal).series, room + 1)) is not None:
        room += 1
        store.free(memory)
    assert 8 <= room < 40
    pages = batch(room + 4, FORM, seal=store.seal)
    with simulated.stalled():
        job = store.submit_put(paged.request(pages, range(room + 4)), timeout=0.5)
        assert store.usage().used_bytes <= store.usage().budget_bytes
    results = job.wait(waits.patience_s)
    assert results[:room] == [None] * room and all(results[room:])
    assert kept(store, pages[:room]) == paged.bytes_of(range(room))


# -- puts that end early ---------------------------------------------------------------------------


def end(how: str, store: Store, job: Job[Any], pages: Batch) -> None:
    if how == "cancelled":
        job.cancel()
    elif how == "removed":
        store.submit_remove(pages.keys).wait(waits.patience_s)
    elif how == "cleared":
        store.submit_remove(None).wait(waits.patience_s)
    assert set(job.wait(waits.patience_s)) <= {PutReason.CANCELLED, PutReason.TIMEOUT}


@pytest.mark.parametrize("how", ["cancelled", "removed", "cleared", "late"])
def test_slots_are_not_used_again_while_the_device_writes_them(opened: Any, how: str) -> None:
    store, paged = opened(), Paged()
    pages, others = batch(6, FORM, seal=store.seal), batch(6, FORM, seal=store.seal)
    with simulated.stalled():
        job = store.submit_put(paged.request(pages, range(6)), timeout=0.3 if how == "late" else 30)
        taken = store.usage().used_bytes
        end(how, store, job, pages)
        assert not job.settled
        assert store.usage().used_bytes == taken
        assert store.submit_put(others.filled()).wait(waits.patience_s) == [None] * 6
    assert job.wait_settled(waits.patience_s)
    assert kept(store, others) == b"".join(others.contents)
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 6
    waits.until(lambda: store.usage().used_bytes == taken, what="that the slots are free")


@pytest.mark.parametrize("how", ["cancelled", "removed", "cleared", "taken back"])
def test_slots_of_pages_whose_copies_were_not_queued_are_free_at_once(opened: Any, how: str) -> None:
    store, paged = opened(), Paged()
    pages = batch(6, FORM, seal=store.seal)
    with simulated.stalled(), Operations() as made, store.together():
        job = store.submit_put(paged.request(pages, range(6)))
        assert store.usage().used_bytes
        if how == "taken back":
            assert job.take_back(0)
        end(how, store, job, pages)
        assert job.wait_settled(waits.patience_s)
        assert not store.usage().used_bytes
    assert not made.counts["index_select"]


@pytest.mark.parametrize("fail_at", range(LAYERS + 1))
def test_pages_whose_copies_failed_are_not_kept_and_their_slots_are_free_again(
    opened: Any, fail_at: int
) -> None:
    store, paged = opened(), Paged()
    first = batch(1, FORM, seal=store.seal)
    assert store.submit_put(paged.request(first, [0])).wait(waits.patience_s) == [None]
    before = store.usage()
    pages, others = batch(6, FORM, seal=store.seal), batch(6, FORM, seal=store.seal)
    with simulated.stalled():
        with Operations(fail_at):
            job = store.submit_put(paged.request(pages, range(6)))
        assert job.wait(waits.patience_s) == [PutReason.NO_MEMORY] * 6
        assert not job.settled, "the device may have copies to do"
        assert store.submit_put(others.filled()).wait(waits.patience_s) == [None] * 6
    assert job.wait_settled(waits.patience_s)
    assert kept(store, others) == b"".join(others.contents)
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 6
    store.submit_remove(others.keys)
    waits.until(lambda: store.usage() == before, what="that the slots are free")
    assert store.submit_put(paged.request(pages, range(6))).wait(waits.patience_s) == [None] * 6
    assert kept(store, pages) == paged.bytes_of(range(6))


def test_slots_whose_last_copy_has_no_known_end_are_never_used_again(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, marks = simulated.Event.record, list[simulated.Event]()

    def fail(event: simulated.Event, stream: simulated.Stream | None = None) -> None:
        marks.append(event)
        if len(marks) > 1:  # the first one is before the copies
            raise RuntimeError("the device failed")
        record(event, stream)

    store, paged = opened(), Paged()
    pages, others = batch(6, FORM, seal=store.seal), batch(6, FORM, seal=store.seal)
    stream = next(iter(store.staging._lanes.values())).stream  # noqa: SLF001 - runs late, without a mark
    with simulated.stalled():
        with monkeypatch.context() as patch:
            patch.setattr(simulated.Event, "record", fail)
            job = store.submit_put(paged.request(pages, range(6)))
        assert job.wait(waits.patience_s) == [PutReason.OTHER] * 6
        assert job.wait_settled(waits.patience_s)
        assert store.submit_put(others.filled()).wait(waits.patience_s) == [None] * 6
    stream.synchronize()
    assert kept(store, others) == b"".join(others.contents)
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 6
    assert len(marks) > 1
    registered.clear()  # what may be written stays pinned until the process ends


def test_an_interrupt_while_copies_are_queued_ends_the_put_and_its_slots_are_free_again(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, paged = opened(), Paged()
    pages, others = batch(6, FORM, seal=store.seal), batch(6, FORM, seal=store.seal)
    gather = transfers.queue_gather_rows

    def interrupt(*arguments: Any) -> None:
        gather(*arguments)
        raise KeyboardInterrupt

    with simulated.stalled():
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), store.together():
            patch.setattr(transfers, "queue_gather_rows", interrupt)
            job = store.submit_put(paged.request(pages, range(6)))
        assert store.submit_put(others.filled()).wait(waits.patience_s) == [None] * 6
        assert not job.settled
    assert job.wait(waits.patience_s) == [PutReason.OTHER] * 6
    assert job.wait_settled(waits.patience_s)
    assert kept(store, others) == b"".join(others.contents)
    store.submit_remove(others.keys)
    waits.until(lambda: not store.usage().used_bytes, what="that the slots are free")
    assert store.submit_put(paged.request(pages, range(6))).wait(waits.patience_s) == [None] * 6


@pytest.mark.parametrize(("owner", "name"), [(JobEngine, "begin"), (PinnedSegments, "has")])
def test_an_interrupt_before_a_put_has_begun_gives_its_slots_back(
    opened: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    store, paged = opened(), Paged()
    pages = batch(6, FORM, seal=store.seal)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, name, interrupt)
        store.submit_put(paged.request(pages, range(6)))
    gc.collect()
    assert not store.usage().used_bytes
    assert store.submit_put(paged.request(pages, range(6))).wait(waits.patience_s) == [None] * 6


@pytest.mark.parametrize("method", ["copies_queued", "has_steps"])
def test_an_interrupt_after_copies_were_queued_frees_no_slot_that_the_device_writes(
    opened: Any, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    store, paged = opened(), Paged()
    pages, others = batch(6, FORM, seal=store.seal), batch(6, FORM, seal=store.seal)
    with simulated.stalled():
        with pytest.raises(KeyboardInterrupt):
            monkeypatch.setattr(transfers.Put, method, interrupt)
            store.submit_put(paged.request(pages, range(6)))
        taken = store.usage().used_bytes
        assert store.submit_put(others.filled()).wait(waits.patience_s) == [None] * 6
    simulated.streams.synchronize()
    assert kept(store, others) == b"".join(others.contents)
    if method == "has_steps":  # the end of the copies is known
        waits.until(lambda: store.usage().used_bytes == taken, what="that the slots are free")
    registered.clear()  # what may be written stays pinned until the process ends


def test_a_put_whose_caller_was_interrupted_keeps_nothing_that_is_written_into_its_blocks_later(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    store, paged = opened(), Paged()
    pages, others = batch(6, FORM, seal=store.seal), batch(6, FORM, seal=store.seal)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(staging, "stage_together", interrupt)
        store.submit_put(paged.request(pages, range(6)))  # it returns no job to wait for
    for view in (view for layer in paged.views for view in layer):
        view.neg_()
    assert store.submit_put(paged.request(others, range(6, 12))).wait(waits.patience_s) == [None] * 6
    assert store.submit_lookup(pages.keys).wait(waits.patience_s) == [Presence.ABSENT] * 6


@pytest.mark.parametrize("how", ["close", "abort"])
def test_a_store_that_is_closed_keeps_its_memory_while_the_device_writes_it(opened: Any, how: str) -> None:
    store, paged = opened(), Paged()
    pages = batch(6, FORM, seal=store.seal)
    with simulated.stalled():
        job = store.submit_put(paged.request(pages, range(6)))
        waits.Call(lambda: store.close(0.1) if how == "close" else store.abort()).result()
        assert job.wait(0) == [PutReason.CLOSED] * 6
        gc.collect()
        assert not job.settled
        assert registered
        with pytest.raises(ClosedError):
            store.submit_put(paged.request(pages, range(6)))
    assert job.wait_settled(waits.patience_s)


def test_a_store_that_is_closed_keeps_the_pages_that_it_was_given(opened: Any) -> None:
    store, paged = opened(), Paged()
    pages = batch(6, FORM, seal=store.seal)
    with simulated.stalled():
        job = store.submit_put(paged.request(pages, range(6)))
        closing = waits.Call(lambda: store.close(waits.patience_s))
        assert closing.is_blocked(0.2)
    closing.result()
    assert job.wait(0) == [None] * 6


def test_a_forked_child_neither_frees_nor_unpins_what_the_device_writes(opened: Any) -> None:
    store, paged = opened(), Paged()
    pages = batch(6, FORM, seal=store.seal)
    with simulated.stalled():
        job = store.submit_put(paged.request(pages, range(6)))
        before = dict(registered)
        child = os.fork()
        if not child:
            try:
                is_right = job.wait(0) == [PutReason.CLOSED] * 6
                del job, store
                gc.collect()
                os._exit(0 if is_right and registered == before else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    assert job.wait(waits.patience_s) == [None] * 6
    assert kept(store, pages) == paged.bytes_of(range(6))


def read_mapped(parent: peers.Parent, address: str, keys: list[bytes], identities: list[bytes]) -> None:
    """In a process that maps the memory of the store."""
    config = kvplug.Config.from_dict({"stores": ["host"], "options": {"host": {"contact": address}}})
    with kvplug.build_store(config) as store:
        pages = batch(len(keys), FORM, seal=store.seal)
        pages = attrs.evolve(pages, keys=tuple(keys), identities=tuple(identities))
        parent.send(None)
        while parent.recv():
            request = pages.empty()
            results = store.submit_get(request).wait(waits.patience_s)
            assert "mapped" in store.route
            parent.send(([each and each.value for each in results], bytes(request.memory.rows().buffer)))  # type: ignore[union-attr]


def test_a_process_that_maps_the_memory_sees_pages_once_the_device_has_written_them(
    opened: Any, fork_server: ForkServer
) -> None:
    store, paged = opened(), Paged()
    pages = batch(6, FORM, seal=store.seal)
    links = LinkSettings(resolved=ResolvedConfig(kvplug.Config(), kvplug.Registry.from_env()))
    server = StoreServer(store, links, f"unix:@kvplug-devices-{os.getpid()}")
    try:
        given = server.contact, [*pages.keys], [*pages.identities]
        with fork_server.start(f"{__file__}:read_mapped", *given) as child:
            assert child.recv() is None
            with simulated.stalled():
                job = store.submit_put(paged.request(pages, range(6)))
                child.send(True)
                assert child.recv()[0] == [MissReason.ABSENT.value] * 6
            assert job.wait(waits.patience_s) == [None] * 6
            child.send(True)
            results, found = child.recv()
            assert results == [None] * 6 and found == paged.bytes_of(range(6))
            child.send(False)
            child.result()
    finally:
        server.close()


# -- a GPU -----------------------------------------------------------------------------------------


def save_from_a_gpu(parent: peers.Parent) -> None:
    """In a process without the simulated device, beside which torch cannot pin memory for a GPU."""
    large = torch.ones(4096, 4096, device="cuda:0")
    product = torch.empty_like(large)
    options = HostOptions(size=1 << 24, segment_bytes=1 << 20)
    with HostStore(Store.Context(options=options, credentials=Credentials())) as store:
        store.staging = Staging(store)
        paged = Paged(device="cuda:0")
        staged(store, paged, batch(6, FORM, seal=store.seal))
        pin(store, 64, paged)
        for _ in range(20):
            every = [batch(8, FORM, seal=store.seal) for _ in range(4)]
            places = [range(first, 32, 4) for first in range(4)]
            for _ in range(10):  # the copies run after these kernels
                torch.mm(large, large, out=product)
            for view in (view for layer in paged.views for view in layer):
                view.neg_()
            paged.on_host = -paged.on_host
            with store.together():
                jobs = [store.submit_put(paged.request(*each)) for each in zip(every, places, strict=True)]
            for job, pages, where in zip(jobs, every, places, strict=True):
                assert job.wait(waits.patience_s) == [None] * 8
                assert kept(store, pages) == paged.bytes_of(where)
            store.submit_remove(None).wait(waits.patience_s)
        assert not staged(store, paged, batch(6, FORM, seal=store.seal)), "the processor copied pages"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: copies into pinned slots are not tested")
def test_a_gpu_copies_pages_straight_into_the_store() -> None:
    with peers.start(save_from_a_gpu, timeout_s=60.0) as child:
        child.result(60.0)


# -- a prompt larger than the staging memory -------------------------------------------------------


@pytest.mark.parametrize("make_store", [MemoryStore, HostStore])
def test_a_prompt_of_four_times_the_staging_memory_is_kept_whole(make_store: Callable[..., Store]) -> None:
    """8,192 tokens of 128 KiB are 1 GiB, and staging memory is 256 MiB by default: here both are a 64th."""
    key = Part(name="key", dtype="float16", shape=(16, 2, 64), head_axis=1)
    form = PageFormat(page_tokens=16, num_layers=4, parts=(key, attrs.evolve(key, name="value")))
    count = 8192 // 16
    assert count * form.nbytes == (1 << 30) // 64
    context = Store.Context(options=None, credentials=Credentials(), buffer_size=20 << 20)
    simulated.enable()
    with make_store(context) as store:
        store.staging = Staging(store, memory=PinnedMemory(MAX_BYTES // 64))
        for _ in range(2):  # the second time, the memory of "host" is pinned
            cache = torch.rand((4, 2, count, 16, 2, 64)).half()
            views = BlockViews([[*layer] for layer in cache.to("simulated")])
            pages = batch(count, form, seal=store.seal)
            table = torch.randperm(count).tolist()
            job = store.submit_put(pages.request(PageBlocks(form, views, table, 0, count)))
            assert job.wait(waits.patience_s) == [None] * count
            expected = cache[:, :, table].movedim(2, 0).contiguous().numpy().tobytes()
            assert kept(store, pages) == expected
            store.submit_remove(pages.keys).wait(waits.patience_s)
