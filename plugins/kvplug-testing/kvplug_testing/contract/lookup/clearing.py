"""``clear`` (law LOOKUP-8) and ``subscribe`` (law LOOKUP-9): removed entries, and events."""

from __future__ import annotations

from functools import partial

from kvplug.errors import EntryGoneError, KvplugError, TimeoutError
from kvplug.transport.events import RemovalReason, Removed, Snapshot, Stored
from kvplug.transport.lookup import LookupBuffer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import Sink, capacity_for, entry, sized, unlike
from kvplug_testing.contract.lookup.model import Replica
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


class Clearing(LookupSuite):
    """``clear`` while other calls insert, read, take and wait."""

    @law("LOOKUP-8")
    @at_both_ends
    def test_a_cleared_store_holds_nothing_and_has_said_so(self, end: str) -> None:
        store, buffer = self.ends(end, capacity_for(3))
        ids = [inserted(store, sized(tokens)) for tokens in ([1, 2], [1, 2, 3], [9])]
        heard = Replica()
        store.subscribe(heard)
        assert Call(store.clear).result() == 3
        gone = [(event.entry_id, event.reason) for event in heard.events if isinstance(event, Removed)]
        assert sorted(gone) == [(entry_id, RemovalReason.CLEARED) for entry_id in ids]
        for query in ([1, 2, 3], [9]):
            assert matched(buffer, query) == 0, "an entry from before the clear is found"
            raises(EntryGoneError, partial(buffer.select, query))
        missed(buffer, None, timeout=0.1)
        assert Call(store.clear).result() == 0
        puts = [sized([1, number]) for number in range(3)]
        for put in puts:
            inserted(store, put)  # all of them fit again
        assert heard.is_complete
        assert not unlike(puts[0], taken(buffer, [1]))

    @law("LOOKUP-8")
    def test_an_insert_that_waits_when_the_store_is_cleared_stores_nothing(self) -> None:
        store = self.hold(capacity_for(1))
        inserted(store, sized([1]))
        waiting = [Call(partial(insert, store, sized([number]), 60)) for number in (2, 3)]
        assert all(call.is_blocked() for call in waiting)
        store.clear()
        for call in waiting:
            call.raised(EntryGoneError)
        for number in (1, 2, 3):
            assert matched(store, [number]) == 0, f"the entry of {number} landed in a store that was cleared"
        inserted(store, sized([4]))

    @law("LOOKUP-8")
    @at_both_ends
    def test_who_reads_an_entry_reads_on_and_it_is_not_put_up_again(self, end: str) -> None:
        store, buffer = self.ends(end, capacity_for(1))
        put = sized([1, 2, 3], layers=3)
        inserted(store, put)
        heard = Replica()
        sink = Sink(wait_at=1)
        within = waits.patience_s
        reading = Call(lambda: buffer.select([1, 2, 3], sink=sink, timeout=within))
        assert sink.waits.wait(waits.patience_s), "the sink was not given a second layer"
        store.subscribe(heard)
        Call(store.clear).result()
        assert not heard.held, "a cleared entry that is being read was not announced as removed"
        assert matched(store, [1, 2, 3]) == 0
        raises(EntryGoneError, lambda: store.select([1, 2, 3]))
        sink.go_on.set()
        reading.result()
        assert not sink.unlike(put), "a reader did not get what it had begun to read"
        missed(store, None, timeout=0.2)
        assert matched(buffer, [1, 2, 3]) == 0, "a cleared entry came back when its reader was done"
        assert not heard.held, "a cleared entry was announced again when its reader was done"
        inserted(store, sized([4]))  # its bytes are free again

    @law("LOOKUP-8")
    def test_who_is_taking_an_entry_gets_it(self) -> None:
        store = self.hold(capacity_for(1))
        taking = self.paused_call(store, "drop_select")
        Call(store.clear).result()
        taking.data_pipe.resume()
        assert not unlike(taking.put, taking.call.result())
        inserted(store, sized([4]))  # its bytes are free again

    @law("LOOKUP-8")
    def test_where_the_taking_fails_a_cleared_entry_is_not_put_up_again(self) -> None:
        store = self.hold(capacity_for(1))
        for how in ("its time is up", "it is gone"):
            taking = self.paused_call(store, "drop_select", SOON_S if how == "its time is up" else None)
            heard = Replica()
            store.subscribe(heard)
            Call(store.clear).result()
            if how == "it is gone":
                taking.end.abort()
            taking.call.raised(TimeoutError if how == "its time is up" else KvplugError)
            taking.data_pipe.resume()
            missed(store, None)
            assert matched(store, [1, 2, 3]) == 0, f"a cleared entry came back when {how}"
            assert not heard.held, f"a cleared entry was announced again when {how}"
            put = sized([4])
            inserted(store, put)  # its bytes are free again
            assert not unlike(put, taken(store, [4]))

    @law("LOOKUP-8", "LOOKUP-4")
    @at_both_ends
    def test_who_waits_for_an_entry_waits_on_and_gets_one_that_comes_later(self, end: str) -> None:
        store, buffer = self.ends(end)
        within = waits.patience_s
        waiting = Call(lambda: buffer.drop_select([1, 2], timeout=within))
        assert waiting.is_blocked()
        inserted(store, entry([9]))
        assert store.clear() == 1
        assert waiting.is_blocked()
        put = entry([1, 2])
        inserted(store, put)
        assert not unlike(put, waiting.result())

    @law("LOOKUP-8", timeout_s=100)
    def test_what_was_put_in_before_a_clear_is_not_found_after_it(self) -> None:
        store = self.hold(capacity_for(6))
        heard = Replica()
        store.subscribe(heard)
        reader = self.reach(store)
        begun, cleared = [0], [0]

        def put_in(which: int) -> None:
            for number in range(40):
                put = sized([which, number])
                put.metadata["clears"] = cleared[0]
                try:
                    insert(store, put, timeout=60)
                except EntryGoneError:
                    continue

        def look(end: LookupBuffer, which: int) -> str:
            while not all(call.ended for call in putting):
                before = cleared[0]
                try:
                    got = end.select([which])
                except EntryGoneError:
                    continue
                then = got.header.metadata["clears"]
                if then < before - 1:  # cleared[0] grows only after clear() returns
                    return f"after {before} clears an entry was read that was put in after {then}"
            return ""

        def clear() -> None:
            while not all(call.ended for call in putting):
                begun[0] += 1
                store.clear()
                cleared[0] += 1
                Call(lambda: None).is_blocked(0.002)

        putting = [Call(partial(put_in, which)) for which in range(3)]
        looking = [Call(partial(look, end, which)) for end in (store, reader) for which in range(2)]
        clearing = Call(clear)
        for call in putting:
            call.result(60)
        clearing.result(60)
        for call in looking:
            assert not call.result(60), call.value
        store.clear()
        assert heard.is_complete, "the events have a gap"
        assert not heard.held, f"{len(heard.held)} entries were never announced as removed"
        missed(store, None, timeout=0.1)


