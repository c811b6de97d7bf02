"""The budget: never exceeded, used well, and pages that are used stay."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvplug.transport import PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.footprint import Footprint
from kvplug_testing.contract.store.pages import MIB, Batch, kv_format, sized_format
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    ended,
    got,
    got_or_missed,
    held,
    kept,
    missed,
    put,
)

_CHURNED = 4_000
"""Pages that come and go."""
_MEASURED_BYTES = 32 * MIB
"""The least budget of a place whose bytes are measured. Journals and allocators keep less than half of it."""


class Budget(StoreSuite):
    """Places whose budget is :attr:`budget_bytes`."""

    def _must_have_a_budget(self, store: Store) -> None:
        if store.usage().budget_bytes is None:
            pytest.skip(f"{self.called} has no limit of its own")

    def _within(self, store: Store) -> None:
        usage = store.usage()
        budget = usage.budget_bytes
        if budget is not None:
            assert budget <= self.budget_bytes, f"the budget is {budget}, and was {self.budget_bytes}"
        assert usage.used_bytes <= self.budget_bytes, (
            f"{usage.used_bytes} bytes are used of {self.budget_bytes}"
        )

    @law("STORE-6")
    @at_both_ends
    def test_pages_that_come_do_not_exceed_the_budget(self, end: str) -> None:
        first, store = self.first_and(end, self.budget_bytes)
        self._must_have_a_budget(first)
        nbytes = self.budget_bytes // 24
        batches = [self.batch(first, 2, sized_format(nbytes)) for _ in range(36)]
        for pages in batches:
            assert set(put(store, pages)) <= {None, PutReason.NO_ROOM}
            self._within(first)
        there = [pages for pages in batches if all(held(first, pages))]
        assert 2 * len(there) * nbytes >= self.budget_bytes // 4, (
            f"of a budget of {self.budget_bytes} bytes {2 * len(there)} pages of {nbytes} bytes are there"
        )
        for pages in batches:
            got_or_missed(store, pages)
        got(store, batches[-1])

    @law("STORE-6")
    def test_headers_are_counted(self) -> None:
        """Pages of a few bytes, whose headers are larger than they are."""
        store = self.hold(self.budget_bytes)
        self._must_have_a_budget(store)
        form = kv_format(2, num_heads=1, head_size=2)
        before = store.usage()
        pages = self.batch(store, 40, form)
        kept(store, pages)
        usage = store.usage()
        header = store.seal.header_length(form, pages.identities[0])
        assert usage.num_pages - before.num_pages == 40
        least = 40 * (header + form.nbytes)
        assert usage.used_bytes - before.used_bytes >= least, (
            f"{usage.used_bytes - before.used_bytes} bytes are counted for 40 pages, which are {least}"
        )

    @law("STORE-6", level="long")
    def test_no_more_bytes_than_the_budget_lie_on_the_disk_or_in_memory(self) -> None:
        """Whatever the store counts: a full place does not grow by what comes."""
        budget = max(_MEASURED_BYTES, self.budget_bytes)
        place = self.place(budget)
        folder = str(place.options.get(self.place_option, ""))
        store = self.open(place)
        self._must_have_a_budget(store)

        def put_budgets(count: int) -> None:
            for _ in range(8 * count):
                put(store, self.batch(store, 8, sized_format(budget // 64)))

        put_budgets(1)
        before = _lying_bytes(folder)
        put_budgets(2)
        limit = time.monotonic() + waits.patience_s / 10
        while more := {
            where: nbytes - before[where]
            for where, nbytes in _lying_bytes(folder).items()
            if nbytes - before[where] > budget // 2
        }:
            said = ", ".join(f"{nbytes:,} bytes more lie {where}" for where, nbytes in more.items())
            assert time.monotonic() < limit, f"the budget of {budget:,} bytes was used, and {said}"
            time.sleep(0.1)

    @law("STORE-6")
    @at_both_ends
    def test_a_page_that_is_larger_than_the_budget_is_too_large_and_evicts_nothing(self, end: str) -> None:
        first, store = self.first_and(end, self.budget_bytes)
        self._must_have_a_budget(first)
        pages = self.batch(first, 4, sized_format(self.budget_bytes // 24))
        kept(first, pages)
        large = self.batch(first, 1, sized_format(self.budget_bytes + 1))
        assert put(store, large) == [PutReason.TOO_LARGE]
        got(store, pages)
        missed(store, large)

    @property
    def eviction_by_use(self) -> str:
        """The reason to skip a test, for ``needs``."""
        return "" if self.evicts_by_use else f"{self.called} does not evict by use (evicts_by_use)"

    @law("STORE-6", needs="eviction_by_use", level="long")
    @at_both_ends
    def test_pages_that_are_got_stay_and_others_are_evicted(self, end: str) -> None:
        first, store = self.first_and(end, self.budget_bytes)

        def use(pages: Batch) -> None:
            got(store, pages)

        self._use_and_flood(first, use)

    @law("STORE-6", needs="eviction_by_use")
    def test_pages_that_are_touched_stay_and_others_are_evicted(self) -> None:
        store = self.hold(self.budget_bytes)
        self.must(store, "touch")
        self._use_and_flood(store, lambda pages: store.touch(pages.keys))

    def _use_and_flood(self, store: Store, use: Callable[[Batch], None]) -> None:
        """Half of the pages are used, and a quarter of the capacity comes after that."""
        self._must_have_a_budget(store)
        nbytes = self.budget_bytes // 48
        capacity = self._capacity(nbytes)
        pages = self.batch(store, capacity - 2, sized_format(nbytes))
        kept(store, pages)
        time.sleep(self.use_granularity_s)
        used, unused = pages[::2], pages[1::2]
        for _ in range(2):
            use(used)
        ended(store.submit_lookup(used.keys))  # a use that is noted in a thread is noted by now
        for _ in range(capacity // 4):
            kept(store, self.batch(store, 1, sized_format(nbytes)))
        lost = held(store, used).count(False)
        assert not lost, f"{lost} of {len(used)} pages that were used last were evicted"
        assert not all(held(store, unused)), "nothing was evicted"

    def _capacity(self, nbytes: int) -> int:
        """How many pages of that size a place takes before one is evicted."""
        store = self.open(self.place(self.budget_bytes))
        there: list[Batch] = []
        while len(there) < 200:
            pages = self.batch(store, 1, sized_format(nbytes))
            assert set(put(store, pages)) <= {None, PutReason.NO_ROOM}
            there.append(pages)
            if not all(itertools.chain.from_iterable(held(store, each) for each in there)):
                store.close()
                assert len(there) > 12, f"{len(there) - 1} pages fit in 48 times their size"
                return len(there) - 1
        raise AssertionError(f"200 pages of {nbytes} bytes are held in a budget of {self.budget_bytes}")

    @law("STORE-6", "STORE-9")
    def test_removed_pages_make_room(self) -> None:
        store = self.hold(self.budget_bytes)
        self._must_have_a_budget(store)
        nbytes = self.budget_bytes // 24
        before = store.usage()
        pages = self.batch(store, 8, sized_format(nbytes))
        kept(store, pages)
        if not all(ended(store.submit_remove(pages.keys))):
            pytest.skip(f"{self.called} cannot remove pages")
        usage = store.usage()
        assert usage.num_pages == before.num_pages
        assert usage.used_bytes - before.used_bytes < 4 * nbytes, "removed pages are still counted"
        self._within(store)

    @law("STORE-6", "ALL-7", level="long", timeout_s=300)
    def test_memory_does_not_grow_with_the_pages_that_come_and_go(self) -> None:
        store = self.hold(self.budget_bytes)
        self._must_have_a_budget(store)
        form = sized_format(self.budget_bytes // 200)
        each = 10  # a leak of one object per round is more than the pages that a store happens to hold

        def some(rounds: int) -> None:
            for _ in range(rounds):
                pages = self.batch(store, each, form)
                assert set(put(store, pages)) <= {None, PutReason.NO_ROOM}
                got_or_missed(store, pages)
                self._within(store)

        some(20)
        for _ in range(3):  # what a store remembers of its pages comes and goes; a leak grows each time
            before = Footprint.taken()
            rounds = _CHURNED // each
            some(rounds)
            limit = time.monotonic() + waits.patience_s / 10
            while held_more := Footprint.taken().growth(before, rounds, each * form.nbytes):
                if time.monotonic() > limit:
                    break
                time.sleep(0.1)
            else:
                return
        raise AssertionError(f"this process holds {held_more}")


def _lying_bytes(folder: str) -> dict[str, int]:
    """The bytes in the folder's files, and in the memory and the shared memory of this process."""
    files = [Path(parent, name) for parent, _, names in os.walk(folder) for name in names]
    now = Footprint.taken()
    shared = [Path("/dev/shm", name) for name in now.resources.shared_memory]  # noqa: S108 - where Linux has it
    descriptors = [entry.partition(" -> ") for entry in now.resources.descriptors]
    shared += [Path("/proc/self/fd", fd) for fd, _, path in descriptors if path.startswith("/memfd:")]
    return {
        "on the disk": sum(map(_allocated, files)),
        "in memory": now.resident_bytes,
        "in shared memory": sum(map(_allocated, shared)),
    }


def _allocated(path: Path) -> int:
    with contextlib.suppress(OSError):  # it is gone by now
        return path.stat().st_blocks * 512
    return 0
