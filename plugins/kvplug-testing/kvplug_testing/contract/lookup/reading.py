"""``select`` (law LOOKUP-7): the entry with the longest prefix stays in the buffer and is leased while it
is read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvplug import TimeoutError
from kvplug.engine import EntryGoneError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import Sink, SinkError, capacity_for, entry, sized, unlike
from kvplug_testing.contract.lookup.suite import (
    SOON_S,
    LookupSuite,
    at_both_ends,
    inserted,
    matched,
    missed,
    read,
    taken,
)
from kvplug_testing.waits import Call, raises


class Reading(LookupSuite):
    """Slow readers, and readers that fail."""

    @law("LOOKUP-7")
    @at_both_ends
    def test_it_leaves_the_entry_where_it_is(self, end: str) -> None:
        store, buffer = self.opened(end)
        put = entry([1, 2, 3])
        entry_id = inserted(store, put)
        for query in ([1, 2, 3], [1], [1, 2, 9], [1, 2, 3, 4, 5]):
            got = read(buffer, query)
            assert got.header.entry_id == entry_id
            assert not unlike(put, got)
            assert matched(buffer, [1, 2, 3]) == 3, "an entry that was read is not held any more"
        assert not unlike(put, taken(buffer, [1, 2, 3]))

    @law("LOOKUP-7")
    @at_both_ends
    def test_it_reads_the_longest_prefix_or_says_at_once_that_there_is_none(self, end: str) -> None:
        store, buffer = self.opened(end)
        puts = {tuple(tokens): entry(tokens) for tokens in ([1], [1, 2, 9, 9], [1, 2, 3, 4], [5])}
        for put in puts.values():
            inserted(store, put)
        for query, found in (
            ([1, 2, 3, 7], (1, 2, 3, 4)),
            ([1, 2, 3, 4, 5], (1, 2, 3, 4)),
            ([1, 2, 9], (1, 2, 9, 9)),
            ([5, 1, 2, 3], (5,)),
        ):
            got = read(buffer, query)
            assert tuple(got.tokens.tolist()) == found, f"{query} shares most with {found}"
            assert not unlike(puts[found], got)
        assert read(buffer, [1, 2, 3, 7], min_tokens=3).tokens.tolist() == [1, 2, 3, 4]
        for query, least in (([7], 1), ([], 1), ([1, 2, 3, 7], 4), ([5, 1], 2)):
            call = Call(partial(buffer.select, query, min_tokens=least, timeout=None))
            call.raised(EntryGoneError)

    @law("LOOKUP-7")
    @at_both_ends
    def test_while_it_is_read_an_entry_can_be_read_by_others_and_taken_by_nobody(self, end: str) -> None:
        store, buffer = self.opened(end)
        other = self.reach(store)
        put = entry([1, 2, 3])
        inserted(store, put)
        sink = Sink(wait_at=1)
        within = waits.patience_s
        reading = Call(lambda: buffer.select([1, 2, 3], sink=sink, timeout=within))
        assert sink.waits.wait(waits.patience_s), "the sink was not given a second layer"
        for each in (store, other):
            assert matched(each, [1, 2, 3]) == 3
            assert not unlike(put, read(each, [1, 2, 3]))
            missed(each, [1, 2, 3], timeout=0.1)
            missed(each, None, timeout=0.1)
        waiting = Call(lambda: other.drop_select([1], timeout=within))
        assert waiting.is_blocked(), "an entry was taken while it was read"
        sink.go_on.set()
        reading.result()
        assert not sink.unlike(put)
        assert not unlike(put, waiting.result())

    @law("LOOKUP-7")
    @at_both_ends
    @pytest.mark.parametrize("place", ["begin", 0, 2, 3])
    def test_a_sink_that_raises_ends_the_transfer_and_the_entry_stays(self, end: str, place: Any) -> None:
        store, buffer = self.opened(end)
        put = entry([1, 2, 3], layers=4)
        inserted(store, put)
        for _ in range(2):
            raises(SinkError, lambda: buffer.select([1, 2, 3], sink=Sink(raise_at=place)))
        sink = Sink()
        assert not unlike(put, read(buffer, [1, 2, 3], sink=sink), without=("key", "value"))
        assert not sink.unlike(put), "after a sink that raised another one was given something else"
        assert not unlike(put, taken(buffer, [1, 2, 3]))

    @law("LOOKUP-7", "ALL-4", "ALL-5")
    def test_a_reader_whose_time_is_up_in_the_middle_leaves_the_entry(self) -> None:
        store = self.hold()
        reading = self.paused_call(store, "select", SOON_S)
        reading.call.raised(TimeoutError)
        took_s = reading.call.took_s
        assert took_s > 0.9 * SOON_S, f"it gave up after {took_s:.2f} s of {SOON_S}"
        reading.data_pipe.resume()
        again = read(reading.end, [1, 2, 3])
        assert not unlike(reading.put, again), "the rest of a transfer came as another's"
        assert not unlike(reading.put, taken(reading.end, [1, 2, 3]))

    @law("LOOKUP-7")
    def test_the_lease_of_a_reader_that_is_gone_ends(self) -> None:
        store = self.hold(capacity_for(1))
        reading = self.paused_call(store, "select")
        missed(store, [1], timeout=0.1)
        reading.end.abort()
        reading.call.end()
        assert not unlike(reading.put, taken(store, [1, 2, 3]))
        inserted(store, sized([4]))

    @law("LOOKUP-7")
    @at_both_ends
    def test_many_readers_at_once_each_get_their_own(self, end: str) -> None:
        store, buffer = self.opened(end)
        other = self.reach(store)
        puts = [entry([number, number + 1], layers=3) for number in range(6)]
        for put in puts:
            inserted(store, put)

        def read_all(which: Any, number: int) -> str:
            for _ in range(6):
                wrong = unlike(puts[number], which.select([number, number + 1], timeout=waits.patience_s))
                if wrong:
                    return wrong
            return ""

        calls = [Call(partial(read_all, which, number)) for which in (buffer, other) for number in range(6)]
        for call in calls:
            wrong = call.result(waits.patience_s * 2)
            assert not wrong, f"one of many readers got something else: {wrong}"
