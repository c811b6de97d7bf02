from __future__ import annotations

import threading

import pytest
import torch

from kvplug import (
    CapacityError,
    ClosedError,
    EntryGoneError,
    KvplugError,
    PeerGoneError,
    TimeoutError,
    UnsupportedError,
    WireError,
)
from kvplug_lookup.messages import End, Failed, Granted, Match, pack, unpack


class Sink:
    """Keeps a copy of each layer; may stop, or fail, at one."""

    def __init__(self, fail_at=None, hold_at=None):
        self.headers, self.layers, self.memory = [], [], set()
        self.fail_at, self.hold_at = fail_at, hold_at
        self.holding, self.go_on = threading.Event(), threading.Event()

    def begin(self, header):
        self.headers.append(header)
        self._at("begin")

    def layer(self, index, key, value):
        self._at(index)
        self.memory.add(key.data_ptr())
        self.layers.append((index, key.clone(), None if value is None else value.clone()))

    def _at(self, place):
        if place == self.hold_at:
            self.holding.set()
            assert self.go_on.wait(20)
        if place == self.fail_at:
            raise RuntimeError("the sink does not want it")


@pytest.fixture
def both(joined):
    store = joined.store()
    return store, joined.reach(store)


# -- the same law at this end ------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_all_five_parts_cross(both, entry, dtype):
    store, end = both
    tokens, roi, key, value, hidden = entry([1, 2, 3], roi=[True, True, False], dtype=dtype)
    entry_id = store.insert(tokens, roi, key, value, hidden, metadata={"h": [b"1"], "t": (1, None)})
    got = end.drop_select([1, 2], timeout=5)
    assert got.header.entry_id == entry_id and got.header.metadata == {"h": [b"1"], "t": (1, None)}
    assert got.tokens.tolist() == tokens and got.tokens.dtype is torch.int64
    assert got.roi.tolist() == roi and got.roi.dtype is torch.bool
    for ours, theirs in ((got.key, key), (got.value, value), (got.hidden, hidden)):
        assert ours.dtype is dtype and ours.shape == theirs.shape
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert len(store) == 0 and store.bytes_used == 0


@pytest.mark.parametrize(
    "missing", [("key",), ("value",), ("hidden",), ("key", "value"), ("key", "value", "hidden")]
)
def test_parts_that_are_none_cross_as_none(both, entry, missing):
    store, end = both
    parts = dict(zip(("tokens", "roi", "key", "value", "hidden"), entry([5, 6]), strict=True))
    parts.update(dict.fromkeys(missing))
    store.insert(*parts.values())
    for got in (end.select([5, 6]), end.drop_select([5, 6])):
        for name in ("key", "value", "hidden"):
            ours, theirs = getattr(got, name), parts[name]
            assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))


def test_a_key_without_layers_crosses(both):
    store, end = both
    store.insert([1, 2], None, torch.empty(0, 2, 3, 4), None, torch.tensor(5.0))
    got = end.drop_select(None)
    assert got.key.shape == (0, 2, 3, 4) and got.hidden.item() == 5.0


def test_extra_roi_any_and_exact_ids_mean_the_same_at_this_end(both, entry):
    store, end = both
    store.insert(*entry([7, 120001, 9]), extra=b"a")
    assert end.match([7, 120002, 9], extra=b"a") == 1
    assert end.match([7, 120001, 9, 4], extra=b"a") == 3
    assert end.match([7, 120001, 9]) == 0
    assert end.match([5, 7, 120001], [False, True, True], extra=b"a") == 2
    assert end.match([]) == 0
    with pytest.raises(TimeoutError):
        end.drop_select(None, timeout=0.05)
    with pytest.raises(EntryGoneError, match="a query of 3 tokens"):
        end.select([7, 120002, 9], extra=b"a", min_tokens=2)
    assert end.drop_select(None, extra=b"a").tokens.tolist() == [7, 120001, 9]
    assert len(store) == 0


def test_an_insert_at_this_end_is_refused_and_says_where(both, entry):
    with pytest.raises(UnsupportedError, match="the end that holds the store"):
        both[1].insert(*entry([1]))


def test_a_query_that_is_no_tokens_or_too_long_for_a_message_is_refused_here(both):
    with pytest.raises(UnsupportedError):
        both[1].match([1.5])
    with pytest.raises(CapacityError):
        both[1].match(torch.zeros(3 << 20, dtype=torch.int64))
    assert both[1].match([1]) == 0


