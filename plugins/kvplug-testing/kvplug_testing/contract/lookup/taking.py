"""``drop_select`` (law LOOKUP-4): it waits; one caller gets the entry, or it is available again."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import pytest

from kvplug import KvplugError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import LookupBuffer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import capacity_for, entry, sized, unlike
from kvplug_testing.contract.lookup.suite import (
    SOON_S,
    LookupSuite,
    at_both_ends,
    inserted,
    matched,
    missed,
    taken,
)
from kvplug_testing.waits import Call, raises, until


def take_until_quiet(end: LookupBuffer, query: Any, quiet_s: float = 1.0) -> list[int]:
    """Ids of all entries that one caller takes, until none arrives for ``quiet_s``."""
    ids = []
    try:
        while True:
            ids.append(end.drop_select(query, timeout=quiet_s).header.entry_id)
    except TimeoutError:
        return ids


class Taking(LookupSuite):
    """Waiting, concurrent callers, and timeouts at every moment."""

    @law("LOOKUP-4", "ALL-4")
    @at_both_ends
    def test_it_waits_until_its_timeout(self, end: str) -> None:
        store, buffer = self.opened(end)
        inserted(store, entry([1]))
        call = Call(lambda: buffer.drop_select([9], timeout=SOON_S))
        call.raised(TimeoutError)
        assert call.took_s > 0.9 * SOON_S, f"it gave up after {call.took_s:.2f} s of {SOON_S}"
        assert matched(buffer, [1]) == 1

    @law("LOOKUP-4")
    @at_both_ends
    def test_it_gets_an_entry_that_comes_while_it_waits(self, end: str) -> None:
        store, buffer = self.opened(end)
        within = waits.patience_s
        waiting = Call(lambda: buffer.drop_select([1, 2], timeout=within))
        assert waiting.is_blocked()
        inserted(store, entry([9]))
        inserted(store, entry([1, 2], extra=b"another"))
        assert waiting.is_blocked(), "an entry that does not match woke it for good"
        put = entry([1, 2, 3])
        inserted(store, put)
        assert not unlike(put, waiting.result())

    @law("LOOKUP-4")
    @at_both_ends
    def test_an_entry_that_was_taken_is_nobody_elses(self, end: str) -> None:
        store, buffer = self.opened(end)
        other = self.reach(store)
        inserted(store, entry([1, 2]))
        taken(buffer, [1, 2])
        for each in (store, buffer, other):
            assert matched(each, [1, 2]) == 0
            missed(each, None, timeout=0.05)
            raises(EntryGoneError, partial(each.select, [1, 2]))

    @law("LOOKUP-4", needs="waits_for_room")
    @at_both_ends
    def test_all_kinds_of_those_who_wait_are_woken_by_what_they_wait_for(self, end: str) -> None:
        store, buffer = self.opened(end, capacity_for(1))
        within = waits.patience_s
        full = sized([8], extra=b"full")
        inserted(store, full)
        waiting = {
            name: Call(partial(buffer.drop_select, query, extra=extra, timeout=within))
            for name, query, extra in (
                ("one", [1], b""),
                ("two", [2, 2], b""),
                ("any with e", None, b"e"),
            )
        }
        inserting = Call(
            lambda: [inserted(store, put) for put in (sized([2]), sized([5], extra=b"e"), sized([1, 1]))]
        )
        assert all(call.is_blocked(0.1) for call in (*waiting.values(), inserting))
        assert not unlike(full, taken(buffer, [8], extra=b"full"))  # frees capacity for all other calls
        inserting.result()
        assert {name: call.result().tokens.tolist() for name, call in waiting.items()} == {
            "one": [1, 1],
            "two": [2],
            "any with e": [5],
        }

    @law("LOOKUP-4", needs="waits_for_room")
    @at_both_ends
    def test_no_wake_up_is_lost_where_room_and_entries_are_waited_for(self, end: str) -> None:
        store, buffer = self.opened(end, capacity_for(1))
        within = waits.patience_s
        takers = [Call(lambda: buffer.drop_select([1], timeout=within)) for _ in range(8)]
        putters = [Call(lambda: inserted(store, sized([1, 2]))) for _ in range(8)]
        put = sorted(putter.result() for putter in putters)
        got = sorted(taker.result().header.entry_id for taker in takers)
        assert got == put, f"entries {put} were put in, and {got} were handed out"

    @law("LOOKUP-4", timeout_s=100)
    def test_an_entry_goes_to_one_of_many_racing_callers(self) -> None:
        store = self.hold()
        ends = [store, store, self.reach(store), self.reach(store)]
        queries = [[1], [1, 2], None, [1, 2, 3]]
        racing = [Call(partial(take_until_quiet, end, query)) for end in ends for query in queries]
        put = [inserted(store, entry([1, 2, 3, number % 3])) for number in range(120)]
        got = [entry_id for call in racing for entry_id in call.result(60)]
        twice = sorted({entry_id for entry_id in got if got.count(entry_id) > 1})
        assert not twice, f"the entries {twice} were handed to more than one caller"
        assert sorted(got) == put, f"the entries {sorted({*put} - {*got})} were not handed to any caller"

    # -- callers that give up --------------------------------------------------------------------

    @law("LOOKUP-4")
    @at_both_ends
    def test_who_waited_in_vain_takes_nothing_later(self, end: str) -> None:
        store, buffer = self.opened(end)
        for number in range(3):
            missed(buffer, [number], timeout=0.05)
        puts = [entry([number]) for number in range(3)]
        for put in puts:
            inserted(store, put)
        for number, put in enumerate(puts):
            assert matched(buffer, [number]) == 1, "a caller that had given up has taken an entry"
            assert not unlike(put, taken(buffer, [number]))

    @law("LOOKUP-4", "ALL-4", "ALL-5")
    def test_the_entry_of_a_caller_whose_time_is_up_in_the_middle_is_back(self) -> None:
        store = self.hold(capacity_for(1))
        taking = self.paused_call(store, "drop_select", SOON_S)
        taking.call.raised(TimeoutError)
        taking.data_pipe.resume()
        got = taken(store, [1, 2, 3])
        assert got.header.entry_id == taking.entry_id, "it is another entry now"
        assert not unlike(taking.put, got)
        again = sized([4])
        inserted(store, again)  # the bytes are free again
        assert not unlike(again, taken(taking.end, [4]))

    @law("LOOKUP-4", "ALL-5")
    @pytest.mark.parametrize("how", ["abort", "its data pipe breaks", "its signal pipe breaks"])
    def test_the_entry_of_a_caller_that_is_gone_in_the_middle_is_back(self, how: str) -> None:
        store = self.hold(capacity_for(1))
        our_signal, their_signal = self.pipe_pair()
        our_data, their_data = self.pipe_pair(**self.data_pipe_options)
        store.attach(their_signal, their_data)
        from kvplug_testing.contract.lookup.pausable_pipe import PausablePipe

        data_pipe = PausablePipe(our_data)
        buffer = self.endpoint().reach(our_signal, data_pipe)
        self.later(buffer.abort)
        put = sized([1, 2, 3], layers=8)
        entry_id = inserted(store, put)
        within = waits.patience_s
        taking = self.pause_in_entry(data_pipe, lambda: buffer.drop_select([1, 2, 3], timeout=within))
        assert matched(store, [1, 2, 3]) == 0, "it is being handed over, and others find it"
        end_it = {
            "abort": buffer.abort,
            "its data pipe breaks": our_data.abort,
            "its signal pipe breaks": our_signal.abort,
        }
        end_it[how]()
        data_pipe.resume()
        taking.raised(KvplugError)
        got = taken(store, [1, 2])
        assert got.header.entry_id == entry_id, "it is another entry now"
        assert not unlike(put, got)
        inserted(store, sized([4]))  # the bytes are free again

    @law("LOOKUP-4")
    def test_who_waits_for_a_caller_that_is_gone_takes_nothing(self) -> None:
        store = self.hold()
        buffer = self.reach(store)
        within = waits.patience_s
        waiting = Call(lambda: buffer.drop_select([1], timeout=within))
        assert waiting.is_blocked()
        buffer.abort()
        waiting.raised(KvplugError)
        time.sleep(0.1)
        put = entry([1])
        inserted(store, put)
        assert not unlike(put, taken(store, [1]))

    @law("LOOKUP-4")
    @at_both_ends
    def test_callers_that_give_up_just_as_their_entry_comes_lose_none(self, end: str) -> None:
        store, buffer = self.opened(end)
        moments = random.Random(5)
        for number in range(60):
            call = Call(lambda: buffer.drop_select([1], timeout=0.01))
            time.sleep(moments.uniform(0.006, 0.014))
            entry_id = inserted(store, entry([1, number]))
            call.end()
            if call.error is None:
                assert call.value.header.entry_id == entry_id
                missed(store, [1], timeout=0)
            else:
                call.raised(TimeoutError)
                until(partial(self._is_back, store, [1, number]), what="the entry of a caller that gave up")
                assert taken(store, [1]).header.entry_id == entry_id

    def _is_back(self, store: LookupBuffer, tokens: list[int]) -> bool:
        return matched(store, tokens) == len(tokens)
