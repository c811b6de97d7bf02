"""What is got is what was put: dtypes, sizes, layers, and every kind of memory."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug.kit import DTYPES
from kvplug.transport import PageBlocks, PageBuffers, PageFormat, Part
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import (
    FILL,
    MIB,
    Batch,
    blank,
    kv_format,
    outside,
    sized_format,
    strided,
)
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    ended,
    got,
    held,
    kept,
    missed,
)


class Contents(StoreSuite):
    """Every page has random bytes, which are compared bit for bit."""

    @law("STORE-1")
    def test_a_page_of_each_dtype_comes_back_with_its_bits(self) -> None:
        store = self.hold()
        for dtype in DTYPES:
            pages = self.batch(store, 3, kv_format(dtype=dtype))
            kept(store, pages)
            got(store, pages)

    @law("STORE-1")
    @at_both_ends
    @pytest.mark.parametrize("nbytes", [1, 63, 64, 4095, 4096, 4097, 65537, 8 * MIB + 13])
    def test_pages_of_each_size_come_back(self, end: str, nbytes: int) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 3, sized_format(nbytes))
        kept(first, pages)
        got(store, pages)
        back = self.batch(store, 2, sized_format(nbytes))
        kept(store, back)
        got(first, back)

    @law("STORE-1")
    @at_both_ends
    def test_parts_of_several_shapes_and_dtypes_in_many_layers_come_back(self, end: str) -> None:
        form = PageFormat(
            page_tokens=4,
            num_layers=7,
            parts=(
                Part(name="key", dtype="bfloat16", shape=(4, 2, 8), head_axis=1),
                Part(name="value", dtype="float8_e4m3fn", shape=(4, 2, 6), head_axis=1),
                Part(name="scale", dtype="float32", shape=(4, 1)),
                Part(name="flags", dtype="bool", shape=(3,), token_axis=None),
            ),
        )
        first, store = self.first_and(end)
        pages = self.batch(first, 5, form)
        kept(store, pages)
        got(store, pages)
        got(first, pages)

    @law("STORE-1")
    @at_both_ends
    def test_many_pages_of_one_request_come_back_in_any_order(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 200)
        kept(store, pages)
        got(store, pages)
        got(first, pages[range(199, -1, -3)])
        got(store, pages[[7, 7, 3]])

    @law("STORE-1")
    @at_both_ends
    def test_pages_come_from_and_go_into_rows_that_are_not_dense(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 6)
        source = strided(pages.form, 6, gap=24)
        assert ended(store.submit_put(pages.filled(source))) == [None] * 6
        got(store, pages)
        for gap in (1, 48, 4096):
            into = strided(pages.form, 6, gap)
            request = pages.request(into)
            assert ended(store.submit_get(request)) == [None] * 6
            assert not (wrong := pages.unlike(request, [None] * 6)), wrong
            assert outside(into) == bytes([FILL]) * (6 * gap), "bytes between the rows were written"

    @law("STORE-1", needs="torch_missing")
    @at_both_ends
    @pytest.mark.parametrize(("layout", "block_size"), [("dense", 2), ("heads first", 4), ("strided", 16)])
    def test_pages_come_from_and_go_into_blocks_of_a_paged_cache(
        self, end: str, layout: str, block_size: int
    ) -> None:
        import torch

        first, store = self.first_and(end)
        form = kv_format(3, page_tokens=4, num_heads=2, head_size=8, dtype="bfloat16")
        pages = self.batch(first, 5, form)
        tokens, first_token = 5 * 4, 4  # the sequence begins a page before what is moved
        table = [11, 3, 8, 0, 9, 14, 2, 5, 1, 13, 7, 6][: -(-(tokens + first_token) // block_size)]
        source = _cache(form, block_size, layout, fill=False)
        memory = PageBlocks(form, source, table, first_token, 5)
        # into the cache by the memory's own way, which the core tests
        filled = pages.filled().memory.rows()
        assert filled is not None
        memory.scatter(0, filled)
        assert ended(store.submit_put(pages.request(memory))) == [None] * 5
        got(store, pages)
        target = _cache(form, block_size, layout, fill=True)
        assert (
            ended(first.submit_get(pages.request(PageBlocks(form, target, table, first_token, 5))))
            == [None] * 5
        )
        for layer in range(form.num_layers):
            for part in range(2):
                at = [table[token // block_size] * block_size + token % block_size for token in range(4, 24)]
                there, here = (cache[layer][part].flatten(0, 1) for cache in (source, target))
                assert_same(there[at], here[at])
                rest = [slot for slot in range(here.shape[0]) if slot not in set(at)]
                assert_filled(0x5A5A, here[rest].view(torch.int16), "other tokens were written")

    @law("STORE-1")
    @at_both_ends
    def test_what_the_caller_writes_after_its_put_is_not_in_the_page(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 20, sized_format(20_000))
        request = pages.filled()
        job = store.submit_put(request)
        assert ended(job) == [None] * 20
        assert job.wait_settled(20)
        blank(request.memory)
        got(first, pages)

    @law("STORE-1")
    @at_both_ends
    def test_pages_in_memory_of_the_store_or_in_a_part_of_it_are_kept_like_others(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 4)
        memory = store.allocate(pages.series, 4)
        assert memory is not None, "there is no room in an empty store"
        kept_back = store.allocate(pages.series, 4)
        assert kept_back is not None
        assert ended(store.submit_put(pages.filled(memory))) == [None] * 4
        got(first, pages)
        store.free(kept_back)
        store.free(kept_back)
        more = self.batch(first, 4)
        memory = store.allocate(more.series, 4)
        assert memory is not None
        filled = more.filled(memory)
        part = PageBuffers(more.form, filled.memory.rows()[1:3])  # type: ignore[index]
        assert ended(store.submit_put(more[1:3].request(part))) == [None] * 2
        store.free(memory)
        got(store, more[1:3])
        missed(store, more[[0, 3]])
        got(store, pages)

    @law("STORE-1")
    @at_both_ends
    def test_pages_move_from_and_into_memory_that_is_registered(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 4)
        source, target = pages.filled(), pages.empty()
        for request in (source, target):
            store.register_memory(request.memory)
        assert ended(store.submit_put(source)) == [None] * 4
        for _ in range(2):
            assert ended(store.submit_get(target)) == [None] * 4
            assert not (wrong := pages.unlike(target, [None] * 4)), wrong
            blank(target.memory)

    @law("STORE-1")
    @at_both_ends
    def test_no_pages_are_no_error(self, end: str) -> None:
        first, store = self.first_and(end)
        none = self.batch(first, 0)
        assert ended(store.submit_put(none.filled())) == []
        assert ended(store.submit_get(none.empty())) == []
        assert ended(store.submit_lookup(())) == []
        assert ended(store.submit_remove(())) == []
        for call in (store.touch, store.release, store.withdraw):
            call(())
        store.declare(none.series, ())

    @law("STORE-1")
    @at_both_ends
    def test_pages_of_different_series_do_not_meet(self, end: str) -> None:
        first, store = self.first_and(end)
        namespace = b"pages of different series" + self.batch(first, 1).keys[0]
        forms = (kv_format(2), kv_format(3), kv_format(2, dtype="bfloat16"))
        batches: list[Batch] = [
            self.batch(first, 4, form, namespace=namespace, shard=shard)
            for form in forms
            for shard in (b"", b"0 of 2", b"1 of 2")
        ]
        for pages in batches[::2]:
            kept(store, pages)
        for index, pages in enumerate(batches):
            if index % 2:
                missed(first, pages)
                assert not any(held(store, pages))
            else:
                got(first, pages)

    @law("STORE-1")
    @at_both_ends
    def test_the_others_of_a_request_come_where_one_is_absent(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 7)
        kept(first, pages[[0, 1, 3, 6]])
        request = pages.empty()
        results = ended(store.submit_get(request))
        assert [reason is None for reason in results] == [True, True, False, True, False, False, True]
        assert not (wrong := pages.unlike(request, results)), wrong


def _cache(form: PageFormat, block_size: int, layout: str, *, fill: bool) -> list[list[Any]]:
    """A paged cache of 16 blocks: for each layer views [block, token, head, element] of keys and values."""
    import torch

    rest = form.parts[0].shape[1:]
    views = []
    for _ in range(form.num_layers):
        if layout == "dense":
            made = [torch.empty(16, block_size, *rest, dtype=torch.bfloat16) for _ in range(2)]
        elif layout == "heads first":
            made = [
                torch.empty(16, rest[0], block_size, rest[1], dtype=torch.bfloat16).transpose(1, 2)
                for _ in range(2)
            ]
        else:  # keys and values side by side
            both = torch.empty(16, block_size, rest[0], 2 * rest[1], dtype=torch.bfloat16)
            made = [both[..., : rest[1]], both[..., rest[1] :]]
        for each in made:
            raw = each.view(torch.int16)
            raw.fill_(0x5A5A if fill else 0)
        views.append(made)
    return views