# -- layer by layer ----------------------------------------------------------------------------


def test_a_sink_gets_each_layer_in_memory_that_is_used_again(both, entry):
    store, end = both
    parts = entry([1, 2, 3], layers=6)
    store.insert(*parts)
    sink = Sink()
    for _ in range(2):
        got = end.select([1, 2, 3], sink=sink)
    assert got.key is None and got.value is None and torch.equal(got.hidden, parts[4])
    assert len(sink.layers) == 12 and len(sink.memory) == 1
    for index, key, value in sink.layers:
        assert torch.equal(key, parts[2][index]) and torch.equal(value, parts[3][index])
    assert len(store) == 1


@pytest.mark.parametrize("place", ["begin", 0, 3, 5])
@pytest.mark.parametrize("limit", [1, 1 << 20])
def test_a_sink_that_raises_leaves_the_entry_and_the_pipes_in_order(joined, entry, place, limit, eventually):
    store = joined.store()
    end = joined.reach(store, limit=limit)
    parts = entry([1, 2, 3], layers=6)
    store.insert(*parts)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="does not want it"):
            end.select([1, 2, 3], sink=Sink(fail_at=place))
    sink = Sink()
    end.select([1, 2, 3], sink=sink)
    assert [layer[0] for layer in sink.layers] == list(range(6))
    assert all(torch.equal(key, parts[2][index]) for index, key, _ in sink.layers)
    assert torch.equal(end.drop_select([1], timeout=5).key, parts[2])
    eventually(lambda: store.bytes_used == 0)


def test_an_entry_being_read_can_be_read_by_others_but_not_taken(joined, entry, started):
    store = joined.store()
    one, other = joined.reach(store), joined.reach(store)
    store.insert(*entry([1, 2, 3]))
    sink = Sink(hold_at=1)
    reading = started(one.select, [1, 2, 3], sink=sink)
    assert sink.holding.wait(5)
    other.select([1, 2, 3], sink=Sink())
    with pytest.raises(TimeoutError):
        other.drop_select([1, 2, 3], timeout=0.05)
    waiting = started(other.drop_select, [1, 2, 3], timeout=10)
    assert waiting.is_waiting(0.05)
    sink.go_on.set()
    reading.result()
    assert waiting.result().tokens.tolist() == [1, 2, 3]


def test_a_cleared_store_holds_nothing_for_this_end_and_who_receives_receives_on(
    joined, entry, started, eventually
):
    store = joined.store()
    end, other = joined.reach(store, limit=1), joined.reach(store)
    parts = entry([1, 2, 3], layers=4)
    store.insert(*parts)
    store.insert(*entry([5]))
    sink = Sink(hold_at=1)
    reading = started(end.select, [1, 2, 3], sink=sink)
    assert sink.holding.wait(5)
    assert store.clear() == 2
    assert other.match([1, 2, 3]) == other.match([5]) == 0
    with pytest.raises(EntryGoneError):
        other.select([1, 2, 3])
    with pytest.raises(TimeoutError):
        other.drop_select(None, timeout=0.05)
    sink.go_on.set()
    reading.result()
    assert all(torch.equal(key, parts[2][index]) for index, key, _ in sink.layers)
    eventually(lambda: store.bytes_used == 0)
    store.insert(*entry([1, 2]))
    assert end.match([1, 2, 3]) == 2
    assert end.drop_select([1], timeout=5).tokens.tolist() == [1, 2]


@pytest.mark.parametrize("fails", [False, True], ids=["gets it", "fails"])
def test_an_entry_that_is_being_taken_while_the_store_is_cleared_is_its_takers_or_nobodys(
    joined, entry, started, eventually, fails
):
    store = joined.store()
    end, removed = joined.reach(store, limit=1), []
    parts = entry([1, 2, 3], layers=4)
    store.insert(*parts)
    receiving, cleared = threading.Event(), threading.Event()
    recv = end.pipes[1].recv_tensor

    def hold_then_recv(*args, **kwargs):
        receiving.set()
        assert cleared.wait(10)
        if fails:
            raise TimeoutError("nothing came")
        return recv(*args, **kwargs)

    end.pipes[1].recv_tensor = hold_then_recv
    taking = started(end.drop_select, [1, 2, 3], timeout=10)
    assert receiving.wait(5)
    store.subscribe(removed.append)
    assert store.clear() == 1
    cleared.set()
    if fails:
        with pytest.raises(TimeoutError):
            taking.result()
        end.pipes[1].recv_tensor = recv
    else:
        assert torch.equal(taking.result().key, parts[2])
    eventually(lambda: store.bytes_used == 0)
    assert (len(store), store.match([1, 2, 3])) == (0, 0)
    assert removed[1:] == []  # that it was being taken was told before, and it is not stored again


