"""What is particular to an end that reaches a store "simple". Its laws are in test_simple_contract.py."""

from __future__ import annotations

import threading

import pytest
import torch

from kvplug import CapacityError, PeerGoneError, TimeoutError, UnsupportedError
from kvplug.transport import WireError
from kvplug_lookup.buffer.messages import End, Failed, Granted, Match, pack, unpack


class Sink:
    """Keeps a copy of each layer, and where it was; may refuse the entry."""

    def __init__(self, refuses=False):
        self.layers, self.memory, self.refuses = [], set(), refuses

    def begin(self, header):
        if self.refuses:
            raise RuntimeError("the sink does not want it")

    def layer(self, index, key, value):
        self.memory.add(key.data_ptr())
        self.layers.append((index, key.clone(), None if value is None else value.clone()))


@pytest.fixture
def both(joined):
    store = joined.store()
    return store, joined.reach(store)


# -- what is refused ---------------------------------------------------------------------------


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


# -- bytes -------------------------------------------------------------------------------------


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
    gave_up = started(end.select, [1, 2, 3], sink=Sink(refuses=True))
    with pytest.raises(RuntimeError):
        gave_up.result()
    assert other.drop_select([1], timeout=5).tokens.tolist() == [1, 2, 3]
    assert len(store) == 0 and store.bytes_used == nbytes
    receiving.set()
    eventually(lambda: store.bytes_used == 0)


# -- giving up ---------------------------------------------------------------------------------


def test_a_transfer_that_takes_too_long_is_cut_short_and_the_entry_is_back(joined, entry, eventually):
    store = joined.store()
    end = joined.reach(store, limit=1)
    parts = entry([1, 2, 3], layers=200)
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
    # The None that cut it short came before the tensors of all layers: fewer than two whole entries.
    assert end.pipes[1].incoming.num_received < 2 * 401
    assert calls[3] is calls[2]  # the message begun was gone on with in the memory it was begun in


def test_a_consumer_who_never_says_it_has_it_all_loses_the_entry(joined, entry, eventually, monkeypatch):
    monkeypatch.setattr("kvplug_lookup.buffer.server._GRACE_S", 0.05)
    monkeypatch.setattr("kvplug_lookup.buffer.reach._SETTLE_S", 0.05)
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
    monkeypatch.setattr("kvplug_lookup.buffer.server._GRACE_S", -0.3)
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
