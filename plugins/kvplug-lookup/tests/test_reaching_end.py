"""What is particular to an end that reaches a store "simple". Its laws are in test_simple_contract.py."""

from __future__ import annotations

import pytest
import torch

from kvplug import CapacityError, TimeoutError, UnsupportedError
from kvplug_testing.waits import until


class Sink:
    """Keeps a copy of each layer, and where it was; may refuse the entry."""

    def __init__(self, refuses=False):
        self.layers, self.memory, self.refuses = [], set(), refuses

    def begin(self, header):
        if self.refuses:
            raise RuntimeError("the sink does not want it")

    def layer(self, index, key, value):
        self.memory.add(key.data_ptr())
        self.layers.append((key.clone(), value.clone()))


def test_a_query_that_is_no_tokens_or_too_long_for_a_message_is_refused_here(joined):
    end = joined.reach(joined.store())
    with pytest.raises(UnsupportedError):
        end.match([1.5])
    with pytest.raises(CapacityError):
        end.match(torch.zeros(3 << 20, dtype=torch.int64))
    assert end.match([1]) == 0


def test_a_sink_gets_each_layer_in_memory_that_is_used_again(joined, entry):
    store = joined.store()
    end, parts, sink = joined.reach(store), entry([1, 2, 3], layers=6), Sink()
    store.insert(*parts)
    for _ in range(2):
        got = end.select([1, 2, 3], sink=sink)
    assert got.key is None and got.value is None and torch.equal(got.hidden, parts[4])
    assert len(sink.layers) == 12 and len(sink.memory) == 1
    for number, (key, value) in enumerate(sink.layers):
        assert torch.equal(key, parts[2][number % 6]) and torch.equal(value, parts[3][number % 6])


def test_bytes_are_given_back_only_when_the_last_transfer_has_ended(joined, entry):
    store = joined.store()
    end, other = joined.reach(store, limit=1), joined.reach(store)
    store.insert(*entry([1, 2, 3], layers=4))
    nbytes = store.bytes_used
    joined.data_pipes[0].pause_after(0)
    with pytest.raises(RuntimeError):  # before the first tensor, which is stuck in the pipe
        end.select([1, 2, 3], sink=Sink(refuses=True), timeout=20)
    assert other.drop_select([1], timeout=5).tokens.tolist() == [1, 2, 3]
    assert len(store) == 0 and store.bytes_used == nbytes
    joined.data_pipes[0].resume()
    until(lambda: store.bytes_used == 0)


def test_a_transfer_that_takes_too_long_is_cut_short_and_its_message_received_where_it_was_begun(
    joined, entry, monkeypatch
):
    store = joined.store()
    end, parts = joined.reach(store, limit=1), entry([1, 2, 3], layers=200)
    store.insert(*parts)
    data, outs = joined.data_pipes[0], []
    receive = data.recv_tensor

    def received(out=None, *, timeout=None):
        outs.append(out)
        if len(outs) == 3:
            raise TimeoutError("nothing came")
        return receive(out, timeout=timeout)

    monkeypatch.setattr(data, "recv_tensor", received)
    with pytest.raises(TimeoutError):
        end.drop_select([1, 2, 3], timeout=5)
    until(lambda: store.match([1]) == 1)
    assert torch.equal(end.drop_select([1, 2, 3], timeout=5).key, parts[2])
    assert len(outs) < 2 * 401, "tensors of all layers of an entry came that was given up"
    assert outs[3] is outs[2]


def test_transfers_given_up_at_random_moments_leave_the_pipes_in_order(joined, entry):
    store = joined.store()
    end, parts = joined.reach(store, limit=1), entry([1, 2, 3], layers=200)
    store.insert(*parts)
    given_up = 0
    for number in range(40):
        try:
            assert torch.equal(end.select([1], timeout=0.0005 * (1 + number % 20)).key, parts[2])
        except TimeoutError:
            given_up += 1
    assert given_up
    assert torch.equal(end.drop_select([1], timeout=10).key, parts[2])
    until(lambda: not store.bytes_used)