# -- several at once ---------------------------------------------------------------------------


def test_a_match_is_answered_while_others_wait_and_receive_on_the_same_end(joined, entry, started):
    store = joined.store()
    end = joined.reach(store, limit=1)
    store.insert(*entry([1, 2, 3], layers=4))
    sink = Sink(hold_at=2)
    reading = started(end.select, [1, 2, 3], sink=sink)
    assert sink.holding.wait(5)
    waiting = started(end.drop_select, [9], timeout=10)
    assert waiting.is_waiting(0.05)
    assert end.match([1, 2, 3]) == 3
    store.insert(*entry([9, 9]))
    assert waiting.is_waiting(0.05)  # its data comes after that of the entry being read
    sink.go_on.set()
    reading.result()
    assert waiting.result().tokens.tolist() == [9, 9]


def test_many_threads_on_one_end_each_get_their_own(both, entry, started):
    store, end = both

    def work(n):
        for i in range(20):
            parts = entry([n, i], layers=3)
            store.insert(*parts)
            assert end.match([n, i]) == 2
            assert torch.equal(end.select([n, i]).key, parts[2])
            assert torch.equal(end.drop_select([n, i], timeout=10).value, parts[3])

    for worker in [started(work, n) for n in range(6)]:
        worker.result(40)
    assert len(store) == 0 and store.bytes_used == 0


def test_each_entry_goes_to_one_of_several_consumers(joined, entry, started, eventually):
    store = joined.store()
    ends = [joined.reach(store) for _ in range(4)]

    def take_all(end):
        ids = []
        try:
            while True:
                ids.append(end.drop_select([1], timeout=0.5).header.entry_id)
        except TimeoutError:
            return ids

    takers = [started(take_all, end) for end in ends]
    put = [store.insert(*entry([1, n], layers=2)) for n in range(60)]
    got = [entry_id for taker in takers for entry_id in taker.result(30)]
    assert sorted(got) == put
    eventually(lambda: store.bytes_used == 0)


def test_a_slow_consumer_holds_up_neither_inserts_nor_others(joined, entry, started):
    store = joined.store()
    slow, quick = joined.reach(store, limit=1), joined.reach(store)
    store.insert(*entry([1, 2, 3], layers=6))
    sink = Sink(hold_at=0)
    reading = started(slow.select, [1, 2, 3], sink=sink)
    assert sink.holding.wait(5)
    for n in range(20):
        store.insert(*entry([5, n]), timeout=0)
        assert quick.drop_select([5, n], timeout=2).tokens.tolist() == [5, n]
    assert reading.is_waiting(0)
    sink.go_on.set()
    reading.result()


def test_bytes_are_given_back_only_when_the_last_transfer_has_ended(joined, entry, started, eventually):
    parts = entry([1, 2, 3], layers=4)
    store = joined.store()
    end, other = joined.reach(store, limit=1), joined.reach(store)
    store.insert(*parts)
    nbytes = store.bytes_used
    receiving = threading.Event()
    recv = end.pipes[1].recv_tensor

    def hold_then_recv(*args, **kwargs):
        assert receiving.wait(10)
        return recv(*args, **kwargs)

    end.pipes[1].recv_tensor = hold_then_recv
    # It gives up before the first tensor; one transfer is stuck in the pipe, reading the entry's memory.
    gave_up = started(end.select, [1, 2, 3], sink=Sink(fail_at="begin"))
    with pytest.raises(RuntimeError):
        gave_up.result()
    assert other.drop_select([1], timeout=5).tokens.tolist() == [1, 2, 3]
    assert len(store) == 0 and store.bytes_used == nbytes
    receiving.set()
    eventually(lambda: store.bytes_used == 0)


# -- giving up ---------------------------------------------------------------------------------


def test_a_call_that_waited_in_vain_leaves_nothing_waiting_at_the_store(both, entry):
    store, end = both
    for n in range(5):
        with pytest.raises(TimeoutError, match="a query of 1 tokens"):
            end.drop_select([n], timeout=0.02)
    assert end.match([1]) == 0  # in line after the cancellations
    for n in range(5):
        store.insert(*entry([n]))
    assert end.match([3]) == 1 and len(store) == 5
    for n in range(5):
        assert end.drop_select([n], timeout=5).tokens.tolist() == [n]


