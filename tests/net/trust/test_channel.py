"""Channels between real processes and over raw sockets."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from kvplug.errors import BusyError, ClosedError, PeerGoneError, TimeoutError, WireError
from kvplug.net.trust.challenge import Mode
from kvplug.net.trust.channel import MAX_FRAME_BYTES, Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials, Secret
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.wire import values
from kvplug.net.wire.frames import FrameKind, encode_header
from kvplug_testing import peers
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

SECRET = Credentials(Secret("the secret of these tests"))
pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]

ELSEWHERE = PeerIdentity(pid=1, host="elsewhere", label="peer")


@pytest.fixture
def raw() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel whose other end is a bare socket, of a peer that has no pidfd."""
    ours, theirs = socket.socketpair()
    channel = Channel(Connection(ours, ELSEWHERE, "test", Mode.SECRET, "here"), timeout_s=5)
    yield channel, theirs
    channel.close()
    theirs.close()


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    with accepting("unix:", Credentials(), "test") as listener:
        a = Channel(Connection.dial(listener.contact, Credentials(), "test", 5), timeout_s=5)
        b = Channel(listener.accept(5), timeout_s=5)
    yield a, b
    a.close()
    b.close()


def frame(value: object) -> bytes:
    data = values.encode(value)
    return encode_header(FrameKind.VALUE, len(data)) + data


def test_values_arrive_in_order_with_their_types(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    sent = [None, 1, "x", b"y", (1, [2.5, {"k": {3}}]), b"z" * 1_000_000]
    for value in sent[:-1]:
        a.send(value)
    sending = Call(lambda: a.send(sent[-1]))
    assert [b.recv() for _ in sent] == sent
    sending.result(5)
    b.send("back")
    assert a.recv() == "back"
    assert a.peer.pid == os.getpid()
    assert a.fileno() >= 0
    assert "pid" in repr(a)


def test_a_recv_in_vain_loses_nothing(raw: tuple[Channel, socket.socket]) -> None:
    channel, peer = raw
    message = frame(["one", 1]) + frame("two")
    for i in range(len(message)):
        if i != len(frame(["one", 1])):
            with pytest.raises(TimeoutError, match="sent nothing in time"):
                channel.recv(0)
        else:
            assert channel.recv(0) == ["one", 1]
        peer.sendall(message[i : i + 1])
    assert channel.recv() == "two"
    assert not channel.has_more
    peer.sendall(2 * message + message[:3])
    for value in 2 * [["one", 1], "two"]:
        assert channel.recv() == value
        assert channel.has_more
    with pytest.raises(TimeoutError, match=r"\(3 of \d+ bytes are here\)"):
        channel.recv(0)
    peer.sendall(message[3:])
    assert [channel.recv(), channel.recv()] == [["one", 1], "two"]


def test_a_send_that_could_not_begin_sent_nothing(raw: tuple[Channel, socket.socket]) -> None:
    channel, peer = raw
    with contextlib.suppress(TimeoutError):
        while True:
            channel.send(b"x" * 50_000, 0.01)
    begun = channel.unsent
    with pytest.raises(TimeoutError, match="did not read"):
        channel.send("never", 0.05)
    assert channel.unsent == begun
    draining = Call(lambda: b"".join(iter(lambda: peer.recv(1 << 20), b"")))
    channel.flush()
    assert channel.unsent == 0
    channel.send("last")
    channel.close()
    received, one = draining.result(5), frame(b"x" * 50_000)
    assert received == one * ((len(received) - 1) // len(one)) + frame("last")


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(0x80, 0xC0)),
        encode_header(FrameKind.VALUE, MAX_FRAME_BYTES + 1),
        encode_header(FrameKind.VALUE, 2**63),
        encode_header(FrameKind.TENSOR, 4) + b"abcd",
        encode_header(FrameKind.VALUE, 4) + b"\xc1\xc1\xc1\xc1",
        encode_header(FrameKind.VALUE, 0),
    ],
)
def test_garbage_breaks_the_channel_in_both_directions(
    raw: tuple[Channel, socket.socket], garbage: bytes
) -> None:
    channel, peer = raw
    peer.sendall(garbage)
    tracemalloc.start()
    try:
        for call in (channel.recv, channel.recv, lambda: channel.send("x")):
            with pytest.raises(WireError, match="channel is broken"):
                call()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20, "a length out of bounds took memory"
    finally:
        tracemalloc.stop()


