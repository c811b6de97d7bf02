"""How a pipe ends, and what keeps it from beginning: deaths, races, limits, other namespaces."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

import shm_pipe_ends as ends
from kvplug import ClosedError, ConfigError, PeerGoneError, TransportError
from kvplug.transport import PeerIdentity
from kvplug_shm.memory.words import Words
from kvplug_shm.pipe.endpoint import ShmContact
from kvplug_testing import peers
from kvplug_testing.waits import Call, until

local_pair = ends.local_pair

MIB = 1024 * 1024


@pytest.fixture
def sound_sleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a wake ends a sleep."""
    monkeypatch.setattr(Words, "NAP_S", 3600.0)


# -- races -----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("sound_sleep")
@pytest.mark.parametrize("end", ["close", "abort"])
@pytest.mark.parametrize("spin_us", [0, 50])
def test_ending_wakes_whatever_sleeps(local_pair: Any, end: str, spin_us: int) -> None:
    """The word that is slept on changes: no wake is lost for which the cap of a sleep has to make up."""
    for number in range(60):
        one, other = local_pair(max_in_flight_bytes=1000, spin_us=spin_us)
        one.send_tensor(torch.zeros(900, dtype=torch.uint8))
        calls = [
            Call(lambda p=one: p.recv_tensor(timeout=None)),  # type: ignore[misc]
            Call(lambda p=one: p.send_tensor(torch.zeros(900), timeout=None)),  # type: ignore[misc]
        ]
        if number % 3:
            time.sleep(0.0005 * (number % 7))  # on their way to sleep, or asleep
        getattr(one, end)()
        for call in calls:
            call.raised(ClosedError, 20)
        with pytest.raises(PeerGoneError):
            while True:
                other.recv_tensor(timeout=20)


def test_a_peer_that_closes_is_not_taken_for_one_that_died(local_pair: Any) -> None:
    one, other = local_pair()
    one.close()
    with pytest.raises(PeerGoneError) as raised:
        other.recv_tensor(timeout=5)
    assert raised.value.closed


@pytest.mark.usefixtures("sound_sleep")
def test_a_writer_that_sleeps_is_woken_by_an_abort_and_what_has_failed_is_not_sent_any_further(
    local_pair: Any,
) -> None:
    """Its memory is the caller's again: it would arrive whole, with what was written over it."""
    one, other = local_pair()
    source = torch.ones(20 * MIB, dtype=torch.uint8)
    transfer = one.send_tensor(source)
    time.sleep(0.1)
    one.abort()
    with pytest.raises(ClosedError):
        transfer.wait(20)
    source.fill_(2)
    until(lambda: not [each for each in threading.enumerate() if each.name == "kvplug-shm-send"])
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=5)


def test_a_pipe_shows_the_memory_that_it_holds(local_pair: Any) -> None:
    one, other = local_pair(slots=4, slot_bytes=65_536)
    rings, sent = 2 * 4 * 65_536, torch.ones(2 * MIB, dtype=torch.uint8)
    held = one.held
    assert (held.shared, held.queued, held.idle, held.lent) == (rings, 0, 0, 0)
    transfer = one.send_tensor(sent)
    assert one.held.queued == 2 * MIB
    received = other.recv_tensor()
    transfer.wait(20)
    assert (one.held.queued, other.held.idle, other.held.lent) == (0, 0, 2 * MIB)
    del received
    assert (other.held.idle, other.held.lent) == (2 * MIB, 0)
    for pipe in (one, other):
        pipe.close()
        assert pipe.held.shared == 0


# -- beginnings ------------------------------------------------------------------------------------


def test_another_host_or_network_namespace_is_refused_with_advice() -> None:
    with pytest.raises(TransportError, match="another host or network namespace"):
        ends.endpoint().connect(str(ShmContact("another-host/net", ("unix:@kvplug-x",))))


@pytest.mark.parametrize("dead_at", ["connecting", "accepting"])
def test_a_peer_that_is_dead_before_it_is_watched_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, dead_at: str
) -> None:
    open_pidfd = PeerIdentity.open_pidfd

    def gone(self: Any) -> Any:
        if (threading.current_thread() is threading.main_thread()) == (dead_at == "connecting"):
            raise PeerGoneError("it has ended")
        return open_pidfd(self)

    end = ends.endpoint()
    with peers.nothing_left(), end.listen() as listener:
        with monkeypatch.context() as patch:
            patch.setattr(PeerIdentity, "open_pidfd", gone)
            for _ in range(3):
                with pytest.raises(PeerGoneError):
                    end.connect(listener.contact, timeout=10)
        ends.meet(end, listener)


def test_rings_that_are_too_large_and_devices_that_are_not_the_cpu_are_refused() -> None:
    with pytest.raises(ConfigError, match="slots"):
        ends.endpoint(slots=1024, slot_bytes=MIB)
    with pytest.raises(ConfigError, match="cuda"):
        ends.endpoint(device="cuda:0")
