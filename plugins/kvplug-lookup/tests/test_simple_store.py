"""What is particular to the store "simple" and to an end that reaches it. Its laws are in
test_simple_contract.py.
"""

from __future__ import annotations

import time
from unittest.mock import Mock

import pytest
import torch

from kvplug import (
    CapacityError,
    PeerGoneError,
    Registry,
    ResourceExhaustedError,
    TimeoutError,
    UnsupportedError,
)
from kvplug.config.options import check_options
from kvplug.net.streams import on_stream
from kvplug.transport import BackgroundThread, LookupEndpoint
from kvplug.transport.spec import Kind
from kvplug_lookup.buffer.messages import Granted, PipePair
from kvplug_lookup.buffer.reach import ReachingEnd
from kvplug_testing import check_plugin, simulated
from kvplug_testing.waits import Call, until


@pytest.mark.full
def test_it_keeps_the_laws_of_plugins():
    assert check_plugin("lookup") == ()


def bytes_of(parts):
    tokens, _, *rest = parts
    return 9 * len(tokens) + sum(part.nbytes for part in rest)


@pytest.fixture
def made(joined):
    """Makes stores as a config asks for them."""
    spec = Registry.from_env().get(Kind.LOOKUP_BUFFER, "simple")

    def make(buffer_size=1 << 20, **options):
        given = check_options(spec.load_options(), options)
        store = spec.load_factory()(LookupEndpoint.Context(options=given, buffer_size=buffer_size)).hold()
        joined.callback(store.abort)
        return store

    return make


def test_an_entry_takes_exactly_its_bytes_and_a_full_store_says_what_it_holds(made, entry):
    parts = entry([1, 2, 3])
    nbytes = bytes_of(parts)
    with pytest.raises(CapacityError, match=f"{nbytes} bytes"):
        made(nbytes - 1).insert(*parts, timeout=None)
    store = made(nbytes)
    store.insert(*parts, timeout=0)
    assert store.bytes_used == nbytes
    with pytest.raises(TimeoutError, match=rf"{nbytes} bytes: .* 1 entries, 0 of them lent"):
        store.insert(*parts, timeout=0.05)
    assert len(store) == 1 and store.bytes_used == nbytes


def test_old_entries_are_evicted_when_room_is_needed_also_during_the_wait(made, entry):
    parts = entry([1, 2, 3])
    store = made(bytes_of(parts), ttl_s=0.15)
    store.insert(*parts)
    with pytest.raises(TimeoutError):
        store.insert(*entry([4, 5, 6]), timeout=0)
    assert store.match([1, 2, 3]) == 3
    store.insert(*entry([4, 5, 6]), timeout=5)
    assert store.match([1, 2, 3]) == 0 and store.match([4, 5, 6]) == 3


def test_eviction_of_the_oldest_spares_entries_being_read_and_evicts_nothing_in_vain(made, entry):
    store = made(3 * bytes_of(entry([1, 2, 3])), evict="oldest")
    for first in (1, 4, 7):
        store.insert(*entry([first, 2, 3]), timeout=0)

    def during():
        with pytest.raises(TimeoutError):  # for it all would have to go, and one is read
            store.insert(*entry([9] * 9), timeout=0)
        assert len(store) == 3
        for first in (10, 13):
            store.insert(*entry([first, 2, 3]), timeout=0)
        assert [first for first in (1, 4, 7, 10, 13) if store.match([first])] == [1, 10, 13]

    store.select([1, 2, 3], sink=Mock(begin=lambda header: during()))
    store.insert(*entry([16, 2, 3]), timeout=0)
    assert store.match([1]) == 0, "it is not read any more"


@pytest.mark.parametrize("seed", range(3))
def test_an_entry_copied_on_another_stream_is_sent_after_the_copy(joined, seed):
    with simulated.seeded(seed):
        store = joined.store(device="simulated")
        (signal, their_signal), (data, their_data) = joined.pipes(), joined.pipes(device="simulated")
        store.attach(their_signal, their_data)
        end = ReachingEnd(signal, data, device="simulated", timeout_s=10)
        joined.callback(end.abort)
        with on_stream(simulated.Stream()):
            store.insert([1], None, torch.full((2, 1, 8), 7.0).to("simulated"), None, None)
        assert (end.select([1]).key.cpu() == 7).all()


def test_a_store_that_closes_grants_an_entry_that_was_received(joined, entry, monkeypatch):
    send = PipePair.send

    def send_late(pipes, message, deadline):
        if isinstance(message, Granted):
            time.sleep(0.3)
        send(pipes, message, deadline)

    monkeypatch.setattr(PipePair, "send", send_late)
    store = joined.store()
    end = joined.reach(store)
    taking = Call(lambda: end.drop_select([1], timeout=10))
    store.insert(*entry([1]))
    until(lambda: not store.match([1]))
    store.close(5)
    assert taking.result().tokens.tolist() == [1]


# -- an end that reaches it ------------------------------------------------------------------------


def test_a_query_without_token_ids_or_too_long_for_a_message_is_refused_before_it_is_sent(joined):
    end = joined.reach(joined.store())
    with pytest.raises(UnsupportedError):
        end.match([1.5])
    with pytest.raises(CapacityError):
        end.match(torch.zeros(3 << 20, dtype=torch.int64))
    assert end.match([1]) == 0


def test_an_end_that_cannot_start_its_thread_closes_its_pipes(joined, monkeypatch):
    (signal, their_signal), (data, _) = joined.pipes(), joined.pipes()
    monkeypatch.setattr(BackgroundThread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    with pytest.raises(ResourceExhaustedError):
        ReachingEnd(signal, data)
    with pytest.raises(PeerGoneError):
        their_signal.recv_tensor(timeout=5)


def test_transfers_abandoned_at_random_moments_leave_the_pipes_usable(joined, entry):
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
