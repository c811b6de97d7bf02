"""Listeners at sockets in the file system: alive, dead, of others, and in other namespaces."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvplug.errors import AddressInUseError, PeerGoneError
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.transport import Acceptor
from kvplug_testing import peers
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)

OPEN = Credentials()


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """Short: a path of a socket has at most 107 bytes."""
    folder = tmp_path / "s"
    folder.mkdir()
    yield folder / "kvplug.sock"
    assert not list(folder.iterdir()), "a file was left behind"


def address_of(path: Path) -> str:
    return f"unix:{path}"


def meet(listener: Acceptor[Connection], address: str) -> None:
    with Connection.dial(address, OPEN, "test", 5) as ours, listener.accept(5) as theirs:
        ours.sock.sendall(b"ping")
        assert theirs.sock.recv(10) == b"ping"
        assert theirs.peer.pid == ours.peer.pid == os.getpid()


def test_two_ends_meet_at_a_path_that_only_this_user_can_open(path: Path) -> None:
    with accepting(address_of(path), OPEN, "test") as listener:
        assert listener.contact == address_of(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        meet(listener, listener.contact)
    assert not path.exists()
    with pytest.raises(PeerGoneError, match="No such file"):
        Connection.dial(address_of(path), OPEN, "test", 5)


def listening(parent: peers.Parent, address: str) -> None:
    accepting(address, OPEN, "test")
    parent.send("listening")
    parent.recv()


def test_the_file_of_a_dead_server_is_taken_over_and_that_of_a_live_one_is_not(path: Path) -> None:
    with peers.start(listening, address_of(path)) as child:
        assert child.recv() == "listening"
        with pytest.raises(AddressInUseError, match=rf"{path} is in use by pid {child.pid} "):
            accepting(address_of(path), OPEN, "test")
        child.stop()  # a server that is stopped is alive
        with pytest.raises(AddressInUseError):
            accepting(address_of(path), OPEN, "test")
        child.kill()
    assert path.exists()
    with accepting(address_of(path), OPEN, "test") as listener:
        meet(listener, listener.contact)


def test_a_file_that_is_not_a_socket_is_not_removed(path: Path) -> None:
    path.write_text("precious")
    with pytest.raises(AddressInUseError):
        accepting(address_of(path), OPEN, "test")
    assert path.read_text() == "precious"
    path.unlink()


def test_a_listener_removes_only_its_own_file(path: Path) -> None:
    with accepting(address_of(path), OPEN, "test") as first:
        path.unlink()
        with accepting(address_of(path), OPEN, "test") as second:
            first.close()
            meet(second, second.contact)


def test_of_many_servers_that_find_a_dead_ones_file_one_takes_it_over(path: Path) -> None:
    for _ in range(10):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        calls = [Call(lambda: accepting(address_of(path), OPEN, "test")) for _ in range(8)]
        outcomes = [call.outcome() for call in calls]
        (taken,) = [each for each in outcomes if isinstance(each, Acceptor)]
        assert sum(isinstance(each, AddressInUseError) for each in outcomes) == 7, outcomes
        meet(taken, taken.contact)
        taken.close()


ELSEWHERE = """
import sys
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.connection import Connection
with Connection.dial(sys.argv[1], Credentials(), "test", 10) as connection:
    connection.sock.sendall(b"ping")
    print(connection.peer.same_host, connection.peer.visible)
"""


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="needs unshare, and root")
def test_a_process_in_other_namespaces_of_network_and_pids_reaches_a_path(path: Path) -> None:
    with accepting(address_of(path), OPEN, "test") as listener:
        accepted = Call(lambda: listener.accept(20))
        there = subprocess.run(
            [
                *["unshare", "--net", "--pid", "--fork", "--mount-proc"],
                sys.executable,
                "-c",
                ELSEWHERE,
                listener.contact,
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert there.stdout.split() == ["True", "False"], there.stderr
        with accepted.result() as theirs:
            assert theirs.sock.recv(10) == b"ping"
            assert not theirs.peer.visible
