"""Messages: over several connections, in parts, idle, and when something happens in the middle of one."""

from __future__ import annotations

import socket
import time
from typing import Any

import pytest
import torch

from cpu_ends import MIB, make_endpoint, num_sockets, streams_of
from kvplug import PeerGoneError
from kvplug.transport import PeerIdentity, TensorMismatchError
from kvplug_testing.comparison import assert_same
from kvplug_testing.waits import Call


@pytest.mark.parametrize("connections", [1, 3])
def test_any_number_of_connections_carries_the_same_bytes(local_pair: Any, connections: int) -> None:
    one, other = local_pair(connections=connections, split_bytes=1)
    for size in (1, 4095, 4096, 4097, 8192, 100_001, 3_000_000):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        one.send_tensor(sent)
        assert_same(sent, other.recv_tensor())


def test_the_smaller_number_of_connections_counts(socket_kind: str) -> None:
    held = []
    for here, there in ((2, 2), (2, 4), (4, 2), (4, 4)):
        with make_endpoint(socket_kind, connections=there).listen() as listener:
            before = num_sockets()
            end = make_endpoint(socket_kind, connections=here)
            with end.connect(listener.contact) as one, listener.accept() as other:
                held.append(num_sockets() - before)
                sent = torch.arange(1_000_000)
                one.send_tensor(sent)
                assert_same(sent, other.recv_tensor())
    assert held[0] == held[1] == held[2] == held[3] - 2 * 2


# -- parts of a message ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nbytes", "before_end"),
    [
        *((1000, before) for before in (1, 20, 1025)),
        *((3 * MIB, before) for before in (26, 100_000)),
    ],
)
def test_part_of_a_message_is_never_received_and_the_whole_one_before_it_may_be(
    by_hand: Any, nbytes: int, before_end: int
) -> None:
    peer, other = by_hand()
    whole = torch.arange(10)
    peer.data[0].sendall(streams_of(whole, MIB)[0])
    for sock, stream in zip(peer.data, streams_of(torch.ones(nbytes, dtype=torch.uint8), MIB), strict=False):
        sock.sendall(stream[:before_end])
        before_end = max(0, before_end - len(stream))
    peer.close()
    got = Call(lambda: other.recv_tensor(timeout=5)).outcome()
    assert isinstance(got, PeerGoneError) or torch.equal(got, whole)
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            other.recv_tensor(timeout=5)
    with pytest.raises(PeerGoneError):
        other.send_tensor(None, timeout=5)


def test_memory_that_cannot_be_written_is_refused_and_the_message_stays(local_pair: Any) -> None:
    one, other = local_pair()
    sent = torch.randn(4, 3)
    one.send_tensor(sent)
    with pytest.raises(TensorMismatchError, match="stays"):
        other.recv_tensor(torch.zeros(3).expand(4, 3), timeout=2)
    assert_same(sent, other.recv_tensor(torch.zeros(3, 4).t(), timeout=2))


def test_a_receive_in_the_middle_of_a_message_ends_with_any_of_its_connections(by_hand: Any) -> None:
    peer, other = by_hand(split_bytes=4096)
    peer.data[0].sendall(streams_of(torch.ones(MIB, dtype=torch.uint8), 4096)[0][:1000])
    receiving = Call(lambda: other.recv_tensor(timeout=10))
    assert receiving.is_blocked(0.1)
    peer.data[1].shutdown(socket.SHUT_RDWR)
    receiving.raised(PeerGoneError, 3)


# -- what was sent --------------------------------------------------------------------------------


def test_what_has_failed_is_not_sent_any_further(by_hand: Any) -> None:
    # Its memory is the caller's again: it would arrive whole, with what was written over it.
    peer, one = by_hand(split_bytes=30 * MIB)
    source = torch.ones(20 * MIB, dtype=torch.uint8)
    first = one.send_tensor(source)
    peer.data[1].close()
    one.send_tensor(torch.ones(40 * MIB, dtype=torch.uint8))
    with pytest.raises(PeerGoneError):
        first.wait(5)
    source.fill_(2)
    came = b"".join(iter(lambda: peer.data[0].recv(MIB), b""))
    assert len(came) < source.nbytes and set(came[100:]) == {1}


# -- idle -----------------------------------------------------------------------------------------


def test_without_a_pidfd_silence_counts_as_death_and_a_quiet_peer_is_not_silent(
    local_pair: Any, by_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    quiet, other = local_pair(heartbeat_timeout_s=1.0)
    _, deserted = by_hand(heartbeat_timeout_s=1.0)
    with pytest.raises(PeerGoneError, match="silent"):
        deserted.recv_tensor(timeout=10)
    time.sleep(1.0)
    quiet.send_tensor(torch.arange(5))
    assert other.recv_tensor().numel() == 5
