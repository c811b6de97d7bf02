"""The plain socket for a TLS connection carries all bytes, in order, and then the end.

The connection is not encrypted here, which makes no difference to the thread that carries the bytes.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug.net.trust import relay as relay_module
from kvplug.net.trust.relay import plain_end
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.timeout(60)
LARGE = os.urandom(1 << 20) * 8


class Ends:
    """The peer, and the user of the plain socket."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            self.peer = socket.create_connection(listening.getsockname())
            far: Any = listening.accept()[0]
        self.user = plain_end(far, "the peer of this test")
        for each in (self.peer, self.user):
            each.settimeout(30)

    @property
    def ended(self) -> bool:
        return not any(each.name == "kvplug-relay" for each in threading.enumerate())

    def join(self) -> None:
        until(lambda: self.ended, what="the end of the thread that carries the bytes")


@pytest.fixture
def ends(nothing_left: None) -> Iterator[Ends]:
    made = Ends()
    yield made
    made.user.close()
    made.peer.close()
    made.join()


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
    def exchange(sock: socket.socket, sent: bytes) -> bytes:
        sending = Call(lambda: (sock.sendall(sent), sock.shutdown(socket.SHUT_WR)))
        got = received(sock)
        sending.result(30)
        return got

    user = Call(lambda: exchange(ends.user, LARGE))
    assert exchange(ends.peer, LARGE[::-1]) == LARGE
    assert user.result(30) == LARGE[::-1]
    ends.join()


def test_an_end_of_one_side_leaves_the_other_direction_open(ends: Ends) -> None:
    ends.peer.sendall(b"last words")
    ends.peer.shutdown(socket.SHUT_WR)
    assert received(ends.user) == b"last words"
    ends.user.sendall(b"answer")
    assert ends.peer.recv(100) == b"answer"
    assert not ends.ended
    ends.user.close()
    assert received(ends.peer) == b""
    ends.join()


def test_what_was_sent_before_the_near_end_closed_still_arrives(ends: Ends) -> None:
    sending = Call(lambda: (ends.user.sendall(LARGE), ends.user.close()))
    ends.peer.sendall(b"never read")
    assert received(ends.peer) == LARGE
    sending.result(30)
    ends.join()


def test_a_peer_that_takes_nothing_is_dropped_after_a_while(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "_LINGER_S", 0.3)
    fill(ends.user)
    ends.user.close()
    ends.join()


LAST_WORDS = """
import socket
from kvplug.net.trust.relay import plain_end

user = plain_end(socket.create_connection(("127.0.0.1", {port})), "the peer of this test")
user.sendall(b"last words" * 100_000)
"""


def test_what_was_sent_before_the_program_ends_still_arrives(output_of: Callable[..., str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        program = Call(lambda: output_of(LAST_WORDS.format(port=listening.getsockname()[1])))
        peer, _ = listening.accept()
        with peer:
            assert received(peer) == b"last words" * 100_000
        program.result()
