"""Pages in a cache on a device (law STORE-11), judged on the simulated device."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvplug.engine import PageBlocks
from kvplug.kit import PinnedMemory, StagedPages, Staging
from kvplug.transport import MissReason, PutReason, Store
from kvplug_testing import simulated, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.calls import ended, got, kept, missed
from kvplug_testing.contract.store.pages import Batch, kv_format
from kvplug_testing.contract.store.suite import SOON_S, StoreSuite

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 8
"""Tokens. A page has 4 of them, and begins in the middle of a block."""
FIRST_TOKEN = 4
WHOLE: Final[dict[str, Any]] = {"block": 4, "first_token": 0}
"""Arguments of :class:`Cache` for pages that are whole blocks, which a device can copy straight into memory
of a store."""


class Cache:
    """A paged cache on a device. What is written is queued on the calling thread's stream."""

    def __init__(
        self, pages: Batch, device: str = "simulated", *, block: int = BLOCK, first_token: int = FIRST_TOKEN
    ) -> None:
        """``block``: tokens of a block. ``first_token``: where in the sequence the pages begin."""
        import torch

        if device == "simulated":
            simulated.enable()
        self.form, self.count = pages.form, len(pages)
        self._first_token = first_token
        tokens = torch.arange(first_token, first_token + self.count * self.form.page_tokens)
        num_blocks = int(tokens[-1]) // block + 1
        table = torch.randperm(num_blocks + 3, generator=torch.Generator().manual_seed(1))
        self.table = table[:num_blocks].tolist()
        self._at = table[tokens // block], tokens % block
        shape = (self.form.num_layers, len(self.form.parts), len(table), block, *self.form.parts[0].shape[1:])
        self._all = torch.zeros(shape, dtype=torch.float16, device=device)
        self.views = [[*parts] for parts in self._all]

    def blocks(self, **given: Any) -> PageBlocks:
        return PageBlocks(self.form, self.views, self.table, self._first_token, self.count, **given)

    def _elements(self, pages: Batch) -> Tensor:
        """What the cache holds of the pages then: [layers, parts, tokens, heads, size]."""
        import torch

        data = torch.frombuffer(bytearray(b"".join(pages.contents)), dtype=torch.float16)
        layers, parts, _, _, *shape = self._all.shape
        by_page = data.view(self.count, layers, parts, self.form.page_tokens, *shape)
        return by_page.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)

    def write(self, pages: Batch) -> None:
        """Queue that the pages are there."""
        blocks, places = self._at
        self._all[:, :, blocks, places] = self._elements(pages).to(self._all.device)

    def overwrite(self) -> None:
        """Queue that every block is used for something else, one by one."""
        for block in self._all.flatten(0, 2):
            block.fill_(7)

    def missing(self, pages: Batch, layers: slice = slice(None)) -> list[int]:
        """The pages that are not there, by what this thread's stream sees."""
        import torch

        blocks, places = self._at
        found = self._all.cpu()[:, :, blocks, places].view(torch.int16)
        differs = (found != self._elements(pages).contiguous().view(torch.int16))[layers]
        tokens = differs.transpose(0, 2).flatten(1).any(1).nonzero().flatten()
        return sorted({*(tokens // self.form.page_tokens).tolist()})


class Devices(StoreSuite):
    """Each seed is one order in which the device runs what is queued on its streams."""

    def _staged(self, store: Store, **given: Any) -> Store:
        """The store, staged for devices."""
        pytest.importorskip("torch")
        store.staging = Staging(store, timeout_s=self.timeout_s, **given)
        self.later(store.abort)
        return store

    def _saved_before(self, staged: Store) -> None:
        """Save pages from a device, so that the store prepares its memory for that if it can."""
        pages = self.batch(staged, 6, kv_format(3))
        assert ended(staged.submit_put(pages.request(Cache(pages, **WHOLE).blocks()))) == [None] * 6
        ended(staged.submit_remove(pages.keys))

    @law("STORE-11", "STORE-1")
    @pytest.mark.parametrize("seed", range(6))
    def test_device_blocks_are_read_before_and_written_after_other_use(self, end: str, seed: int) -> None:
        from kvplug.transport import DeviceMark

        first, store = self.first_and(end)
        pages = self.batch(first, 6, kv_format(3))
        few = PinnedMemory(StagedPages.nbytes_of(pages.form, 2)) if seed in (2, 3) else None
        staged = self._staged(store, memory=few)
        with simulated.seeded(seed):
            if seed > 3:
                self._saved_before(staged)
            cache = Cache(pages, **WHOLE if seed > 3 else {})
            cache.write(pages)
            with simulated.stalled() if seed % 2 else nullcontext():
                job = staged.submit_put(pages.request(cache.blocks()))
                if few is None:  # else most pages wait for memory
                    assert job.take_back(0)
                    cache.overwrite()
            if seed % 2:
                cache.missing(pages)  # what this thread queued runs first, unless it has to wait
            assert ended(job) == [None] * 6
            assert job.wait_settled(waits.patience_s)
            got(first, pages)
            cache.overwrite()
            given = {"after": DeviceMark(cache.views[0][0].device)} if seed % 2 else {}
            load = staged.submit_get(pages.request(cache.blocks(**given)))
            for layer in range(pages.form.num_layers):
                load.wait_for_layer(layer, waits.patience_s)
                assert not cache.missing(pages, slice(layer, layer + 1)), f"layer {layer} is not there"
            assert ended(load) == [None] * 6
            assert load.wait_settled(waits.patience_s)
            assert not cache.missing(pages)

    @law("STORE-11", "STORE-3")
    def test_requests_end_while_the_device_does_nothing_and_settle_when_it_goes_on(self) -> None:
        _, store, pages = self.with_pages("first", 6, kv_format(3))
        staged, more = self._staged(store), self.batch(store, 6, kv_format(3))
        simulated.enable()
        self._saved_before(staged)
        cache, other, later = Cache(pages), Cache(more, **WHOLE), self.batch(store, 6, kv_format(3))
        with simulated.stalled():
            cache.overwrite()
            late = staged.submit_get(pages.request(cache.blocks()), timeout=SOON_S)
            cancelled = staged.submit_get(pages.request(cache.blocks()))
            unsaved = staged.submit_put(more.request(other.blocks()), timeout=SOON_S)
            cancelled.cancel()
            assert ended(cancelled) == [MissReason.CANCELLED] * 6
            assert ended(late) == [MissReason.TIMEOUT] * 6
            assert ended(unsaved) == [PutReason.TIMEOUT] * 6
            assert not unsaved.settled, "the device has not read the blocks yet"
            kept(store, later)
        for job in (late, cancelled, unsaved):
            assert job.wait_settled(waits.patience_s), "the device has gone on"
        cache.overwrite()
        assert cache.missing(pages) == [*range(6)], "a request that has settled wrote"
        missed(store, more)
        got(store, later)

    @law("STORE-11", "STORE-2")
    @pytest.mark.parametrize("after", range(6))
    def test_pages_whose_copies_failed_are_not_kept(self, after: int) -> None:
        """The device fails at another operation each time."""
        store = self._staged(self.hold())
        simulated.enable()
        self._saved_before(store)
        for given in (WHOLE, {}):
            pages, later = (self.batch(store, 6, kv_format(3)) for _ in range(2))
            cache = Cache(pages, **given)
            with simulated.stalled():
                with simulated.failing(after):
                    job = store.submit_put(pages.request(cache.blocks()))
                assert {*ended(job)} <= {PutReason.NO_MEMORY, PutReason.OTHER}
                kept(store, later)
            assert job.wait_settled(waits.patience_s)
            missed(store, pages)
            got(store, later)