def test_calls_that_give_up_just_as_their_entry_comes_lose_no_entry(both, entry, started, eventually):
    store, end = both

    def take(n):
        try:
            return end.drop_select([n], timeout=0.01).header.entry_id
        except TimeoutError:
            return None

    took, put = [], []
    for n in range(40):
        taker = started(take, n)
        taker.thread.join(0.008 + 0.0001 * n)
        put.append(store.insert(*entry([n], layers=2)))
        took.append(taker.result())
    won = [entry_id for entry_id in took if entry_id is not None]
    eventually(lambda: len(store) == 40 - len(won))
    rest = [end.drop_select(None, timeout=5).header.entry_id for _ in range(40 - len(won))]
    assert sorted(won + rest) == put
    assert len(store) == 0


def test_a_transfer_that_takes_too_long_is_cut_short_and_the_entry_is_back(joined, entry, eventually):
    store = joined.store()
    end = joined.reach(store, limit=1)
    parts = entry([1, 2, 3], layers=8)
    store.insert(*parts)
    held_up = threading.Event()
    recv, calls = end.pipes[1].recv_tensor, []

    def slow_recv(out=None, *, timeout=None):
        calls.append(out)
        if len(calls) == 3 and not held_up.is_set():
            raise TimeoutError("nothing came")
        return recv(out, timeout=timeout)

    end.pipes[1].recv_tensor = slow_recv
    with pytest.raises(TimeoutError):
        end.drop_select([1, 2, 3], timeout=5)
    held_up.set()
    eventually(lambda: store.match([1]) == 1)
    assert torch.equal(end.drop_select([1, 2, 3], timeout=5).key, parts[2])
    # The None that cut it short came before all 16 layers' tensors: far fewer than two whole entries.
    assert end.pipes[1].incoming.num_received < 2 * 17
    assert calls[3] is calls[2]  # the message begun was gone on with in the memory it was begun in


def test_a_consumer_who_never_says_it_has_it_all_loses_the_entry(joined, entry, eventually, monkeypatch):
    monkeypatch.setattr("kvplug_lookup.server._GRACE_S", 0.05)
    monkeypatch.setattr("kvplug_lookup.reach._SETTLE_S", 0.05)
    store = joined.store()
    end = joined.reach(store)
    store.insert(*entry([1, 2, 3]))
    sent = end._send
    end._send = lambda message, deadline: (
        None if type(message).__name__ in ("Done", "Cancel") else sent(message, deadline)
    )
    with pytest.raises(TimeoutError, match="last word"):
        end.drop_select([1, 2, 3], timeout=0.2)
    eventually(lambda: store.match([1, 2, 3]) == 3)
    end._send = sent
    assert end.drop_select([1], timeout=5).tokens.tolist() == [1, 2, 3]


def test_one_who_says_so_too_late_is_told_that_the_entry_is_back(joined, entry, eventually, monkeypatch):
    monkeypatch.setattr("kvplug_lookup.server._GRACE_S", -0.3)
    store = joined.store()
    end = joined.reach(store)
    store.insert(*entry([1, 2, 3]))
    say = end._say

    def say_late(message, deadline):
        if type(message).__name__ == "Done":
            eventually(lambda: store.match([1]) == 1)
        say(message, deadline)

    end._say = say_late
    with pytest.raises(TimeoutError, match="back in the store"):
        end.drop_select([1, 2, 3], timeout=0.6)
    assert len(store) == 1


# -- ending, in each role ----------------------------------------------------------------------


@pytest.mark.parametrize("end_it", ["close", "abort"])
def test_calls_on_an_end_that_is_closed_raise_closed_error(both, started, end_it, eventually):
    store, end = both
    waiting = started(end.drop_select, [9])
    assert waiting.is_waiting(0.05)
    getattr(end, end_it)()
    with pytest.raises(ClosedError):
        waiting.result()
    for call in (lambda: end.match([1]), lambda: end.select([1]), lambda: end.drop_select(None), end.insert):
        with pytest.raises(ClosedError):
            call()
    end.close()
    end.abort()
    assert end.pipes[0].closed and end.pipes[1].closed
    eventually(lambda: not store._sessions)


