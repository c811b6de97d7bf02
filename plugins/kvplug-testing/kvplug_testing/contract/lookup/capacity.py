"""The capacity (law LOOKUP-5): an insert waits for free bytes, makes room, or is refused."""

from __future__ import annotations

from functools import partial

import pytest

from kvplug import CapacityError, TimeoutError, UnsupportedError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import capacity_for, entry, sized, unlike
from kvplug_testing.contract.lookup.suite import (
    SOON_S,
    LookupSuite,
    at_both_ends,
    insert,
    inserted,
    matched,
    missed,
    taken,
)
from kvplug_testing.waits import Call, raises


class Capacity(LookupSuite):
    """Stores with capacity for a few entries."""

    @law("LOOKUP-5", needs="waits_for_room")
    @at_both_ends
    def test_an_insert_waits_for_room_and_goes_on_when_there_is_some(self, end: str) -> None:
        store, buffer = self.opened(end, capacity_for(2))
        puts = [sized([number]) for number in (1, 2, 3)]
        for put in puts[:2]:
            inserted(store, put)
        waiting = Call(lambda: inserted(store, puts[2]))
        assert waiting.is_blocked(), "a third entry was stored where there is room for two"
        assert not unlike(puts[0], taken(buffer, [1]))
        waiting.result()
        assert not unlike(puts[2], taken(buffer, [3]))

    @law("LOOKUP-5", "ALL-4", needs="waits_for_room")
    def test_an_insert_that_finds_no_room_in_time_stores_nothing(self) -> None:
        store = self.hold(capacity_for(1))
        inserted(store, sized([1]))
        call = Call(lambda: insert(store, sized([2]), timeout=SOON_S))
        call.raised(TimeoutError)
        assert call.took_s > 0.9 * SOON_S, f"it gave up after {call.took_s:.2f} s of {SOON_S}"
        raises(TimeoutError, lambda: insert(store, sized([2]), timeout=0))
        assert matched(store, [2]) == 0, "an insert that raised TimeoutError has stored its entry"
        taken(store, [1])
        missed(store, None)
        assert matched(store, [2]) == 0, "an insert that raised TimeoutError has stored its entry later"

    @law("LOOKUP-5", needs="makes_room")
    def test_an_insert_makes_room_and_leaves_what_is_being_read(self) -> None:
        store = self.hold(capacity_for(4))
        reading = self.paused_call(store, "select")
        for number in range(10, 20):
            inserted(store, sized([number]))
            assert matched(store, [number]) == 1, "what was inserted last is not there"
            assert matched(store, [1, 2, 3]) == 3, "an entry was evicted while it was being read"
        held = [number for number in range(10, 20) if matched(store, [number])]
        assert len(held) <= 3, f"beside the entry that is read there is room for 3, and {held} are held"
        reading.data_pipe.resume()
        assert not unlike(reading.put, reading.call.result())

    @law("LOOKUP-5", "ALL-4", needs="makes_room")
    @pytest.mark.parametrize("verb", ["select", "drop_select"])
    def test_an_insert_waits_where_all_that_is_held_is_being_received(self, verb: str) -> None:
        store = self.hold(capacity_for(1))
        receiving = self.paused_call(store, verb)
        Call(lambda: insert(store, sized([4]), timeout=SOON_S)).raised(TimeoutError)
        waiting = Call(lambda: inserted(store, sized([5])))
        assert waiting.is_blocked(), "an entry was evicted while another end was receiving it"
        receiving.data_pipe.resume()
        assert not unlike(receiving.put, receiving.call.result())
        waiting.result()
        assert [matched(store, [token]) for token in (1, 4, 5)] == [0, 0, 1]

    @law("LOOKUP-5")
    def test_an_entry_larger_than_the_budget_is_refused_at_once(self) -> None:
        store = self.hold(capacity_for(2))
        inserted(store, sized([1]))
        call = Call(
            lambda: store.insert(
                [5], None, None, None, entry([5], hidden=capacity_for(2) // 4 + 1).hidden, timeout=None
            )
        )
        call.raised(CapacityError)
        assert matched(store, [1]) == 1, "entries went for one that could not be stored"

    @law("LOOKUP-5")
    def test_an_insert_that_is_refused_takes_no_room(self) -> None:
        store = self.hold(capacity_for(1))
        good = sized([1, 2])
        for _ in range(3):
            for key, value in (
                (good.hidden, None),
                (good.key, good.value[:1]),
                (good.key[:, :1], good.value),
            ):
                raises(ValueError, partial(store.insert, [1, 2], None, key, value, good.hidden))
        inserted(store, good)
        assert not unlike(good, taken(store, [1, 2]))

    @law("LOOKUP-5", needs="waits_for_room")
    @at_both_ends
    def test_what_was_taken_gives_its_bytes_back(self, end: str) -> None:
        store, buffer = self.opened(end, capacity_for(2))
        for number in range(60):
            for each in (1, 2):
                call = Call(partial(insert, store, sized([1, each]))).end(waits.patience_s + 1)
                assert call.error is None, f"in round {number} of taking everything: {call.error}"
            for each in (1, 2):
                assert taken(buffer, [1, each]).header.num_layers == 2

    @law("LOOKUP-5", "ALL-5")
    def test_one_who_takes_its_time_holds_up_neither_inserts_nor_others(self) -> None:
        store = self.hold()
        (slow, data_pipe), quick = self.reach_pausable(store), self.reach(store)
        put = entry([1, 2, 3], layers=8, hidden=30_000)  # more than the data pipe holds
        inserted(store, put)
        within = waits.patience_s
        receiving = self.pause_in_entry(data_pipe, lambda: slow.select([1, 2, 3], timeout=within))
        for number in range(10):
            other = entry([5, number])
            inserted(store, other)
            assert not unlike(other, taken(quick, [5, number])), "another end was held up, or given another's"
            assert matched(quick, [1, 2]) == 2
        assert not receiving.ended
        data_pipe.resume()
        assert not unlike(put, receiving.result())

    @law("LOOKUP-5")
    def test_an_insert_at_a_reaching_end_stores_or_says_that_it_cannot(self) -> None:
        store = self.hold()
        buffer = self.reach(store)
        put = entry([1, 2])
        call = Call(lambda: insert(buffer, put)).end(waits.patience_s + 1)
        if isinstance(call.error, UnsupportedError):
            missed(store, None, timeout=0)
            return
        assert call.error is None, f"{call.error!r} is neither an entry stored nor UnsupportedError"
        assert not unlike(put, taken(store, [1, 2]))
