"""Pages that are declared: coming until they are there, are given up, or their time is over."""

from __future__ import annotations

import time

from kvplug.transport import Presence, Store
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.pages import Batch
from kvplug_testing.contract.store.suite import (
    StoreSuite,
    at_both_ends,
    forgotten,
    got,
    kept,
    looked_up,
    missed,
)
from kvplug_testing.waits import Call, until

ABSENT, COMING, HELD = Presence.ABSENT, Presence.COMING, Presence.HELD


class Declared(StoreSuite):
    """One end declares, the same or another one asks."""

    def _ends(self, end: str) -> tuple[Store, Store]:
        """The end that declares, and the one that asks."""
        first, other = self.first_and(end)
        self.must(first, "declare")
        self.must(other, "declare")
        return first, other

    def _becomes(self, store: Store, pages: Batch, *wanted: Presence) -> None:
        """An end may learn of it a moment later."""
        until(
            lambda: looked_up(store, pages.keys) == list(wanted),
            within=5,
            what=f"that the store says {', '.join(wanted)} instead of {looked_up(store, pages.keys)}",
        )

    @law("STORE-8")
    @at_both_ends
    def test_a_declared_page_is_coming_until_it_is_put(self, end: str) -> None:
        first, other = self._ends(end)
        pages = self.batch(first, 4)
        kept(first, pages[:1])
        first.declare(pages.series, pages.keys[:3], timeout=60)
        self._becomes(other, pages, HELD, COMING, COMING, ABSENT)
        missed(other, pages[1:3])
        kept(first, pages[1:2])
        self._becomes(other, pages, HELD, HELD, COMING, ABSENT)
        got(other, pages[:2])

    @law("STORE-8")
    @at_both_ends
    def test_a_declared_page_that_is_given_up_is_absent(self, end: str) -> None:
        first, other = self._ends(end)
        pages = self.batch(first, 3)
        first.declare(pages.series, pages.keys, timeout=60)
        self._becomes(other, pages, COMING, COMING, COMING)
        first.withdraw(pages.keys[:2])
        first.withdraw(pages.keys[:1])
        self._becomes(other, pages, ABSENT, ABSENT, COMING)
        first.withdraw(self.batch(first, 2).keys)
        self._becomes(other, pages, ABSENT, ABSENT, COMING)

    @law("STORE-8", "STORE-3")
    @at_both_ends
    def test_a_declared_page_whose_time_is_over_is_absent(self, end: str) -> None:
        first, other = self._ends(end)
        pages = self.batch(first, 2)
        begun = time.monotonic()
        first.declare(pages.series, pages.keys[:1], timeout=0.4)
        first.declare(pages.series, pages.keys[1:], timeout=60)
        self._becomes(other, pages, COMING, COMING)
        until(lambda: looked_up(other, pages.keys[:1]) == [ABSENT], within=5, what="that it is absent again")
        assert time.monotonic() - begun >= 0.35, "its time was not over"
        assert looked_up(other, pages.keys) == [ABSENT, COMING]
        kept(first, pages)
        got(other, pages)

    @law("STORE-8")
    @at_both_ends
    def test_a_page_that_is_held_is_held_whatever_is_declared(self, end: str) -> None:
        first, other = self._ends(end)
        pages = self.batch(first, 2)
        kept(first, pages)
        first.declare(pages.series, pages.keys, timeout=0.2)
        self._becomes(other, pages, HELD, HELD)
        first.withdraw(pages.keys[:1])
        time.sleep(0.3)
        assert looked_up(other, pages.keys) == [HELD, HELD]
        got(other, pages)

    @law("STORE-8")
    @at_both_ends
    def test_a_page_that_is_declared_again_is_coming_for_longer(self, end: str) -> None:
        first, other = self._ends(end)
        pages = self.batch(first, 1)
        first.declare(pages.series, pages.keys, timeout=0.3)
        first.declare(pages.series, pages.keys, timeout=60)
        time.sleep(0.5)
        self._becomes(other, pages, COMING)

    @law("STORE-8")
    def test_what_an_end_that_is_closed_has_declared_is_absent(self) -> None:
        place = self.place()
        first = self.open(place)
        other = self.other(place)
        self.must(first, "declare")
        self.must(other, "declare")
        pages = self.batch(first, 2)
        other.declare(pages.series, pages.keys, timeout=60)
        self._becomes(first, pages, COMING, COMING)
        Call(other.close).result()
        self._becomes(first, pages, ABSENT, ABSENT)

    @law("STORE-8", "STORE-9")
    @at_both_ends
    def test_a_declared_page_that_is_removed_is_no_longer_coming(self, end: str) -> None:
        first, other = self._ends(end)
        pages = self.batch(first, 2)
        first.declare(pages.series, pages.keys, timeout=60)
        self._becomes(other, pages, COMING, COMING)
        forgotten(first, pages.keys[:1])
        self._becomes(other, pages, ABSENT, COMING)
