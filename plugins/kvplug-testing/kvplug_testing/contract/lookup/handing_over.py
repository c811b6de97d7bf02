"""Entries that are taken and read (laws LOOKUP-4 and LOOKUP-7), and the room for them (law LOOKUP-5)."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import pytest

from kvplug import ClosedError, KvplugError, TimeoutError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import SIZED, Sink, SinkError, capacity_for, entry, sized, unlike
from kvplug_testing.contract.lookup.suite import (
    SOON_S,
    LookupSuite,
    at_both_ends,
    insert,
    inserted,
    matched,
    missed,
    read,
    taken,
)
from kvplug_testing.waits import Call, raises, until

_verbs = pytest.mark.parametrize("verb", ["select", "drop_select"])


class HandingOver(LookupSuite):
    """Concurrent callers, callers that give up or are gone, and stores with capacity for a few entries."""

    @law("LOOKUP-4", "LOOKUP-5")
    def test_each_entry_goes_to_one_caller_where_many_wait_for_entries_and_for_room(self) -> None:
        queries: list[tuple[Any, bytes]] = [([1], b""), ([2, 2], b""), (None, b"e")]
        entries = [([5], b"e"), ([2], b""), ([1, 2], b"")]
        store = self.hold(capacity_for(len(queries) * 4 if self.evicts else 1))
        takers = [
            Call(partial(end.drop_select, query, extra=extra, timeout=waits.patience_s))
            for end in (store, self.reach(store), store, self.reach(store))
            for query, extra in queries
        ]
        puts = [sized(tokens, extra=extra) for tokens, extra in entries * 4]
        putters = [Call(partial(inserted, store, put)) for put in puts]
        put = {putter.result(): each for putter, each in zip(putters, puts, strict=True)}
        got = [taker.result() for taker in takers]
        ids = sorted(each.header.entry_id for each in got)
        assert ids == sorted(put), f"entries {sorted(put)} were put in, and {ids} were handed out"
        assert not any(unlike(put[each.header.entry_id], each) for each in got)

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
                until(lambda: matched(store, [1]), what="the entry of a caller that gave up")
                assert taken(store, [1]).header.entry_id == entry_id

    @law("LOOKUP-4", "LOOKUP-7", "ALL-4", "ALL-5")
    @_verbs
    @pytest.mark.parametrize("goes", ["", "end", "data_pipe", "signal"])
    def test_the_entry_of_a_caller_that_is_gone_in_the_middle_is_back(self, goes: str, verb: str) -> None:
        """Without a name nothing goes, and the caller's time is up."""
        store = self.hold(capacity_for(1))
        call = self.paused_call(store, verb, None if goes else SOON_S)
        if goes:
            missed(store, [1, 2, 3], timeout=0.1)
            getattr(call, goes).abort()
            call.data_pipe.left = None
            ended = call.call.outcome()
            is_whole = verb == "select" and not isinstance(ended, KvplugError)
            assert not unlike(call.put, ended) if is_whole else isinstance(ended, KvplugError), ended
        else:
            call.call.raised(TimeoutError)
            call.data_pipe.left = None
            assert not unlike(call.put, read(call.end, [1, 2, 3])), "the rest of a transfer came as another's"
        got = taken(store, [1, 2])
        assert got.header.entry_id == call.entry_id, "it is another entry now"
        assert not unlike(call.put, got)
        again = sized([4])
        inserted(store, again)  # the bytes are free again
        assert not unlike(again, taken(store if goes else call.end, [4]))

    # -- reading -------------------------------------------------------------------------------

    @law("LOOKUP-7")
    @at_both_ends
    def test_while_an_entry_is_read_others_can_read_it_and_none_can_take_it(self, end: str) -> None:
        store, buffer = self.opened(end)
        other = self.reach(store)
        put = entry([1, 2, 3])
        inserted(store, put)
        sink = Sink(wait_at=1)
        within = waits.patience_s
        reading = Call(lambda: buffer.select([1, 2, 3], sink=sink, timeout=within))
        assert sink.waits.wait(waits.patience_s), "the sink was not given a second layer"
        waiting = Call(lambda: other.drop_select([1], timeout=within))
        for each in (store, other):
            assert matched(each, [1, 2, 3]) == 3
            assert not unlike(put, read(each, [1, 2, 3]))
            missed(each, None, timeout=0.1)
        assert waiting.is_blocked(), "an entry was taken while it was read"
        sink.go_on.set()
        reading.result()
        assert not sink.unlike(put)
        assert not unlike(put, waiting.result())

    @law("LOOKUP-7")
    @at_both_ends
    @pytest.mark.parametrize("place", ["begin", 2])
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

    @law("LOOKUP-3", "LOOKUP-5", "ALL-5")
    def test_a_slow_reader_delays_no_other(self) -> None:
        store = self.hold()
        slow = self.paused_call(store, "select")
        waiting = Call(partial(slow.end.drop_select, [9], timeout=waits.patience_s))
        quick = self.reach(store)
        for number in range(10):
            other = entry([5, number])
            inserted(store, other)
            assert not unlike(other, taken(quick, [5, number]))
            assert [matched(end, [1, 2, 9]) for end in (quick, slow.end)] == [2, 2]
        assert not slow.call.ended
        slow.data_pipe.left = None
        assert not unlike(slow.put, slow.call.result())
        inserted(store, entry([9]))
        assert waiting.result().tokens.tolist() == [9]

    # -- a buffer that evicts ------------------------------------------------------------------

    @law("LOOKUP-5", "ALL-4", needs="makes_room")
    @_verbs
    def test_an_insert_makes_room_and_leaves_or_waits_for_what_is_being_received(self, verb: str) -> None:
        store = self.hold(capacity_for(4))
        receiving = self.paused_call(store, verb)
        for number in range(10, 20):
            inserted(store, sized([number]))
            assert matched(store, [number]) == 1, "what was inserted last is not there"
        assert matched(store, [1, 2, 3]) == (3 if verb == "select" else 0)
        held = [number for number in range(10, 20) if matched(store, [number])]
        assert len(held) <= 3, f"beside the entry that is received there is room for 3, and {held} are held"
        large = entry([5], hidden=7 * SIZED // 8)  # as large as three and a half
        raises(TimeoutError, lambda: insert(store, large, SOON_S))
        waiting = Call(lambda: inserted(store, large))
        assert waiting.is_blocked(), "an entry was evicted while another end was receiving it"
        receiving.data_pipe.left = None
        assert not unlike(receiving.put, receiving.call.result())
        waiting.result()
        assert not unlike(large, taken(store, [5]))

    # -- the end of a store --------------------------------------------------------------------

    @law("ALL-1", "ALL-4")
    @pytest.mark.parametrize("timeout", [None, SOON_S])
    def test_a_store_that_closes_lets_transfers_finish_in_time(self, timeout: float | None) -> None:
        store = self.hold()
        reading = self.paused_call(store, "select")
        closing = Call(partial(store.close, timeout=timeout or waits.patience_s))
        if timeout:
            closing.result()
        else:
            assert closing.is_blocked(), "it did not wait for a reader that had begun"
        (_, signal), (_, data) = self.pipe_pair(), self.pipe_pair()
        raises(ClosedError, lambda: store.match([1]))
        raises(ClosedError, lambda: store.attach(signal, data))
        reading.data_pipe.left = None
        # The whole entry may already be in flight, and arrive before the news of the end.
        got = reading.call.outcome()
        assert (timeout and isinstance(got, KvplugError)) or not unlike(reading.put, got)
        closing.result()
        for pipe in (reading.signal, reading.data_pipe):
            until(partial(getattr, pipe, "closed"), what="that a pipe that was handed in is closed")
