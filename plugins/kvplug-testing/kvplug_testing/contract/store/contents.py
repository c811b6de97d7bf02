"""What is got is what was put: dtypes, sizes, layers, and every kind of memory."""

from __future__ import annotations

from kvplug.kit import DTYPES
from kvplug.transport import PageBuffers, PageFormat, Part
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.calls import ended, got, kept, missed
from kvplug_testing.contract.store.pages import MIB, kv_format, sized_format
from kvplug_testing.contract.store.suite import StoreSuite


def _every_dtype() -> PageFormat:
    parts = (Part(name=dtype, dtype=dtype, shape=(4, 2, 6), head_axis=1) for dtype in DTYPES)
    flags = Part(name="flags", dtype="bool", shape=(3,), token_axis=None)
    return PageFormat(page_tokens=4, num_layers=7, parts=(*parts, flags))


class Contents(StoreSuite):
    """Every page has random bytes, which are compared bit for bit."""

    @law("STORE-1")
    def test_pages_of_each_size_and_dtype_come_back_in_any_order(self, end: str) -> None:
        first, store = self.first_and(end)
        sizes = [(3, sized_format(nbytes)) for nbytes in (1, 4095, 4096, 65537, 8 * MIB + 13)]
        for count, form in ((5, _every_dtype()), (200, kv_format()), *sizes):
            for writer, reader in ((first, store), (store, first)):
                pages = self.batch(first, count, form)
                kept(writer, pages)
                got(reader, pages)
                got(reader, pages[[*range(count - 1, 0, -2), 1, 1]])

    @law("STORE-1")
    def test_what_the_caller_writes_after_its_put_is_not_in_the_page(self, end: str) -> None:
        first, store = self.first_and(end)
        pages = self.batch(first, 20, sized_format(20_000))
        memory = PageBuffers.empty(pages.form, 20)
        job = store.submit_put(pages.filled(memory))
        assert ended(job) == [None] * 20
        assert job.wait_settled(20)
        pages.with_bits_of("a later request").filled(memory)
        got(first, pages)

    @law("STORE-1")
    def test_pages_in_memory_of_the_store_or_in_a_part_of_it_are_kept_like_others(self, end: str) -> None:
        first, store = self.first_and(end)
        pages, more = self.batch(first, 4), self.batch(first, 4)
        memory, part, unused = (store.allocate(pages.series, 4) for _ in range(3))
        assert memory and part and unused, "there is no room in an empty store"
        assert ended(store.submit_put(pages.filled(memory))) == [None] * 4
        for _ in range(2):
            store.free(unused)
        more.filled(part)
        middle = PageBuffers(more.form, part.rows()[1:3])
        assert ended(store.submit_put(more[1:3].request(middle))) == [None] * 2
        store.free(part)
        got(first, pages)
        got(store, more[1:3])
        missed(store, more[[0, 3]])

    @law("STORE-1", "STORE-2", "STORE-6", "STORE-8", "STORE-9", "STORE-10", timeout_s=120)
    def test_random_calls_give_what_a_dict_gives(self, end: str) -> None:
        from kvplug_testing.contract.store import machine

        machine.run(lambda: (self, *self.first_and(end, 64 * MIB)), examples=8, steps=30)
