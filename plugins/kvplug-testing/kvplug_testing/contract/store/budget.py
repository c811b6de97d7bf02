"""The budget: never exceeded, used well, and what stays: pages that are used, leased, or to be read."""

from __future__ import annotations

import contextlib
import os
import time

import pytest

from kvplug.transport import MissReason, Presence, PutReason, Store
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.footprint import Footprint
from kvplug_testing.contract.store.calls import ended, got, got_or_missed, held, kept, looked_up, missed, put
from kvplug_testing.contract.store.ends import LONG_S, StoreGeneral
from kvplug_testing.contract.store.pages import MIB, Batch, held_request, sized_format
from kvplug_testing.contract.store.suite import Place
from kvplug_testing.waits import Call, until

_MEASURED_BYTES = 32 * MIB
"""The least budget of a place whose bytes are measured. Journals and allocators keep less than half of it."""
_LATE = {MissReason.ABSENT, MissReason.EVICTED, MissReason.EXPIRED, MissReason.CORRUPT, MissReason.IDENTITY}
"""Why a page that was evicted during a read may be missed."""


class Budget(StoreGeneral):
    """Places whose budget is :attr:`budget_bytes`, and floods of pages that do not fit."""

    @property
    def _nbytes(self) -> int:
        """Bytes of a page. More than sixteen such pages fit."""
        return self.budget_bytes // 24

    def _bounded(self, end: str = "first") -> tuple[Store, Store]:
        """The first end, and the tested one. Skips the test if the store has no budget of its own."""
        first, store = self.first_and(end, self.budget_bytes)
        if first.usage().budget_bytes is None:
            pytest.skip(f"{self.called} has no limit of its own")
        return first, store

    def _flood(self, store: Store) -> None:
        """Put many other pages, and use each: a store may keep a page that was used before those that are
        seen once."""
        for _ in range(48):
            pages = self.batch(store, 1, sized_format(self._nbytes))
            put(store, pages)
            got_or_missed(store, pages)

    @law("STORE-6")
    def test_pages_that_come_stay_within_the_budget_and_one_too_large_evicts_none(self, end: str) -> None:
        first, store = self._bounded(end)
        pages = self.batch(first, 72, sized_format(self._nbytes))
        for at in range(0, len(pages), 2):
            assert {*put(store, pages[at : at + 2])} <= {None, PutReason.NO_ROOM}
            usage = first.usage()
            assert usage.used_bytes <= (usage.budget_bytes or 0) <= self.budget_bytes
        large = self.batch(first, 1, sized_format(self.budget_bytes + 1))
        there = held(first, pages)
        assert put(store, large) == [PutReason.TOO_LARGE]
        assert held(first, pages) == there, "a page that is too large for the store evicts others"
        assert sum(there) * self._nbytes >= self.budget_bytes // 4, f"only {sum(there)} pages fit"
        got_or_missed(store, pages)
        got(store, pages[-2:])
        missed(store, large)

    @law("STORE-6", "ALL-7", level="long")
    def test_no_more_bytes_than_the_budget_lie_on_the_disk_or_in_memory(self) -> None:
        """Whatever the store counts: a full place does not grow by what comes."""
        budget = max(_MEASURED_BYTES, self.budget_bytes)
        place = self.place(budget)
        store = self.open(place)
        if store.usage().budget_bytes is None:
            pytest.skip(f"{self.called} has no limit of its own")
        folder = str(place.options.get(self.place_option, ""))

        def put_budgets(count: int) -> None:
            for _ in range(8 * count):
                put(store, self.batch(store, 8, sized_format(budget // 64)))

        def is_steady() -> bool:
            now = _lying_bytes(folder)
            return all(now[at] - before[at] <= budget // 2 for at in before)

        put_budgets(1)
        before = _lying_bytes(folder)
        put_budgets(2)
        until(is_steady, waits.patience_s / 10, f"that a full place does not grow beyond {before}")

    @law("STORE-6")
    def test_pages_that_are_got_or_touched_stay_and_others_are_evicted(self, end: str) -> None:
        """Every second page of a full store is used, and then a quarter of the pages is evicted."""
        first, store = self._bounded(end)
        form = sized_format(self.budget_bytes // 48)
        pages = self.batch(first, 60, form)
        count = next(
            at for at in range(60) if put(store, pages[at : at + 1]) and not all(held(store, pages[:at]))
        )
        assert count > 12, f"{count} pages fit in 48 times their size"
        there = [at for at, is_held in enumerate(held(store, pages)) if is_held]
        used, unused = pages[there[::2]], pages[there[1::2]]
        touched = used.keys[::2] if self.can(store, "touch") else ()
        time.sleep(self.use_granularity_s)
        for _ in range(2):
            got(store, used[1::2] if touched else used)
            store.touch(touched)
        looked_up(store, used.keys)  # a use that is noted in a thread is noted by now
        for _ in range(len(there) // 4):
            kept(store, self.batch(store, 1, form))
        assert all(held(store, used)), "pages that were used last were evicted"
        assert not all(held(store, unused)), "nothing was evicted"

    # -- leases --------------------------------------------------------------------------------

    def _leased(self) -> tuple[Place, Store, Batch]:
        """A store with a small budget, and four pages in it."""
        place = self.place(self.budget_bytes)
        store = self.open(place)
        self.must(store, "release")
        pages = self.batch(store, 4, sized_format(self._nbytes))
        kept(store, pages)
        return place, store, pages

    @law("STORE-5")
    def test_a_leased_page_outlives_floods_until_the_lease_is_released_or_has_expired(self) -> None:
        _, store, pages = self._leased()
        looked_up(store, pages.keys, lease_s=0.1)
        for lease_s in (LONG_S, 0.01, 0.0):  # a shorter lease does not end a longer one
            assert looked_up(store, pages.keys[:2], lease_s=lease_s) == [Presence.HELD] * 2
        time.sleep(0.2)
        self._flood(store)
        assert held(store, pages) == [True, True, False, False]
        got(store, pages[:2])
        store.release(pages.keys[:1])
        self._flood(store)
        assert held(store, pages) == [False, True, False, False]

    @law("STORE-5")
    def test_an_end_does_not_release_what_another_has_leased_and_its_leases_end_with_it(self) -> None:
        place, store, pages = self._leased()
        other = self.other(place)
        self.must(other, "release")
        for end in (other, store):
            looked_up(end, pages.keys, lease_s=LONG_S)
        store.release(pages.keys)
        self._flood(store)
        got(store, pages)
        Call(other.close).result()
        self._until_evicted(store, pages)

    @law("STORE-5", "ALL-7", needs="other_and_forked_processes", timeout_s=120)
    def test_the_leases_of_a_reader_that_is_killed_end(self) -> None:
        place, store, pages = self._leased()
        self.must(self.other(place), "release")
        reader = self.beside(place)
        assert reader.run("lease", list(pages.keys)), "a lease was not granted"
        self._flood(store)
        got(store, pages)
        reader.child.kill()
        self._until_evicted(store, pages)

    @law("STORE-5", "STORE-6")
    def test_where_everything_is_leased_a_put_finds_no_room(self) -> None:
        _, store, _ = self._leased()
        more = self.batch(store, 48, sized_format(self._nbytes))
        reasons = []
        for at in range(48):
            reasons += put(store, more[at : at + 1])
            looked_up(store, more.keys[at : at + 1], lease_s=LONG_S)
        assert {*reasons} == {None, PutReason.NO_ROOM}
        assert reasons[-1] is PutReason.NO_ROOM
        got(store, more[[at for at, reason in enumerate(reasons) if reason is None]])
        store.release(more.keys)
        until(lambda: put(store, more[-1:]) == [None], what="room for a page after leases were released")

    @law("STORE-6", level="long")
    def test_a_page_that_another_end_is_to_read_outlives_others_until_it_has_been_read(self) -> None:
        place = self.place(self.budget_bytes)
        store, other = self.open(place), self.other(place)
        self.must(store, "expect_reader")
        pages = self.batch(store, 3, sized_format(self._nbytes))
        twice, once = pages[:1], pages[1:2]
        kept(store, once)
        for expected in (twice, twice, once):
            store.expect_reader(expected.keys)
        kept(store, pages)
        self._flood(store)
        assert held(store, pages) == [True, True, False]
        for expected in (once, twice):
            got(other, pages[:2] if expected is once else twice)
            self._until_evicted(store, expected)
            assert held(store, twice) == [expected is once], "another reader is still expected"

    def _until_evicted(self, store: Store, pages: Batch) -> None:
        def flooded() -> bool:
            self._flood(store)
            return not any(held(store, pages))

        until(flooded, what="that pages are evicted whose leases have ended")

    # -- readers that are too late -------------------------------------------------------------

    @law("STORE-5")
    def test_a_reader_that_is_held_up_while_its_page_is_evicted_gets_it_or_a_miss(self, end: str) -> None:
        """The memory of the page is used again while the reader copies it."""
        first, store = self.first_and(end, self.budget_bytes)
        for _ in range(4):
            pages = self.batch(first, 3, sized_format(self._nbytes))
            kept(first, pages)
            request, memory = held_request(pages, at=1)
            with memory:
                job = store.submit_get(request)
                memory.wait_begun()
                self._flood(first)
            results = ended(job)
            assert not (wrong := pages.unlike(pages.request(memory.inner), results)), wrong
            assert {*results} <= {None, *_LATE}


def _lying_bytes(folder: str) -> dict[str, int]:
    """The bytes in the folder's files, and in the memory of this process."""
    in_files = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # it is gone by now
                in_files += os.stat(os.path.join(parent, name)).st_blocks * 512
    return {"files": in_files, "memory": Footprint.taken().resident_bytes}
