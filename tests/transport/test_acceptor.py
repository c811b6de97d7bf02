"""An acceptor serves connections concurrently, and closes all of them when it closes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from kvplug.errors import ClosedError, PeerGoneError, ResourceExhaustedError, TimeoutError
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener
from kvplug.transport import Acceptor
from kvplug_testing import peers
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.timeout(60)
PURPOSE = "test of acceptors"
PATIENCE_S = 20.0


def is_hung_up(connection: Connection) -> bool:
    connection.sock.settimeout(PATIENCE_S)
    return connection.sock.recv(1) == b""


class FakePipe:
    """What a connection became."""

    peer = "a peer"

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.aborted = threading.Event()

    def abort(self) -> None:
        self.connection.close()
        self.aborted.set()


def num_joining() -> int:
    """Connections that are served now."""
    return sum(each.name == "kvplug-plain-serve" for each in threading.enumerate())


class Plain(Acceptor[Any]):
    """The first byte of a connection decides what it becomes: a pipe, nothing, or a failure."""

    def __init__(self, listener: Listener) -> None:
        self.served: list[Connection] = []
        self.made: list[FakePipe] = []
        self.parts: list[Connection] = []
        self.go_on = threading.Event()
        self.go_on.set()
        super().__init__(
            [listener],
            self._join,
            what="the pipe 'plain'",
            name="kvplug-plain",
            contact="plain contact",
            discard=lambda pipe: pipe.abort(),
            timeout_s=PATIENCE_S,
        )

    def obstacle(self) -> str:
        return self._obstacle()

    def _join(self, connection: Connection) -> Any:
        self.served.append(connection)
        match connection.sock.recv(1):
            case b"p":
                pipe = FakePipe(connection)
                self.made.append(pipe)
                self.go_on.wait(PATIENCE_S)
                return pipe
            case b"s":
                self.go_on.wait(PATIENCE_S)
                raise ResourceExhaustedError("no free thread", resource="threads")
            case b"n":
                self.parts.append(connection)
                return None
            case _:
                raise PeerGoneError("it sent nothing of use")


@pytest.fixture
def opened() -> Iterator[Listener]:
    with peers.nothing_left(), Listener.open("unix:", Credentials(), PURPOSE) as listener:
        yield listener


def came(listener: Listener, sent: bytes = b"") -> Connection:
    connection = Connection.dial(listener.contact, Credentials(), PURPOSE, PATIENCE_S)
    if sent:
        connection.sock.sendall(sent)
    return connection


def test_a_peer_that_stops_half_way_delays_no_other_and_is_disconnected_at_the_end(opened: Listener) -> None:
    with Plain(opened) as acceptor, came(opened) as silent, came(opened, b"p") as other:
        pipe: Any = acceptor.accept()
        assert pipe.connection.peer.pid == os.getpid()
        acceptor.close()
        assert is_hung_up(silent)
        pipe.connection.sock.sendall(b"alive")  # the accepted connection stays open
        assert other.sock.recv(5) == b"alive"
        pipe.abort()


def test_one_that_fails_is_closed_with_a_warning_and_the_next_comes_in(
    opened: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with Plain(opened) as acceptor:
        with came(opened, b"x") as bad, came(opened, b"p"):
            assert is_hung_up(bad)
            acceptor.accept().abort()
        until(lambda: "failed: it sent nothing of use" in caplog.text)
        assert not any(record.exc_info for record in caplog.records)  # the peer's fault, not ours


def test_a_shortage_ends_a_call_that_began_before_its_connection_came(opened: Listener) -> None:
    with Plain(opened) as acceptor, ExitStack() as connections:
        accepting = Call(lambda: acceptor.accept(None))

        def has_ended() -> bool:
            connections.enter_context(came(opened, b"s"))
            return not accepting.is_blocked()

        until(has_ended)  # the first connections may come before the call begins
        accepting.raised(ResourceExhaustedError)


def test_a_shortage_of_an_earlier_connection_does_not_end_a_later_call(opened: Listener) -> None:
    with Plain(opened) as acceptor:
        acceptor.go_on.clear()
        with came(opened, b"s") as earlier:
            until(lambda: acceptor.served)
            accepting = Call(acceptor.accept)
            assert accepting.is_blocked()
            acceptor.go_on.set()
            assert earlier.sock.recv(1000), "it is declined"
            assert is_hung_up(earlier)
            with came(opened, b"p"):
                accepting.result().abort()


def test_the_obstacle_for_the_next_peer_is_kept_until_a_connection_is_served_or_time_has_passed(
    opened: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readiness must return by itself: where it is false, no peer may connect that clears the shortage."""
    with Plain(opened) as acceptor:
        assert acceptor.obstacle() == ""
        with came(opened, b"s"):
            until(acceptor.obstacle)
            assert "no free thread" in acceptor.obstacle()
        with came(opened, b"p"):
            acceptor.accept().abort()
        assert acceptor.obstacle() == ""
        with came(opened, b"s"):
            until(acceptor.obstacle)
        monkeypatch.setattr("kvplug.transport.acceptor._SHORT_S", 0.0)
        assert acceptor.obstacle() == ""
    assert acceptor.obstacle() == "it is closed"


def test_a_connection_that_is_part_of_another_pipe_is_not_accepted(opened: Listener) -> None:
    with Plain(opened) as acceptor, came(opened, b"n") as part:
        until(lambda: acceptor.parts)
        with pytest.raises(TimeoutError, match=r"no peer connected to unix:@.* for the pipe 'plain'"):
            acceptor.accept(0.05)
        acceptor.close()
        acceptor.parts[0].sock.sendall(b"still here")  # its owner closes it
        assert part.sock.recv(10) == b"still here"
        acceptor.parts[0].close()


@pytest.mark.parametrize("made", ["before the end", "after it"])
def test_a_pipe_that_was_not_accepted_is_aborted(opened: Listener, made: str) -> None:
    with Plain(opened) as acceptor:
        if made == "after it":
            acceptor.go_on.clear()
        with came(opened, b"p"):
            until(lambda: acceptor.made and num_joining() == (made == "after it"))
            acceptor.close()
            acceptor.go_on.set()
            assert acceptor.made[0].aborted.wait(PATIENCE_S)
            with pytest.raises(ClosedError, match="the listener of the pipe 'plain' is closed"):
                acceptor.accept()


def test_no_more_are_served_at_once_than_a_bound_and_the_others_wait(
    opened: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplug.transport.acceptor.MAX_SERVED", 2)
    with Plain(opened) as acceptor, came(opened), came(opened) as second:
        until(lambda: len(acceptor.served) == 2)
        with came(opened, b"p"):
            with pytest.raises(TimeoutError):
                acceptor.accept(0.2)
            assert len(acceptor.served) == 2
            assert acceptor.obstacle() == "it serves 2 connections, and others wait"
            second.sock.sendall(b"x")
            acceptor.accept().abort()


def test_pipes_that_wait_to_be_accepted_count_as_well(
    opened: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvplug.transport.acceptor.MAX_SERVED", 2)
    with Plain(opened) as acceptor, came(opened, b"p"), came(opened, b"p"), came(opened, b"p"):
        until(lambda: len(acceptor.made) == 2)
        with pytest.raises(AssertionError):
            until(lambda: len(acceptor.served) == 3, within=0.3)
        for _ in range(3):
            acceptor.accept().abort()
