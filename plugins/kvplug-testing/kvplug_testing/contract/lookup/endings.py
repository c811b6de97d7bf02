"""How both ends end: by close, by abort, while calls are blocked, and in a forked child."""

from __future__ import annotations

from functools import partial

import pytest

from kvplug import ClosedError, KvplugError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import Sink, entry, unlike
from kvplug_testing.contract.lookup.suite import (
    SOON_S,
    LookupSuite,
    at_both_ends,
    inserted,
    matched,
    taken,
)
from kvplug_testing.waits import Call, raises, until

at_once_and_politely = pytest.mark.parametrize("verb", ["close", "abort"])


class Endings(LookupSuite):
    """Each end, in each state."""

    @law("ALL-1")
    def test_nothing_can_be_attached_to_a_store_that_is_closed(self) -> None:
        store = self.hold()
        store.close()
        (_, signal), (_, data) = self.pipe_pair(), self.pipe_pair()
        raises(ClosedError, lambda: store.attach(signal, data))

    @law("ALL-1", "ALL-5")
    @at_once_and_politely
    def test_a_transfer_at_an_end_that_is_closed_ends(self, verb: str) -> None:
        store = self.hold()
        reading = self.paused_call(store, "select")
        Call(lambda: getattr(reading.end, verb)()).result()
        call = reading.call.end()
        assert call.error is None or isinstance(call.error, ClosedError), repr(call.error)
        assert call.error is not None or not unlike(reading.put, call.value)
        assert not unlike(reading.put, taken(store, [1, 2, 3]))  # its lease has ended

    @law("ALL-1")
    def test_a_store_that_closes_lets_transfers_finish(self) -> None:
        store = self.hold()
        buffer = self.reach(store)
        put = entry([1, 2, 3], layers=5)
        inserted(store, put)
        sink = Sink(wait_at=2)
        within = waits.patience_s
        reading = Call(lambda: buffer.select([1, 2, 3], sink=sink, timeout=within))
        assert sink.waits.wait(waits.patience_s)
        closing = Call(lambda: store.close(timeout=within))
        assert closing.is_blocked(), "it did not wait for a reader that had begun"
        raises(ClosedError, lambda: store.match([1]))
        sink.go_on.set()
        reading.result()
        closing.result()
        assert not sink.unlike(put)

    @law("ALL-1", "ALL-4")
    def test_a_store_that_closes_waits_no_longer_than_its_timeout(self) -> None:
        store = self.hold()
        reading = self.paused_call(store, "select")
        closing = Call(lambda: store.close(timeout=SOON_S)).end()
        assert closing.error is None, f"close raised {closing.error!r}"
        reading.data_pipe.resume()
        # The whole entry may already be in flight, and arrive before the news of the end.
        call = reading.call.end()
        assert isinstance(call.error, KvplugError) or call.error is None, repr(call.error)
        assert call.error is not None or not unlike(reading.put, call.value)

    @law("ALL-1")
    @at_both_ends
    @at_once_and_politely
    def test_the_pipes_that_were_handed_in_are_closed_as_well(self, end: str, verb: str) -> None:
        store = self.hold()
        pairs = [self.pipe_pair(), self.pipe_pair()]
        store.attach(pairs[0][1], pairs[1][1])
        buffer = self.endpoint().reach(pairs[0][0], pairs[1][0])
        self.later(buffer.abort)
        assert matched(buffer, [1]) == 0
        Call(getattr(store if end == "holding" else buffer, verb)).result()
        for pair in pairs:
            for pipe in pair:
                until(partial(getattr, pipe, "closed"), what="that a pipe of both ends is closed")

    @law("ALL-1", "LOOKUP-2")
    @at_once_and_politely
    def test_the_end_of_one_reaching_end_disturbs_no_other(self, verb: str) -> None:
        store = self.hold()
        one, other = self.reach(store), self.reach(store)
        within = waits.patience_s
        waiting = Call(lambda: other.drop_select([1], timeout=within))
        assert waiting.is_blocked(0.1)
        Call(getattr(one, verb)).result()
        put = entry([1])
        inserted(store, put)
        assert not unlike(put, waiting.result())
        assert matched(other, [1]) == 0