class Events(LookupSuite):
    """The events that listeners receive."""

    @law("LOOKUP-9")
    @at_both_ends
    def test_a_listener_gets_a_snapshot_and_then_every_change_without_a_gap(self, end: str) -> None:
        store, buffer = self.ends(end)
        one = inserted(store, entry([1, 2], roi=[True, False], extra=b"e"))
        inserted(store, entry([3]))
        taken(buffer, [3])
        heard = Replica()
        unsubscribe = store.subscribe(heard)
        assert isinstance(heard.events[0], Snapshot), "the first word is not a snapshot"
        assert heard.held == {one: ((1,), b"e")}, f"the snapshot says {heard.held}"
        two = inserted(store, entry([4, 5]))
        assert heard.held == {one: ((1,), b"e"), two: ((4, 5), b"")}, "an insert returned before it was told"
        taken(buffer, [4])
        assert heard.held == {one: ((1,), b"e")}, "an entry was handed out before it was told"
        assert heard.is_complete, f"the events have a gap: {heard.events}"
        unsubscribe()
        count = len(heard.events)
        inserted(store, entry([6]))
        assert len(heard.events) == count, "a listener that had gone was told something"

    @law("LOOKUP-9")
    def test_an_entry_that_comes_back_is_announced_again(self) -> None:
        store = self.hold()
        buffer, data_pipe = self.reach_pausable(store)
        heard = Replica()
        store.subscribe(heard)
        entry_id = inserted(store, entry([1, 2, 3], layers=8))
        taking = self.pause_in_entry(data_pipe, lambda: buffer.drop_select([1, 2, 3], timeout=SOON_S))
        assert not heard.held, "an entry that is being handed over is not to be had, and was not removed"
        taking.raised(TimeoutError)
        data_pipe.resume()
        waits.until(lambda: heard.held, what="the word that the entry is back")
        assert [type(event) for event in heard.events[1:]] == [Stored, Removed, Stored]
        assert {event.entry_id for event in heard.events[1:]} == {entry_id}
        assert heard.is_complete

    @law("LOOKUP-9")
    def test_an_evicted_entry_is_announced_as_evicted(self) -> None:
        store = self.hold(capacity_for(1), as_cache=True)
        heard = Replica()
        store.subscribe(heard)
        old = inserted(store, sized([1]))
        new = inserted(store, sized([2]))
        gone = [(event.entry_id, event.reason) for event in heard.events if isinstance(event, Removed)]
        assert gone == [(old, RemovalReason.EVICTED)]
        assert heard.held == {new: ((2,), b"")}
        assert heard.is_complete

    @law("LOOKUP-9", timeout_s=100)
    def test_events_of_many_threads_are_in_order_and_none_is_missing(self) -> None:
        store = self.hold()
        ends = [store, self.reach(store)]
        early, late = Replica(), Replica()
        store.subscribe(early)

        def work(which: int) -> None:
            for number in range(30):
                inserted(store, entry([which, number]))
                if number % 3:
                    taken(ends[which % 2], [which])

        working = [Call(partial(work, which)) for which in range(4)]
        store.subscribe(late)
        for call in working:
            call.result(60)
        for heard in (early, late):
            assert heard.is_complete, "the events have a gap, or came in another order"
            assert len(heard.held) == 4 * 10, f"events say that {len(heard.held)} entries are held, not 40"

    @law("LOOKUP-9")
    def test_a_listener_that_raises_disturbs_nobody(self) -> None:
        store = self.hold()
        armed: list[bool] = []

        def bad(event: object) -> None:
            if armed:
                raise RuntimeError("a listener of a test")

        heard = Replica()
        store.subscribe(bad)
        store.subscribe(heard)
        armed.append(True)
        entry_id = inserted(store, entry([1]))
        assert list(heard.held) == [entry_id]
        assert matched(store, [1]) == 1
