"""A call for many pages is done in slices. What other calls see and do in between: hypothesis chooses it."""

from __future__ import annotations

import secrets
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvplug.transport import Presence, PutReason
from kvplug_host.pages.index import Entry
from kvplug_host.pages.pages import Pages
from kvplug_testing import waits
from kvplug_testing.contract.store.index import Index

KEYS = [bytes([number]) + bytes(31) for number in range(16)]
SERIES = [b"a" * 16, b"b" * 16]
"""Of keys with even and with odd numbers."""
SIZES = [56, 504, 1016]
"""Bytes of pages that share no chunk."""
HOLDERS = ["first", "second", "third"]

some_keys = st.lists(st.sampled_from(KEYS), min_size=1, max_size=8, unique=True)
holders = st.sampled_from(HOLDERS)


class Alarms:
    """Calls at their time when :meth:`ring` is called, and not in another thread."""

    def __init__(self) -> None:
        self._due: list[tuple[float, Callable[[], object]]] = []

    def at(self, when: float, call: Callable[[], object]) -> Any:
        self._due.append((when, call))
        return SimpleNamespace(cancel=lambda: None)

    def tasks(self) -> list[Any]:
        return []

    def ring(self) -> None:
        while late := [each for each in self._due if each[0] <= time.monotonic()]:
            self._due.remove(late[0])
            late[0][1]()


@contextmanager
def opened(num_segments: int, segment_bytes: int, jobs: Any) -> Iterator[Pages]:
    pages = Pages(num_segments, segment_bytes, jobs)
    try:
        yield pages
    finally:
        pages.close()


def put(pages: Pages, keys: list[bytes], nbytes: int) -> None:
    """Put pages without bytes, as far as there is room."""
    for key in keys:
        with pages.changing() as index:
            if key in index.pages:
                continue
            while (slot := index.reserve(nbytes)) is None:
                pass
            if isinstance(slot, PutReason):
                continue
            series, generation = SERIES[key[0] % 2], pages.segments.next_generation()
            entry = index.publish(
                key, series, slot, payload_bytes=nbytes, header_bytes=0, generation=generation
            )
            assert entry is not None
            index.log_stored(series, [key])


