"""Leases postpone eviction, and readers that are too late get the right bytes or a miss."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from kvplug import PeerGoneError
from kvplug.transport import Deadline, MissReason, Presence, PutReason, Store
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.store.held_memory import held_request
from kvplug_testing.contract.store.pages import Batch, sized_format
from kvplug_testing.contract.store.suite import (
    Place,
    StoreSuite,
    at_both_ends,
    ended,
    got,
    got_or_missed,
    held,
    kept,
    looked_up,
    missed,
    put,
)
from kvplug_testing.waits import Call, until

LONG_S = 600.0
_STOPS = 7
_FLOOD_S = 2.0
"""How long a store is flooded in one go, if that is slow."""
LATE = {MissReason.ABSENT, MissReason.EVICTED, MissReason.EXPIRED, MissReason.CORRUPT, MissReason.IDENTITY}
"""Why a page that was evicted during a read may be missed."""


def read_again_and_again(parent: peers.Parent, suite: Any, store: Store, name: bytes, nbytes: int) -> Any:
    """In another process: lease and get pages, over and over, until told to end. Returns what was wrong."""
    pages = suite.batch(store, 16, sized_format(nbytes), namespace=name)
    parent.send("ready")
    rounds, missing = 0, 0
    # A writer of the same database, say, holds up each call until its deadline.
    patience_s = waits.patience_s + suite.timeout_s
    while not parent.poll():
        store.submit_lookup(pages.keys, lease_s=0.05).wait(patience_s)
        request = pages.empty()
        results = store.submit_get(request).wait(patience_s)
        if wrong := pages.unlike(request, results):
            return f"round {rounds}: {wrong}"
        rounds += 1
        missing += sum(reason is not None for reason in results)
        parent.send([rounds, missing])
    return ""


def lease(parent: peers.Parent, suite: Any, store: Store, name: bytes, nbytes: int) -> None:
    """In another process: lease pages for long, and wait to be killed."""
    pages = suite.batch(store, 4, sized_format(nbytes), namespace=name)
    parent.send([str(each) for each in looked_up(store, pages.keys, lease_s=LONG_S)])
    parent.recv(None)


class Leases(StoreSuite):
    """A small budget, and floods of other pages."""

    @property
    def _nbytes(self) -> int:
        """Bytes of a page of which sixteen and more fit."""
        return self.budget_bytes // 24

    def _flood(self, store: Store, count: int = 48) -> Iterator[list[PutReason | None]]:
        """Put so many other pages, one after the other, and use each: a store may keep a page that was used
        before those that are seen once."""
        for _ in range(count):
            pages = self.batch(store, 1, sized_format(self._nbytes))
            results = put(store, pages)
            got_or_missed(store, pages)
            yield results

    def _flood_all(self, store: Store) -> None:
        for _ in self._flood(store):
            pass

    def _leased(self, count: int = 4, **given: Any) -> tuple[Place, Store, Batch]:
        """A store with a small budget, and pages in it."""
        place = self.place(self.budget_bytes)
        store = self.open(place)
        self.must(store, "release")
        pages = self.batch(store, count, sized_format(self._nbytes), **given)
        kept(store, pages)
        return place, store, pages

    @law("STORE-5")
    def test_a_leased_page_outlives_a_flood_until_it_is_released(self) -> None:
        _, store, pages = self._leased()
        assert looked_up(store, pages.keys[:2], lease_s=LONG_S) == [Presence.HELD] * 2
        self._flood_all(store)
        assert held(store, pages) == [True, True, False, False]
        got(store, pages[:2])
        store.release(pages.keys[:1])
        self._flood_all(store)
        assert held(store, pages) == [False, True, False, False]
        got(store, pages[1:2])

    @law("STORE-5")
    def test_a_lease_that_has_expired_protects_no_more(self) -> None:
        _, store, pages = self._leased()
        looked_up(store, pages.keys, lease_s=0.1)
        time.sleep(0.2)
        self._flood_all(store)
        missed(store, pages)

    @law("STORE-5")
    def test_a_lease_can_be_prolonged_and_a_shorter_one_does_not_end_it(self) -> None:
        _, store, pages = self._leased()
        looked_up(store, pages.keys, lease_s=0.1)
        looked_up(store, pages.keys, lease_s=LONG_S)
        looked_up(store, pages.keys, lease_s=0.01)
        looked_up(store, pages.keys)
        time.sleep(0.2)
        self._flood_all(store)
        got(store, pages)

    @law("STORE-5")
    def test_the_leases_of_an_end_that_is_closed_end(self) -> None:
        place, store, pages = self._leased()
        other = self.other(place)
        self.must(other, "release")
        assert looked_up(other, pages.keys, lease_s=LONG_S) == [Presence.HELD] * 4
        self._flood_all(store)
        got(store, pages)
        Call(other.close).result()
        self._until_evicted(store, pages)

    @law("STORE-5")
    def test_one_end_does_not_release_what_another_has_leased(self) -> None:
        place, store, pages = self._leased()
        other = self.other(place)
        self.must(other, "release")
        looked_up(other, pages.keys, lease_s=LONG_S)
        looked_up(store, pages.keys, lease_s=LONG_S)
        store.release(pages.keys)
        self._flood_all(store)
        got(other, pages)

    @law("STORE-5", "ALL-7", needs="other_and_forked_processes", timeout_s=120)
    def test_the_leases_of_a_reader_that_is_killed_end(self) -> None:
        name = b"leased by a reader that is killed"
        place, store, pages = self._leased(namespace=name)
        self.must(self.other(place), "release")
        reader = self.remote(place, lease, name, self._nbytes)
        assert reader.recv(waits.patience_s) == ["held"] * 4
        self._flood_all(store)
        got(store, pages)
        reader.kill()
        self._until_evicted(store, pages)

    @law("STORE-5", "STORE-6")
    def test_where_everything_is_leased_a_put_finds_no_room(self) -> None:
        _, store, _ = self._leased()
        leased = []
        for _ in range(48):
            pages = self.batch(store, 1, sized_format(self._nbytes))
            (reason,) = put(store, pages)
            if reason is not None:
                assert reason is PutReason.NO_ROOM, f"a put without room gave {reason}"
            elif looked_up(store, pages.keys, lease_s=LONG_S) == [Presence.HELD]:
                leased.append(pages)
        assert put(store, self.batch(store, 1, sized_format(self._nbytes))) == [PutReason.NO_ROOM]
        for pages in leased:
            got(store, pages)
        usage = store.usage()
        assert usage.budget_bytes is None or usage.used_bytes <= usage.budget_bytes
        for pages in leased:
            store.release(pages.keys)
        until(
            lambda: put(store, self.batch(store, 1, sized_format(self._nbytes))) == [None],
            what="that there is room once the leases were released",
        )

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
        self._flood_all(store)
        assert held(store, pages) == [True, True, False]
        for expected in (once, twice):
            got(other, pages[:2] if expected is once else twice)
            self._until_evicted(store, expected)
            assert held(store, twice) == [expected is once], "another reader is still expected"

    @law("STORE-5")
    @at_both_ends
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
                self._flood_all(first)
            results = ended(job)
            assert not (wrong := pages.unlike(pages.request(memory.inner), results)), wrong
            assert set(results) <= {None, *LATE}

    @law("STORE-5", needs="other_and_forked_processes", timeout_s=180)
    def test_a_reader_that_is_stopped_for_longer_than_its_lease_gets_no_wrong_byte(self) -> None:
        """Stop it at any point, use all memory of the store for other pages, and let it go on."""
        place = self.place(self.budget_bytes)
        store = self.open(place)
        name = b"read by a reader that is stopped"
        pages = self.batch(store, 16, sized_format(self._nbytes), namespace=name)
        reader = self.remote(place, read_again_and_again, name, self._nbytes, timeout_s=600)
        assert reader.recv(waits.patience_s) == "ready"
        for number in range(_STOPS):
            put(store, pages)
            before = reader.recv(waits.patience_s)
            if not isinstance(before, list):
                break
            time.sleep(0.003 * (number % 7))
            try:
                reader.stop()
            except PeerGoneError:
                break  # its last words say why
            time.sleep(0.1)  # its leases expire
            limit = Deadline.after(_FLOOD_S)
            for _ in self._flood(store, 30):
                if limit.expired:  # a database, say, waits for the reader's lock, and holds up each call
                    break
            reader.cont()
        with contextlib.suppress(PeerGoneError):
            reader.send("end")
        last: Any = None
        while last is None:
            # Its last get may last until its deadline.
            said = _next(reader, waits.patience_s + self.timeout_s)
            last = said if isinstance(said, str) else None
        assert not last, f"a reader that was stopped got wrong bytes in {last}"

    def _until_evicted(self, store: Store, pages: Batch) -> None:
        def flooded() -> bool:
            self._flood_all(store)
            return not any(held(store, pages))

        until(flooded, what="that pages are evicted whose leases have ended")
        got_or_missed(store, pages)


def _next(reader: peers.Peer, within: float) -> Any:
    """The next value that the reader sent, or its result."""
    try:
        return reader.recv(within)
    except AssertionError:
        return reader.result(within)
