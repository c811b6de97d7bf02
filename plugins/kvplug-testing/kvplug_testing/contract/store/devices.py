"""Pages in a cache on a device (law STORE-11), judged on the simulated device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from kvplug.kit import PinnedMemory, StagedPages
from kvplug.transport import MissReason, PageBlocks, PutReason
from kvplug_testing import simulated, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import Batch, kv_format
from kvplug_testing.contract.store.suite import SOON_S, StoreSuite, at_both_ends, ended, got, kept, missed

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 8
"""Tokens. A page has 4 of them, and begins in the middle of a block."""
FIRST_TOKEN = 4
SEEDS = range(4)
seeds = pytest.mark.parametrize("seed", SEEDS)


class Cache:
    """A paged cache on a device. What is written is queued on the calling thread's stream."""

    def __init__(self, pages: Batch, device: str = "simulated") -> None:
        import torch

        if device == "simulated":
            simulated.enable()
        self.form, self.count = pages.form, len(pages)
        num_blocks = -(-(FIRST_TOKEN + self.count * self.form.page_tokens) // BLOCK)
        self.table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(1)).tolist()
        shape = (len(self.table), BLOCK, *self.form.parts[0].shape[1:])
        self.views = [
            [torch.zeros(shape, dtype=torch.float16, device=device) for _ in self.form.parts]
            for _ in range(self.form.num_layers)
        ]
        self.table = self.table[:num_blocks]

    def blocks(self, **given: Any) -> PageBlocks:
        return PageBlocks(self.form, self.views, self.table, FIRST_TOKEN, self.count, **given)

    def write(self, pages: Batch) -> None:
        """Queue that the pages are there."""
        for layer, parts in enumerate(self.views):
            for part, view in enumerate(parts):
                for token, value in enumerate(_tokens(pages, layer, part), FIRST_TOKEN):
                    block = self.table[token // BLOCK]
                    view[block, token % BLOCK].copy_(value, non_blocking=True)

    def overwrite(self) -> None:
        """Queue that every block is used for something else."""
        for parts in self.views:
            for view in parts:
                view.fill_(7)

    def missing(self, pages: Batch, layers: range | None = None) -> list[int]:
        """The pages that are not there, by what this thread's stream sees."""
        import torch

        wrong = set()
        for layer in layers or range(self.form.num_layers):
            for part, view in enumerate(self.views[layer]):
                here = view.cpu()
                for at, value in enumerate(_tokens(pages, layer, part)):
                    token = FIRST_TOKEN + at
                    found = here[self.table[token // BLOCK], token % BLOCK]
                    if not torch.equal(found.view(torch.int16), value.view(torch.int16)):
                        wrong.add(at // self.form.page_tokens)
        return sorted(wrong)


def _tokens(pages: Batch, layer: int, part: int) -> Iterator[Tensor]:
    """Each token's elements in one part of one layer."""
    import torch

    form = pages.form
    at, nbytes = form.spans[part]
    for content in pages.contents:
        begin = layer * form.layer_nbytes + at
        flat = torch.frombuffer(bytearray(content[begin : begin + nbytes]), dtype=torch.float16)
        yield from flat.view(form.page_tokens, *form.parts[part].shape[1:])


class Devices(StoreSuite):
    """Each seed is one order in which the device runs what is queued on its streams."""

    def _pages(self, store: Any, count: int = 6) -> Batch:
        return self.batch(store, count, kv_format(3))

    @law("STORE-11", "STORE-1", needs="torch_missing")
    @at_both_ends
    @seeds
    def test_blocks_on_a_device_may_be_used_again_as_soon_as_they_are_put(self, end: str, seed: int) -> None:
        first, store = self.first_and(end)
        staged, pages = self.staged(store), self._pages(first)
        with simulated.seeded(seed):
            cache = Cache(pages)
            cache.write(pages)
            job = staged.submit_put(pages.request(cache.blocks()))
            cache.overwrite()
            assert ended(job) == [None] * len(pages)
            assert job.wait_settled(waits.patience_s)
            got(first, pages)

    @law("STORE-11", "STORE-1", needs="torch_missing")
    @at_both_ends
    @seeds
    def test_pages_on_a_device_are_written_after_what_used_their_blocks(self, end: str, seed: int) -> None:
        from kvplug.transport import DeviceMark

        first, store = self.first_and(end)
        staged, pages = self.staged(store), self._pages(first)
        kept(first, pages)
        with simulated.seeded(seed):
            cache = Cache(pages)
            cache.overwrite()
            given = {"after": DeviceMark(cache.views[0][0].device)} if seed % 2 else {}
            job = staged.submit_get(pages.request(cache.blocks(**given)))
            for layer in range(pages.form.num_layers):
                job.wait_for_layer(layer, waits.patience_s)
                wrong = cache.missing(pages, range(layer, layer + 1))
                assert not wrong, f"layer {layer} may be used, and pages {wrong} are not there"
            assert ended(job) == [None] * len(pages)
            assert job.wait_settled(waits.patience_s)
            assert not (wrong := cache.missing(pages)), f"pages {wrong} are not there"

    @law("STORE-11", "STORE-1", needs="torch_missing")
    @seeds
    def test_more_pages_than_there_is_host_memory_for_come_in_pieces(self, seed: int) -> None:
        store = self.hold()
        pages = self._pages(store, 7)
        nbytes = StagedPages.nbytes_of(pages.form, 2)
        staged = self.staged(store, memory=PinnedMemory(nbytes))
        kept(store, pages[:5])
        with simulated.seeded(seed):
            caches = [Cache(pages), Cache(pages)]
            jobs = [staged.submit_get(pages.request(cache.blocks())) for cache in caches]
            for cache, job in zip(caches, jobs, strict=True):
                assert ended(job) == [*[None] * 5, *[MissReason.ABSENT] * 2]
                assert cache.missing(pages) == [5, 6]
            cache = Cache(pages)
            cache.write(pages)
            more = self._pages(store, 7)
            cache.write(more)
            assert ended(staged.submit_put(more.request(cache.blocks()))) == [None] * 7
            got(store, more)

    @law("STORE-11", "STORE-3", needs="torch_missing")
    def test_requests_end_while_the_device_does_nothing_and_settle_when_it_goes_on(self) -> None:
        store = self.hold()
        staged, pages, more = self.staged(store), self._pages(store), self._pages(store)
        kept(store, pages)
        cache, other = Cache(pages), Cache(more)
        with simulated.stalled():
            cache.overwrite()
            late = staged.submit_get(pages.request(cache.blocks()), timeout=SOON_S)
            cancelled = staged.submit_get(pages.request(cache.blocks()))
            unsaved = staged.submit_put(more.request(other.blocks()), timeout=SOON_S)
            cancelled.cancel()
            assert ended(cancelled) == [MissReason.CANCELLED] * len(pages)
            assert ended(late) == [MissReason.TIMEOUT] * len(pages)
            assert ended(unsaved) == [PutReason.TIMEOUT] * len(more)
            assert not unsaved.settled, "the device has not read the blocks yet"
        for job in (late, cancelled, unsaved):
            assert job.wait_settled(waits.patience_s), "the device has gone on"
        cache.overwrite()
        assert cache.missing(pages) == list(range(len(pages))), "a request that has settled wrote"
        missed(store, more)

    @law("STORE-11", "STORE-9", needs="torch_missing")
    def test_pages_that_are_removed_on_their_way_from_a_device_are_not_kept(self) -> None:
        store = self.hold()
        staged, pages, others = self.staged(store), self._pages(store), self._pages(store)
        with simulated.stalled():
            jobs = [staged.submit_put(each.request(Cache(each).blocks())) for each in (pages, others)]
            removal = staged.submit_remove(pages.keys[:1])
        assert ended(removal) == [True]
        assert ended(jobs[0]) == [PutReason.CANCELLED] * len(pages)
        assert ended(jobs[1]) == [None] * len(others)
        missed(store, pages[:1])

    @law("STORE-11", "STORE-3", needs="torch_missing")
    @pytest.mark.parametrize("how", ["close", "abort"])
    def test_a_closed_store_finishes_what_comes_from_a_device(self, how: str) -> None:
        store = self.hold()
        staged, pages, more = self.staged(store), self._pages(store), self._pages(store)
        kept(store, pages)
        cache, other = Cache(pages), Cache(more)
        with simulated.stalled():
            get = staged.submit_get(pages.request(cache.blocks()))
            put = staged.submit_put(more.request(other.blocks()))
            if how == "abort":
                staged.abort()
                assert ended(put) == [PutReason.CLOSED] * len(more)
        if how == "close":
            staged.close(waits.patience_s)
            assert ended(put) == [None] * len(more)
        assert ended(get) in ([MissReason.CLOSED] * len(pages), [None] * len(pages))
        assert get.wait_settled(waits.patience_s)
        assert put.wait_settled(waits.patience_s)
        assert staged.is_lost
