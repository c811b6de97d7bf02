"""What is got is what was put: dtypes, sizes, layers, and every kind of memory."""

from __future__ import annotations

import pytest

from kvplug.kit import DTYPES
from kvplug.transport import PageBuffers, PageFormat, Part
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import MIB, blank, outside, sized_format, strided
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    ended,
    got,
    kept,
    missed,
)


class Contents(StoreSuite):
    """Every page has random bytes, which are compared bit for bit."""

    @law("STORE-1")
    @at_both_ends
    @pytest.mark.parametrize("nbytes", [1, 4095, 4096, 65537, 8 * MIB + 13])
    def test_pages_of_each_size_come_back(self, end: str, nbytes: int) -> None:
        first, store = self.first_and(end)
        pages, back = (self.batch(first, 3, sized_format(nbytes)) for _ in range(2))
        kept(first, pages)
        got(store, pages)
        kept(store, back)
        got(first, back)

    @law("STORE-1")
    @at_both_ends
    def test_parts_of_every_dtype_in_many_layers_come_back(self, end: str) -> None:
        parts = (Part(name=dtype, dtype=dtype, shape=(4, 2, 6), head_axis=1) for dtype in DTYPES)
        flags = Part(name="flags", dtype="bool", shape=(3,), token_axis=None)
        form = PageFormat(page_tokens=4, num_layers=7, parts=(*parts, flags))
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
    def test_pages_come_from_and_go_into_registered_rows_that_are_not_dense(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 6)
        source, into = strided(pages.form, 6, gap=24), strided(pages.form, 6, gap=4096)
        around = outside(into)
        for memory in (source, into):
            store.register_memory(memory)
        assert ended(store.submit_put(pages.filled(source))) == [None] * 6
        for _ in range(2):
            request = pages.request(into)
            assert ended(store.submit_get(request)) == [None] * 6
            assert not (wrong := pages.unlike(request, [None] * 6)), wrong
            assert outside(into) == around, "bytes between the rows were written"
            blank(into)

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
        pages, more = self.batch(first, 4), self.batch(first, 4)
        memory, unused = (store.allocate(pages.series, 4) for _ in range(2))
        assert memory is not None and unused is not None, "there is no room in an empty store"
        assert ended(store.submit_put(pages.filled(memory))) == [None] * 4
        got(first, pages)
        for _ in range(2):
            store.free(unused)
        memory = store.allocate(more.series, 4)
        assert memory is not None
        part = PageBuffers(more.form, more.filled(memory).memory.rows()[1:3])  # type: ignore[index]
        assert ended(store.submit_put(more[1:3].request(part))) == [None] * 2
        store.free(memory)
        got(store, more[1:3])
        missed(store, more[[0, 3]])
        got(store, pages)

    @law("STORE-1")
    @at_both_ends
    def test_no_pages_are_no_error(self, end: str) -> None:
        first, store = self.first_and(end)
        none = self.batch(first, 0)
        for job in (
            store.submit_put(none.filled()),
            store.submit_get(none.empty()),
            store.submit_lookup(()),
            store.submit_remove(()),
        ):
            assert ended(job) == []
        for call in (store.touch, store.release, store.withdraw):
            call(())
        store.declare(none.series, ())

    @law("STORE-1", "STORE-2", "STORE-8", "STORE-9", "STORE-10", timeout_s=120)
    @at_both_ends
    def test_random_calls_give_what_a_dict_gives(self, end: str) -> None:
        from kvplug_testing.contract.store import machine

        machine.run(lambda: (self, *self.first_and(end, 64 << 20)), examples=10, steps=30)
