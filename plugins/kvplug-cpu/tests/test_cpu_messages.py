"""Messages: over several connections, in parts, idle, and when something happens in the middle of one."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import torch

from cpu_ends import MIB, make_endpoint, sockets, streams_of
from kvplug import PeerGoneError
from kvplug.transport import TensorMismatchError
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
            before = sockets()
            end = make_endpoint(socket_kind, connections=here)
            with end.connect(listener.contact) as one, listener.accept() as other:
                held.append(len(sockets() - before))
                sent = torch.arange(1_000_000)
                one.send_tensor(sent)
                assert_same(sent, other.recv_tensor())
    assert held[0] == held[1] == held[2] == held[3] - 2 * 2


# -- parts of a message ---------------------------------------------------------------------------


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
