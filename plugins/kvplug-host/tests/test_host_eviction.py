"""Which page goes: those that another engine is to read go last, and not before they have no room."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvplug_host.eviction import MAX_WAIT_S, Eviction

MOST = 6
KEYS = st.sampled_from([bytes([number]) for number in range(2 * MOST)])


def anything(key: bytes) -> bool:
    return True


class Pages:
    """So many pages, in the order that is judged; and which of them wait, by plain counting."""

    def __init__(self, most: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.order = Eviction(clock)
        self.most = most
        self.held: set[bytes] = set()
        self.waiting: Counter[bytes] = Counter()
        self.pinned: set[bytes] = set()

    def put(self, key: bytes, num_readers: int = 0) -> None:
        """As the index does: what is held is expected, for what is not room is made first."""
        if key in self.held:
            for _ in range(num_readers):
                self.order.expect(key)
        else:
            while len(self.held) >= self.most:
                gone = self.order.victim(self.may_go) or self.order.longest_waiting(self.may_go)
                if gone is None:
                    return
                others = [other for other in self.held - self.pinned if not self.waiting[other]]
                assert not self.waiting[gone] or not others, f"{gone!r} waits, and {others} do not"
                self.held.remove(gone)
                del self.waiting[gone]
            self.held.add(key)
            self.order.add(key, num_readers)
        if num_readers:
            self.waiting[key] += num_readers

    def may_go(self, key: bytes) -> bool:
        assert key in self.held
        return key not in self.pinned

    def read(self, key: bytes) -> None:
        if key in self.held:
            self.order.read(key)
            self.waiting[key] -= self.waiting[key] > 0


class Machine(RuleBasedStateMachine):
    """Puts, reads, uses, pins and removals in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(MOST)

    @rule(key=KEYS, num_readers=st.integers(0, 2))
    def put(self, key: bytes, num_readers: int) -> None:
        self.pages.put(key, num_readers)

    @rule(key=KEYS)
    def read(self, key: bytes) -> None:
        self.pages.read(key)

    @rule(key=KEYS)
    def use(self, key: bytes) -> None:
        if key in self.pages.held:
            self.pages.order.use(key)
            self.pages.order.refresh(key)

    @rule(key=KEYS)
    def pin(self, key: bytes) -> None:
        if key in self.pages.held:
            self.pages.pinned.add(key)

    @rule(key=KEYS)
    def unpin(self, key: bytes) -> None:
        if key in self.pages.pinned:
            self.pages.pinned.remove(key)
            self.pages.order.restore(key)

    @rule(key=KEYS)
    def remove(self, key: bytes) -> None:
        if key in self.pages.held - self.pages.pinned:
            self.pages.held.remove(key)
            del self.pages.waiting[key]
            self.pages.order.discard(key)

    @invariant()
    def it_knows_what_waits(self) -> None:
        order, waiting = self.pages.order, +self.pages.waiting
        assert len(order) == len(self.pages.held)
        assert {key for key in self.pages.held if order.is_waiting(key)} == set(waiting)
        assert order.num_waiting == len(waiting)


TestMachine = Machine.TestCase


@pytest.mark.parametrize("num_in_flight", [1, 8, 32])
def test_while_the_prompts_in_flight_have_room_none_of_their_pages_is_lost(num_in_flight: int) -> None:
    """Prefill saves, decode loads any of the prompts in flight: in a store that was filled by a thousand."""
    rng = random.Random(1)
    pages, in_flight, system = Pages(20 * num_in_flight + 10), [], [b"system %d" % at for at in range(10)]
    for number in range(1000):
        prompt = [*system, *(b"%d %d" % (number, at) for at in range(rng.randint(1, 20)))]
        for key in reversed(prompt):
            pages.put(key, 1)
        in_flight.append(prompt)
        if len(in_flight) == num_in_flight:
            for key in in_flight.pop(rng.randrange(num_in_flight)):
                assert key in pages.held, f"prompt {number} was saved when a page of another one was lost"
                pages.read(key)


def test_a_page_that_was_handed_over_goes_before_those_that_were_used_again() -> None:
    pages = Pages(3)
    for key in (b"used", b"used again", b"handed over"):
        pages.put(key, key == b"handed over")
        if key != b"handed over":
            pages.order.use(key)
    pages.read(b"handed over")
    pages.put(b"new", 1)
    assert pages.held == {b"used", b"used again", b"new"}


def test_a_page_whose_reader_does_not_come_in_time_is_one_of_the_others() -> None:
    now = 0.0
    pages = Pages(3, lambda: now)
    pages.put(b"late", 2)
    now = MAX_WAIT_S / 2
    pages.put(b"in time", 1)
    pages.put(b"another")
    now = MAX_WAIT_S
    pages.waiting.clear()
    pages.put(b"new")
    assert pages.held == {b"in time", b"another", b"new"}
    assert pages.order.num_waiting == 1
