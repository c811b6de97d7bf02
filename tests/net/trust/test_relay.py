"""Bytes carried between a peer's socket and one of this process: all of them, in order, and then the end."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator

import pytest

from kvplug.net.trust import relay as relay_module
from kvplug.net.trust.relay import Relay
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)
LARGE = os.urandom(1 << 20) * 8


class Ends:
    """A relay, the peer at its far end, and the local user of its near end."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.peer = socket.create_connection(listening.getsockname())
            self.far, _ = listening.accept()
        self.user, self.near = socket.socketpair()
        for each in (self.peer, self.user):
            each.settimeout(30)
        self.relay = Relay(self.far, self.near, "the connection of this test")


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.relay.abort()
    assert made.relay.join(30)
    assert made.far.fileno() == made.near.fileno() == -1
    made.peer.close()
    made.user.close()


def received(sock: socket.socket) -> bytes:
    """Everything until the end."""
    return b"".join(iter(lambda: sock.recv(1 << 16), b""))


def fill(sock: socket.socket) -> None:
    """Send until the relay takes nothing more, because the peer's kernel is full."""
    sock.setblocking(False)
    refused = 0
    while refused < 5:
        try:
            sock.send(LARGE)
            refused = 0
        except BlockingIOError:
            refused += 1
            time.sleep(0.02)


def test_everything_arrives_both_ways_and_each_end_ends_on_its_own(ends: Ends) -> None:
    def talk(sock: socket.socket, said: bytes) -> bytes:
        sending = Call(lambda: (sock.sendall(said), sock.shutdown(socket.SHUT_WR)))
        got = received(sock)
        sending.result(30)
        return got

    user = Call(lambda: talk(ends.user, LARGE))
    assert talk(ends.peer, LARGE[::-1]) == LARGE
    assert user.result(30) == LARGE[::-1]
    assert ends.relay.join(30)


def test_an_end_of_one_side_leaves_the_other_direction_open(ends: Ends) -> None:
    ends.peer.sendall(b"last words")
    ends.peer.shutdown(socket.SHUT_WR)
    assert received(ends.user) == b"last words"
    ends.user.sendall(b"answer")
    assert ends.peer.recv(100) == b"answer"
    assert not ends.relay.ended
    ends.user.close()
    assert received(ends.peer) == b""
    assert ends.relay.join(30)


def test_what_was_sent_before_the_near_end_closed_still_arrives(ends: Ends) -> None:
    sending = Call(lambda: (ends.user.sendall(LARGE), ends.user.close()))
    ends.peer.sendall(b"never read")
    assert received(ends.peer) == LARGE
    sending.result(30)
    assert ends.relay.join(30)


def test_finishing_ends_it_although_another_process_holds_the_near_connection(ends: Ends) -> None:
    held = ends.user.dup()
    ends.user.sendall(b"before")
    ends.user.close()
    assert not ends.relay.join(0.2)
    ends.relay.finish()
    assert received(ends.peer) == b"before"
    assert ends.relay.join(30)
    held.close()


def test_a_peer_that_takes_nothing_is_dropped_after_a_while(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_LINGER_S", 0.3)
    fill(ends.user)
    ends.user.close()
    assert ends.relay.join(30)


def test_aborting_waits_for_no_peer(ends: Ends) -> None:
    fill(ends.user)
    ends.relay.abort()
    assert ends.relay.join(5)
    with pytest.raises(ConnectionResetError):  # what it had sent was not read
        ends.user.recv(1)
    ends.relay.abort()
    ends.relay.finish()