@pytest.mark.parametrize("end_it", ["close", "abort"])
def test_when_the_store_ends_the_other_end_hears_of_it(both, entry, started, end_it):
    store, end = both
    waiting = started(end.drop_select, [9])
    assert waiting.is_waiting(0.05)
    getattr(store, end_it)()
    with pytest.raises(PeerGoneError):
        waiting.result()
    with pytest.raises(PeerGoneError):
        end.match([1])
    end.close()
    with pytest.raises(ClosedError):
        end.match([1])


def test_a_store_that_closes_lets_transfers_finish(joined, entry, started):
    store = joined.store()
    end = joined.reach(store, limit=1)
    parts = entry([1, 2, 3], layers=5)
    store.insert(*parts)
    sink = Sink(hold_at=1)
    reading = started(end.select, [1, 2, 3], sink=sink)
    assert sink.holding.wait(5)
    closing = started(store.close, 10)
    assert closing.is_waiting(0.05)
    with pytest.raises(PeerGoneError):
        end.match([1])
    sink.go_on.set()
    reading.result()
    closing.result()
    assert len(sink.layers) == 5
    assert store.bytes_used == 0


def test_a_store_that_closes_waits_no_longer_than_its_timeout(joined, entry, started):
    store = joined.store()
    end = joined.reach(store, limit=1)
    store.insert(*entry([1, 2, 3], layers=5))
    sink = Sink(hold_at=1)
    reading = started(end.select, [1, 2, 3], sink=sink)
    assert sink.holding.wait(5)
    started(store.close, 0.1).result(3)
    sink.go_on.set()
    with pytest.raises(PeerGoneError):
        reading.result()


@pytest.mark.parametrize("which", [0, 1])
def test_when_a_consumer_dies_in_the_middle_the_entry_is_back(joined, entry, started, which):
    store = joined.store()
    end, other = joined.reach(store, limit=1), joined.reach(store)
    parts = entry([1, 2, 3], layers=5)
    store.insert(*parts)
    died = threading.Event()
    recv, calls = end.pipes[1].recv_tensor, []

    def recv_then_die(*args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            end.pipes[which].abort()
            died.set()
        return recv(*args, **kwargs)

    end.pipes[1].recv_tensor = recv_then_die
    taking = started(end.drop_select, [1, 2, 3])
    assert died.wait(5)
    got = other.drop_select([1, 2, 3], timeout=5)
    assert torch.equal(got.key, parts[2])
    with pytest.raises(KvplugError):
        taking.result()
    with pytest.raises(KvplugError):
        end.match([1])


def test_who_waits_at_the_store_for_a_dead_consumer_takes_nothing(joined, entry, eventually, started):
    store = joined.store()
    end, other = joined.reach(store), joined.reach(store)
    waiting = started(end.drop_select, [1])
    assert waiting.is_waiting(0.05)
    end.pipes[0].abort()
    with pytest.raises(KvplugError):
        waiting.result()
    eventually(lambda: len(store._sessions) == 1)
    store.insert(*entry([1]))
    assert other.drop_select([1], timeout=5).tokens.tolist() == [1]


# -- strangers' bytes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bytes_",
    [
        b"",
        b"garbage",
        b"\x93\xa5Match\x01\x02",
        b"\x91\xa4Nope",
        b"\x91\xa5Match",
        b"\x94\xa5Match\xff\xc4\x00\xc4\x00",
    ],
)
def test_bytes_that_are_no_message_end_the_session_and_nothing_else(joined, entry, bytes_, caplog):
    store = joined.store()
    bad, good = joined.reach(store), joined.reach(store)
    store.insert(*entry([1]))
    bad.pipes[0].send_tensor(torch.tensor(list(bytes_), dtype=torch.uint8))
    with pytest.raises(PeerGoneError):
        bad.drop_select([9], timeout=5)
    assert good.match([1]) == 1
    assert "served no more" in caplog.text


@pytest.mark.parametrize("tensor", [None, torch.zeros(3), torch.zeros(2, 2, dtype=torch.uint8)])
def test_a_tensor_that_is_no_row_of_bytes_is_no_message(tensor):
    with pytest.raises(WireError):
        unpack(tensor)


def test_messages_read_back_as_they_were_written():
    for message in (Match(3, b"12345678", b"e"), Granted(1, True), Failed(2, "X", "why"), End()):
        assert unpack(pack(message)) == message


def test_a_message_for_the_other_end_is_not_accepted(joined):
    store = joined.store()
    end = joined.reach(store)
    end.pipes[0].send_tensor(pack(Granted(1, True)))
    with pytest.raises(PeerGoneError):
        end.drop_select([9], timeout=5)
