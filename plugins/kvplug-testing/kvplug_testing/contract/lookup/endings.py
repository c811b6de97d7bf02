"""How both ends end: by close, by abort, while calls are blocked, and in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import LookupBuffer
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.contract.lookup.entries import Sink, capacity_for, entry, sized, unlike
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
from kvplug_testing.waits import Call, raises, until

at_once_and_politely = pytest.mark.parametrize("verb", ["close", "abort"])


def calls_of(buffer: LookupBuffer) -> dict[str, Callable[[], Any]]:
    """All calls of an end, by name."""
    put = entry([1])
    calls: dict[str, Callable[[], Any]] = {
        "insert": lambda: insert(buffer, put),
        "match": lambda: buffer.match([1]),
        "drop_select": lambda: buffer.drop_select([1]),
        "drop_select of any": lambda: buffer.drop_select(None, timeout=0),
        "select": lambda: buffer.select([1]),
    }
    return calls


def all_raise(kind: type[BaseException], buffer: LookupBuffer) -> None:
    for name, call in calls_of(buffer).items():
        ended = Call(call).end()
        assert isinstance(ended.error, kind), f"{name} gave {ended.error!r}, and {kind.__name__} is due"


def is_lost(buffer: LookupBuffer) -> bool:
    """Whether the store is lost. A function, since mypy assumes that an attribute does not change."""
    return buffer.is_lost


class Endings(LookupSuite):
    """Each end, in each state."""

    @law("ALL-1")
    @at_both_ends
    @at_once_and_politely
    def test_after_it_every_call_raises_closed_error(self, end: str, verb: str) -> None:
        store, buffer = self.ends(end)
        inserted(store, entry([1]))
        assert matched(buffer, [1]) == 1
        assert is_lost(buffer) is False
        Call(getattr(buffer, verb)).result()
        assert is_lost(buffer) is True, "it is closed, and does not say that it is lost"
        all_raise(ClosedError, buffer)
        for again in ("close", "abort", "close"):
            Call(getattr(buffer, again)).result()
        all_raise(ClosedError, buffer)

    @law("ALL-1")
    def test_nothing_can_be_attached_to_a_store_that_is_closed(self) -> None:
        store = self.hold()
        store.close()
        (_, signal), (_, data) = self.pipe_pair(), self.pipe_pair()
        raises(ClosedError, lambda: store.attach(signal, data))

    @law("ALL-1")
    @at_both_ends
    @at_once_and_politely
    def test_calls_that_wait_end_with_closed_error(self, end: str, verb: str) -> None:
        store, buffer = self.ends(end, capacity_for(1))
        inserted(store, sized([1]))
        waiting = [Call(partial(buffer.drop_select, query, timeout=None)) for query in ([9], [8])]
        waiting.append(Call(lambda: buffer.drop_select(None, extra=b"e", timeout=None)))
        if end == "holding" and not self.evicts:
            waiting.append(Call(lambda: store.insert([2], None, None, None, sized([2]).hidden, timeout=None)))
        assert all(call.is_blocked(0.1) for call in waiting)
        Call(getattr(buffer, verb)).result()
        for call in waiting:
            call.raised(ClosedError)

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

    @law("ALL-1", "ALL-2")
    @at_once_and_politely
    def test_when_the_store_ends_its_reaching_ends_hear_of_it(self, verb: str) -> None:
        store = self.hold()
        buffer = self.reach(store)
        waiting = Call(lambda: buffer.drop_select([9], timeout=None))
        assert waiting.is_blocked()
        Call(getattr(store, verb)).result()
        waiting.raised(PeerGoneError)
        until(lambda: buffer.is_lost, what="that a reaching end knows that its store is gone")
        ended = Call(lambda: buffer.match([1])).end()
        assert isinstance(ended.error, PeerGoneError), f"match gave {ended.error!r}"
        Call(buffer.close).result()
        all_raise(ClosedError, buffer)

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

    # -- time ------------------------------------------------------------------------------------

    @law("ALL-4")
    @at_both_ends
    def test_a_timeout_that_is_none_is_refused(self, end: str) -> None:
        store, buffer = self.ends(end)
        for bad in (-1, float("nan")):
            raises(ValueError, partial(buffer.drop_select, [1], timeout=bad))
            raises(ValueError, partial(buffer.select, [1], timeout=bad))
            raises(ValueError, partial(store.insert, [1], None, None, None, None, timeout=bad))
        missed(store, None, timeout=0)

    @law("ALL-4")
    def test_where_nothing_is_said_the_contexts_timeout_applies(self) -> None:
        store = self.hold(capacity_for(1), timeout_s=SOON_S)
        buffer = self.reach(store, timeout_s=SOON_S)
        inserted(store, sized([1]))
        calls: list[Callable[[], Any]] = [lambda: store.drop_select([9]), lambda: buffer.drop_select([9])]
        if not self.evicts:
            calls.append(lambda: store.insert([2], None, None, None, sized([2]).hidden))
        for call in calls:
            ended = Call(call)
            ended.raised(TimeoutError)
            assert ended.took_s > 0.9 * SOON_S, f"it gave up after {ended.took_s:.2f} s of {SOON_S}"

    @law("ALL-4")
    @at_both_ends
    def test_for_ever_is_as_long_as_it_takes(self, end: str) -> None:
        store, buffer = self.ends(end)
        waiting = Call(lambda: buffer.drop_select([1], timeout=None))
        assert waiting.is_blocked(2 * SOON_S)
        put = entry([1])
        inserted(store, put)
        assert not unlike(put, waiting.result())

    # -- forks -----------------------------------------------------------------------------------

    @law("ALL-6", needs="forked_processes", level="long")
    @at_both_ends
    def test_in_a_forked_child_it_is_closed_and_the_parents_goes_on(self, end: str) -> None:
        store, buffer = self.ends(end)
        put = entry([1])
        inserted(store, put)
        within = waits.patience_s
        waiting = Call(lambda: buffer.drop_select([9], timeout=within))
        assert waiting.is_blocked(0.1)
        said = in_forked_child(lambda: _what_a_child_finds(buffer))
        assert said == "", f"in a forked child {said}"
        assert matched(buffer, [1]) == 1
        assert not unlike(put, taken(buffer, [1]))
        nine = entry([9])
        inserted(store, nine)
        assert not unlike(nine, waiting.result())

    @law("ALL-6", needs="forked_processes")
    def test_a_forked_child_holds_none_of_the_descriptors(self) -> None:
        before = in_forked_child(held)
        store, buffer = self.ends("reaching")
        put = entry([1])
        inserted(store, put)
        assert matched(buffer, [1]) == 1
        assert not (more := more_than(before)), f"a forked child holds {more}"
        assert not unlike(put, taken(buffer, [1]))

    # -- nothing left ----------------------------------------------------------------------------

    @law("ALL-7", timeout_s=100)
    def test_stores_and_ends_that_come_and_go_leave_nothing(self) -> None:
        for number in range(15):
            self._come_and_go(number)

    @law("ALL-7", level="long", timeout_s=600)
    def test_a_thousand_of_them_leave_no_memory_either(self) -> None:
        for number in range(100):  # the first rounds create everything that is created once
            self._come_and_go(number)
        before = _resident_bytes()
        for number in range(1000):
            self._come_and_go(number)
        grown = _resident_bytes() - before
        assert grown < 16 << 20, f"a thousand stores of 32 KiB each have left {grown} bytes"

    def _come_and_go(self, number: int) -> None:
        store = self.endpoint(capacity_for(3)).hold()
        (our_signal, their_signal), (our_data, their_data) = self._bare_pair(), self._bare_pair()
        store.attach(their_signal, their_data)
        buffer = self.endpoint().reach(our_signal, our_data)
        puts = [sized([number, 1]), sized([number, 2])]
        for put in puts:
            insert(store, put)
        assert not unlike(puts[0], buffer.drop_select([number], timeout=waits.patience_s))
        assert not unlike(puts[1], buffer.select([number], timeout=waits.patience_s))
        ends = [store, buffer] if number % 2 else [buffer, store]
        for end in ends:
            if number % 3:
                end.close()
            else:
                end.abort()

    def _bare_pair(self) -> Any:
        """A pair of pipes that only the two ends reference."""
        from kvplug_testing.contract.lookup.suite import pipe_endpoint

        end = pipe_endpoint(self.pipes, self.timeout_s, self.data_pipe_options)
        listener = end.listen()
        try:
            connecting = Call(lambda: end.connect(listener.contact))
            return listener.accept(timeout=waits.patience_s), connecting.result()
        finally:
            listener.close()


def _what_a_child_finds(buffer: LookupBuffer) -> str:
    """What calls raise in a forked child. It starts no threads."""
    for name, call in calls_of(buffer).items():
        try:
            call()
        except ClosedError:
            continue
        except EntryGoneError:
            return f"{name} works, and found nothing"
        except BaseException as e:
            return f"{name} raised {e!r}"
        return f"{name} works"
    return "" if buffer.is_lost else "it is not lost"


def _resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
