"""Ends in other processes that are killed or stopped in the middle of an entry."""

from __future__ import annotations

import threading
from typing import Any

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import LookupBuffer
from kvplug_testing import peers, waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import Sink, capacity_for, sized, unlike
from kvplug_testing.contract.lookup.pausable_pipe import PausablePipe
from kvplug_testing.contract.lookup.suite import (
    SOON_S,
    LookupSuite,
    inserted,
    known_entry,
    matched,
    missed,
    taken,
)
from kvplug_testing.waits import Call, raises, until


def stop_in_the_middle(
    parent: peers.Parent, end: LookupBuffer, data_pipe: PausablePipe, passes: int, verb: str, timeout: float
) -> Any:
    """In another process: take or read an entry until the data pipe is paused, and report the result."""
    data_pipe.pause_after(passes)

    def watch() -> None:
        if data_pipe.wait_until_paused(60):
            parent.send("in the middle")
        parent.recv(None)
        data_pipe.resume()

    threading.Thread(target=watch, daemon=True).start()
    call = {"take": end.drop_select, "read": end.select}[verb]
    try:
        call([1, 2, 3], timeout=timeout)
    except TimeoutError:
        return "timeout"
    return "it has it all"


def take_all(parent: peers.Parent, end: LookupBuffer, data_pipe: PausablePipe) -> Any:
    """In another process: take every entry and report it."""
    parent.send("ready")
    got: list[Any] = []
    try:
        while True:
            entry: Any = end.drop_select(None, timeout=2.0)
            got.append([entry.header.entry_id, entry.key[0, 0, 0, 0].item(), entry.header.metadata["tag"]])
    except TimeoutError:
        end.close()
        return got


class Processes(LookupSuite):
    """SIGKILL and SIGSTOP at either end."""

    @law("LOOKUP-4", "ALL-2", "ALL-5", needs="other_processes", timeout_s=120)
    def test_an_entry_whose_taker_is_killed_in_the_middle_is_back(self) -> None:
        store = self.hold(capacity_for(1))
        put = sized([1, 2, 3], layers=8)
        entry_id = inserted(store, put)
        taker = self.remote_reach(store, stop_in_the_middle, self.passes, "take", 60.0)
        assert taker.recv(30) == "in the middle"
        assert matched(store, [1, 2, 3]) == 0, "it is being handed over, and others find it"
        taker.kill()
        got = taken(store, [1, 2, 3])
        assert got.header.entry_id == entry_id
        wrong = unlike(put, got)
        assert not wrong, f"it is back, and not whole: {wrong}"
        inserted(store, sized([4]))  # its bytes are free again

    @law("LOOKUP-7", "ALL-2", needs="other_processes", timeout_s=120)
    def test_the_lease_of_a_reader_that_is_killed_ends(self) -> None:
        store = self.hold(capacity_for(1))
        put = sized([1, 2, 3], layers=8)
        inserted(store, put)
        reader = self.remote_reach(store, stop_in_the_middle, self.passes, "read", 60.0)
        assert reader.recv(30) == "in the middle"
        missed(store, [1, 2, 3], timeout=0.1)
        reader.kill()
        assert not unlike(put, taken(store, [1, 2, 3]))
        inserted(store, sized([4]))

    @law("ALL-3", "LOOKUP-4", needs="other_processes", timeout_s=120)
    def test_an_entry_whose_taker_is_stopped_goes_to_one_of_two(self) -> None:
        store = self.hold()
        put = sized([1, 2, 3], layers=8)
        inserted(store, put)
        taker = self.remote_reach(store, stop_in_the_middle, self.passes, "take", 1.0)
        assert taker.recv(30) == "in the middle"
        taker.stop()
        missed(store, [1, 2, 3], timeout=0.2)
        other = sized([9])
        inserted(store, other)
        assert not unlike(other, taken(store, [9])), "one that is stopped holds up others"
        # The buffer may return the entry when the taker's timeout expires, or only when the taker reports it.
        waiting = Call(lambda: store.drop_select([1, 2, 3], timeout=2.0)).end()
        taker.cont()
        taker.send("go on")
        said = taker.result(30)
        if said == "it has it all":
            assert waiting.error is not None, "the entry was handed to two callers"
            missed(store, [1, 2, 3])
        else:
            assert not unlike(put, waiting.value if waiting.error is None else taken(store, [1, 2, 3]))

    @law("ALL-2", needs="other_processes", timeout_s=120)
    def test_a_store_that_is_killed_is_noticed_by_who_receives(self) -> None:
        holder, end = self.remote_store()
        sink = Sink(wait_at=1)
        call = Call(lambda: end.select([7, 8, 9], sink=sink, timeout=None))
        assert sink.waits.wait(waits.patience_s)
        holder.kill()
        sink.go_on.set()
        call.end()
        if call.error is not None:
            call.raised(PeerGoneError)
        else:
            assert not sink.unlike(known_entry()), "a part of an entry was taken for the whole"

    @law("ALL-3", needs="other_processes", timeout_s=120)
    def test_calls_to_a_store_that_is_stopped_run_out_of_time_and_it_goes_on(self) -> None:
        holder, end = self.remote_store()
        assert matched(end, [7, 8, 9]) == 3
        holder.stop()
        raises(TimeoutError, lambda: end.drop_select([7], timeout=SOON_S))
        raises(TimeoutError, lambda: end.select([7], timeout=SOON_S))
        assert not end.is_lost, "a store that is stopped was taken for dead"
        holder.cont()
        # The store first answers the end that is gone, and then makes that entry available again.
        until(lambda: matched(end, [7, 8, 9]) == 3, what="that the entry can be found again")
        assert not unlike(known_entry(), taken(end, [7]))
        Call(end.close).result()

    @law("LOOKUP-4", needs="other_processes", timeout_s=120)
    def test_takers_in_several_processes_share_the_entries_among_them(self) -> None:
        store = self.hold()
        takers = [self.remote_reach(store, take_all) for _ in range(2)]
        for taker in takers:
            assert taker.recv(30) == "ready"
        puts = {inserted(store, put): put for put in (sized([1, number]) for number in range(40))}
        got = [each for taker in takers for each in taker.result(60)]
        assert sorted(entry_id for entry_id, *_ in got) == sorted(puts), (
            "an entry was handed out twice, or never"
        )
        for entry_id, first, tag in got:
            put = puts[entry_id]
            assert tag == put.metadata["tag"], f"entry {entry_id} came with the metadata of another"
            wanted = put.key[0, 0, 0, 0].item()
            assert first == wanted or (first != first and wanted != wanted), "a key of another entry came"