def test_the_peers_end_is_reported_after_what_had_wholly_arrived(raw: tuple[Channel, socket.socket]) -> None:
    channel, peer = raw
    peer.sendall(frame("whole") + frame("cut off")[:-3])
    peer.close()
    assert channel.recv() == "whole"
    for _ in range(2):
        with pytest.raises(PeerGoneError, match="in the middle of a value"):
            channel.recv()
    with pytest.raises(PeerGoneError):
        channel.send("x" * 100)


def test_close_wakes_a_blocked_receiver_and_a_blocked_sender(raw: tuple[Channel, socket.socket]) -> None:
    channel, _ = raw
    calls = [Call(lambda: channel.recv(None)), Call(lambda: channel.send(b"x" * (8 << 20), None))]
    assert all(call.is_blocked(0.1) for call in calls)
    channel.close()
    for call in calls:
        call.raised(ClosedError, 5)
    channel.close()
    assert channel.closed and channel.fileno() == -1
    for late in (channel.recv, lambda: channel.send(1), channel.flush):
        with pytest.raises(ClosedError):
            late()


def test_a_second_receiver_is_busy_and_senders_take_turns(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    receiving = Call(lambda: b.recv(5))
    assert receiving.is_blocked(0.1)
    with pytest.raises(BusyError):
        b.recv(0)
    a.send("let go")
    receiving.result(5)
    senders = [Call(lambda i=i: a.send((i, b"x" * 300_000))) for i in range(8)]  # type: ignore[misc]
    assert sorted(b.recv()[0] for _ in senders) == list(range(8))
    for sender in senders:
        sender.result(5)


def lives(parent: peers.Parent, contact: str) -> None:
    """The process at the other end."""
    with Channel(Connection.dial(contact, SECRET, "test", 10)) as channel:
        channel.send("here")
        parent.recv(None)


@pytest.mark.parametrize("address", ["unix:", "127.0.0.1:0"])
def test_a_killed_peer_wakes_the_calls_that_wait_for_it(address: str) -> None:
    with accepting(address, SECRET, "test") as listener:
        child = peers.start(lives, listener.contact)
        channel = Channel(listener.accept(20), timeout_s=10)
    with child, channel:
        assert channel.recv() == "here"
        waiting = Call(lambda: channel.recv(30))
        assert waiting.is_blocked(0.1)
        child.kill()
        assert f"pid {child.pid}" in str(waiting.raised(PeerGoneError, within=15))
        with pytest.raises(PeerGoneError):
            channel.send("x")


# -- signals ---------------------------------------------------------------------------------------


def when_it_waits(handler: Callable[[], None], call: Callable[[], object]) -> object:
    """What ``call`` returns or raises, if a signal's handler runs while it waits for the socket."""
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        return call()
    except Exception as e:
        return e
    finally:
        signal.signal(signal.SIGALRM, before)


def test_a_signals_handler_cannot_send_in_the_middle_of_a_value(raw: tuple[Channel, socket.socket]) -> None:
    channel, theirs = raw
    reading: list[Call] = []
    whole = frame(b"x" * (4 << 20))

    def send() -> None:
        with pytest.raises(BusyError):
            channel.send("in between", timeout=30)
        reading.append(Call(lambda: theirs.recv(len(whole), socket.MSG_WAITALL)))

    assert when_it_waits(send, lambda: channel.send(b"x" * (4 << 20))) is None
    assert reading[0].result() == whole


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_signals_handler_may_close_the_channel_that_its_thread_uses(
    raw: tuple[Channel, socket.socket], verb: str
) -> None:
    channel, _ = raw
    calls = {"send": lambda: channel.send(b"x" * (4 << 20)), "recv": channel.recv}
    assert isinstance(when_it_waits(channel.close, calls[verb]), ClosedError)
    assert channel.fileno() == -1