class Machine(RuleBasedStateMachine):
    """A store of two segments. Each slice is of one page, and other calls come between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.alarms = Alarms()
        self._opened = opened(2, 4096, self.alarms)
        self.pages = self._opened.__enter__()
        self.indices: list[Index] = []
        self.pinned: list[list[Entry | None]] = []
        self._patches = [
            mock.patch("kvplug_host.pages.pages.SLICE", 1),
            mock.patch("kvplug_host.pages.pages.LOOKUP_SLICE", 1),
            mock.patch("kvplug_host.pages.pages.PUT_SLICE", 1),
            mock.patch("kvplug_host.pages.index.MOST_LOOKED_AT", 1),
            mock.patch("kvplug_host.eviction.MOST_LOOKED_AT", 2),
            mock.patch.object(self.pages.lock, "give_way", self._give_way),
        ]
        for patch in self._patches:
            patch.start()
        self._data: Any = None
        self._dying: str | None = None
        self.subscribe_now()

    def teardown(self) -> None:
        for patch in self._patches:
            patch.stop()
        self._opened.__exit__(None, None, None)

    # -- what comes in between -----------------------------------------------------------------

    def _give_way(self) -> None:
        data, self._data = self._data, None
        if data is None:
            return
        if data.draw(st.integers(0, 3)) == 0:
            calls = [self.put_now, self.remove_now, self.lease_now, self.declare_now, self.clear_now]
            calls += [self.release_now, self.pin_now, self.unpin_now, self.withdraw_now, self.use_now]
            data.draw(st.sampled_from(calls))(data)
            if data.draw(st.integers(0, 9)) == 0:
                self.subscribe_now()
        self._data = data

    def put_now(self, data: Any) -> None:
        busy = [
            entry
            for part in self.pages.index.pages.parts
            for entry in part.values()
            if entry.readers or entry.is_leased(0.0)
        ]
        put(self.pages, data.draw(some_keys), data.draw(st.sampled_from(SIZES)))
        for entry in busy:
            assert self.pages.index.pages.get(entry.key) is entry, "a page went that was leased or read"

    def remove_now(self, data: Any) -> None:
        self.pages.remove(data.draw(some_keys))

    def clear_now(self, data: Any) -> None:
        self.pages.remove(None)

    def lease_now(self, data: Any) -> None:
        holder = data.draw(st.sampled_from([each for each in HOLDERS if each != self._dying]))
        self.pages.lookup(data.draw(some_keys), holder, 600.0)

    def release_now(self, data: Any) -> None:
        self.pages.release(data.draw(some_keys), data.draw(holders))

    def declare_now(self, data: Any) -> None:
        holder = data.draw(st.sampled_from([each for each in HOLDERS if each != self._dying]))
        for_s, number = data.draw(st.sampled_from([None, 0.0])), data.draw(st.integers(0, 1))
        keys = [key for key in data.draw(some_keys) if key[0] % 2 == number]
        self.pages.declare(holder, SERIES[number], keys, for_s)

    def withdraw_now(self, data: Any) -> None:
        self.pages.withdraw(data.draw(some_keys), data.draw(holders))

    def pin_now(self, data: Any) -> None:
        self.pinned.append(self.pages.pin(data.draw(some_keys)))

    def unpin_now(self, data: Any) -> None:
        if self.pinned:
            self.pages.unpin(self.pinned.pop(), data.draw(holders))

    def use_now(self, data: Any) -> None:
        self.pages.use(data.draw(some_keys))
        self.pages.expect_reader(data.draw(some_keys), data.draw(holders))

    def subscribe_now(self) -> None:
        index = Index()
        self.indices.append(index)
        self.pages.subscribe(index)

    # -- calls in slices -----------------------------------------------------------------------

    @contextmanager
    def _between(self, data: Any) -> Iterator[None]:
        self._data = data
        try:
            yield
        finally:
            self._data = None
        self.alarms.ring()

    @rule(nbytes=st.sampled_from(SIZES))
    def fill(self, nbytes: int) -> None:
        put(self.pages, KEYS, nbytes)

    @rule(data=st.data())
    def call(self, data: Any) -> None:
        calls = [self.put_now, self.lease_now, self.release_now, self.declare_now, self.withdraw_now]
        calls += [self.pin_now, self.unpin_now, self.use_now, self.remove_now]
        with self._between(data):
            data.draw(st.sampled_from(calls))(data)

    @rule(data=st.data())
    def subscribe(self, data: Any) -> None:
        with self._between(data):
            self.subscribe_now()

    @rule(data=st.data())
    def listed(self, data: Any) -> None:
        before = {key for key in KEYS if self._is_held(key, SERIES[0])}
        assert {*self.pages.keys(SERIES[0])} == before
        with self._between(data):
            self.pages.keys(SERIES[0])

    @rule(data=st.data(), keys=st.none() | st.just(KEYS))
    def remove(self, data: Any, keys: list[bytes] | None) -> None:
        before = {key: self.pages.index.pages.get(key) for key in KEYS}
        with self._between(data):
            self.pages.remove(keys)
        for key, entry in before.items():
            assert entry is None or self.pages.index.pages.get(key) is not entry, "a page was not removed"

    @rule(data=st.data(), holder=holders)
    def die(self, data: Any, holder: str) -> None:
        self._dying = holder
        with self._between(data):
            self.pages.forget_holders([holder])
        self._dying = None
        for key in KEYS:
            entry, declared = self.pages.index.pages.get(key), self.pages.index.declared.get(key)
            assert entry is None or holder not in (entry.leases or ()), "a lease of it is left"
            assert declared is None or holder not in declared.until, "it is expected to put a page"

    # -- what is true after each ---------------------------------------------------------------

    def _is_held(self, key: bytes, series: bytes) -> bool:
        entry = self.pages.index.pages.get(key)
        return entry is not None and entry.series == series

    @invariant()
    def every_listener_knows_what_there_is(self) -> None:
        index = self.pages.index
        for series in SERIES:
            held = {key for key in KEYS if self._is_held(key, series)}
            coming = {
                key for key in KEYS if (each := index.declared.get(key)) is not None and each.series == series
            }
            found = self.pages.lookup(KEYS, "nobody")
            assert {key for key, each in zip(KEYS, found, strict=True) if each is Presence.HELD} >= held
            for listener in self.indices:
                listener.check()
                assert listener.knows(SimpleNamespace(id=series), held, coming)  # type: ignore[arg-type]

    @invariant()
    def every_slot_is_free_or_of_one_page(self) -> None:
        table, taken = self.pages.index.slots, 0
        entries = {id(entry): entry for part in self.pages.index.pages.parts for entry in part.values()}
        entries |= {id(entry): entry for pin in self.pinned for entry in pin if entry is not None}
        offsets = [entry.offset for entry in entries.values()]
        assert len({*offsets}) == len(offsets), "two pages have one slot"
        for size in table.sizes.values():
            for chunk in size.chunks:
                assert chunk.taken + len({*chunk.free}) + size.num_slots - chunk.fresh == size.num_slots
                taken += chunk.taken
        assert taken == len(entries), "a slot is neither free nor of a page"


Machine.TestCase.settings = settings(stateful_step_count=15)
TestMachine = Machine.TestCase


def filled(pages: Pages, count: int) -> list[bytes]:
    keys = [secrets.token_bytes(32) for _ in range(count)]
    put(pages, keys, 504)
    return keys


@pytest.mark.parametrize("what", ["a reader ends", "a snapshot", "all pages are removed", "pages are leased"])
def test_others_get_their_turn_while_a_call_for_many_pages_is_under_way(what: str) -> None:
    with opened(1, 8 << 20, Alarms()) as pages:
        keys = filled(pages, 15_000)
        pages.lookup(keys, "reader", 600.0)
        calls: dict[str, Callable[[], object]] = {
            "a reader ends": lambda: pages.forget_holders(["reader"]),
            "a snapshot": lambda: [pages.subscribe(lambda event: None) for _ in range(20)],
            "all pages are removed": lambda: pages.remove(None),
            "pages are leased": lambda: pages.lookup(keys, "another", 600.0),
        }
        busy, turns = threading.Thread(target=calls[what], daemon=True), 0
        busy.start()
        while busy.is_alive():
            with pages.lock:
                turns += 1
        busy.join(waits.patience_s)
        assert turns > 20, f"the lock was had {turns} times meanwhile"


def test_while_all_pages_are_removed_a_put_has_the_room_of_those_that_are_still_in_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with opened(1, 4096, Alarms()) as pages:
        put(pages, KEYS, 504)
        old = [key for key in KEYS if key in pages.index.pages]
        new = KEYS[: len(old)]
        monkeypatch.setattr("kvplug_host.pages.pages.SLICE", 1)
        monkeypatch.setattr(pages.lock, "give_way", lambda: put(pages, new, 504))
        pages.remove(None)
        assert len(old) == 8 and [key for key in KEYS if key in pages.index.pages] == new


def test_a_page_that_was_read_while_it_was_leased_goes_when_the_lease_has_expired() -> None:
    with opened(1, 4096, Alarms()) as pages:
        old = KEYS[:8]
        put(pages, old, 504)
        read = pages.pin(old)

        def is_put() -> bool:
            put(pages, KEYS[-1:], 504)
            return KEYS[-1] in pages.index.pages

        assert not is_put(), "a page went that is read"
        pages.lookup(old, "first", 0.1)
        pages.unpin(read, "second")
        waits.until(is_put, what="that a page goes")


def test_pages_that_are_leased_and_declared_again_and_again_take_no_more_memory() -> None:
    with opened(1, 6 * 4096, Alarms()) as pages:
        held, coming = filled(pages, 48), [secrets.token_bytes(32) for _ in range(50)]

        def grown(rounds: int) -> int:
            before, _ = tracemalloc.get_traced_memory()
            for _ in range(rounds):
                for key in held:
                    pages.release([key], "reader")
                    pages.lookup([key], "reader", 600.0)
                for key in coming:
                    pages.withdraw([key], "reader")
                    pages.declare("reader", SERIES[0], [key], None)
                pages.unpin(pages.pin(held), "another")
                put(pages, coming[:1], 504)  # finds no page that may go
            return tracemalloc.get_traced_memory()[0] - before

        tracemalloc.start()
        try:
            grown(1)
            assert grown(100) < 20_000
        finally:
            tracemalloc.stop()


def test_a_put_without_room_looks_once_at_all_pages_of_another_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(1, 4096, Alarms()) as pages:
        put(pages, KEYS[:8], 504)
        pages.lookup(KEYS[7:8], "reader", 600.0)  # the last page of the only chunk
        request = SimpleNamespace(keys=KEYS[8:], memory=None)
        new: Any = SimpleNamespace(pages=request, is_over=False, is_forgotten=lambda key: False)
        looked_at = mock.Mock(side_effect=Entry.is_leased)
        monkeypatch.setattr(Entry, "is_leased", lambda entry, now: looked_at(entry, now))
        slots, results = pages.reserve(new, dict.fromkeys(range(8), 1016))
        assert not slots and results == [(at, PutReason.NO_ROOM) for at in range(8)]
        assert looked_at.call_count < 40
