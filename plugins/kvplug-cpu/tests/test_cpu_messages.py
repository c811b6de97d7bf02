"""Messages: over several connections, in parts, idle, and when something happens in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from typing import Any

import pytest
import torch

from cpu_ends import MIB, make_endpoint, num_sockets, streams_of
from kvplug import ClosedError, PeerGoneError, TimeoutError
from kvplug.transport import PeerIdentity, TensorMismatchError
from kvplug_testing.comparison import assert_filled, assert_same
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


@pytest.mark.parametrize("first_out", [False, True])
def test_a_receive_that_times_out_in_the_middle_goes_on_in_the_next_call_though_the_peer_closes(
    by_hand: Any, first_out: bool
) -> None:
    peer, other = by_hand(split_bytes=100_000)
    sent = torch.randint(0, 255, (2_000_000,), dtype=torch.uint8)
    streams = streams_of(sent, 100_000)
    for sock, stream in zip(peer.data, streams, strict=True):
        sock.sendall(stream[:20_000])
    peer.data[0].shutdown(socket.SHUT_RD)  # as a pipe that is closed, and still sends what it has
    with contextlib.suppress(PeerGoneError):  # TCP does not report it
        other.send_tensor(torch.ones(1))
    out, fresh = torch.zeros_like(sent), torch.zeros_like(sent)
    with pytest.raises(TimeoutError, match="of 2000000 bytes"):
        other.recv_tensor(out if first_out else None, timeout=0.2)
    out.fill_(99)  # the caller's own again
    rest = [
        Call(lambda sock=sock, stream=stream: sock.sendall(stream[20_000:]))
        for sock, stream in zip(peer.data, streams, strict=True)
    ]
    assert_same(sent, other.recv_tensor(None if first_out else fresh))
    for each in rest:
        each.result()
    assert_filled(99, out, "memory was written to after its call had ended")


@pytest.mark.parametrize(
    ("nbytes", "before_end"),
    [
        *((1000, before) for before in (0, 1, 16, 20, 27, 1025)),
        *((3 * MIB, before) for before in (10, 26, 100_000)),
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


def test_signals_do_not_move_the_deadline_of_a_receive(by_hand: Any) -> None:
    peer, other = by_hand()
    peer.data[0].sendall(streams_of(torch.ones(MIB, dtype=torch.uint8), 2 * MIB)[0][:50_000])
    old = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    threading.Timer(4.0, peer.close).start()
    try:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            other.recv_tensor(timeout=0.5)
        assert time.monotonic() - began < 3.5, "until the peer was gone"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize(
    ("how", "kind"), [("close", ClosedError), ("abort", ClosedError), ("break", PeerGoneError)]
)
def test_a_receive_in_the_middle_of_a_message_ends_with_the_pipe_and_with_any_of_its_connections(
    by_hand: Any, how: str, kind: type[Exception]
) -> None:
    peer, other = by_hand(split_bytes=4096)
    peer.data[0].sendall(streams_of(torch.ones(MIB, dtype=torch.uint8), 4096)[0][:1000])
    receiving = Call(lambda: other.recv_tensor(timeout=10))
    assert receiving.is_blocked(0.1)
    if how == "break":
        peer.data[1].shutdown(socket.SHUT_RDWR)
    else:
        getattr(other, how)()
    receiving.raised(kind, 3)


# -- what was sent --------------------------------------------------------------------------------


@pytest.mark.full
def test_a_message_that_was_received_has_been_sent_whatever_is_queued_behind_it(local_pair: Any) -> None:
    # The writer gives the kernel small messages together; the kernel has room for two or three of these.
    one, other = local_pair(connections=1, socket_buffer_bytes=4096)
    message = torch.ones(2000, dtype=torch.uint8)
    for transfer in [one.send_tensor(message) for _ in range(200)]:
        other.recv_tensor(timeout=10)
        transfer.wait(10)


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


def test_small_messages_need_no_thread(local_pair: Any) -> None:
    one, other = local_pair()
    before = set(threading.enumerate())
    for number in range(200):
        one.send_tensor(torch.tensor(number))
        assert other.recv_tensor().item() == number
    assert set(threading.enumerate()) <= before


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
