"""Descriptors over a connection: all of them or none, and none that stays behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvplug import PeerGoneError, ResourceExhaustedError, TimeoutError
from kvplug.transport import Connection, Credentials, Deadline, WireError
from kvplug_testing import peers
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

PURPOSE = "pipe-shm"


def soon() -> Deadline:
    return Deadline.after(20)


@pytest.fixture
def pair() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a proven connection of this process."""
    with accepting("unix:", Credentials(), PURPOSE) as listener:
        ours = Connection.dial(listener.contact, Credentials(), PURPOSE, 10)
        with ours, listener.accept(10) as theirs:
            yield ours, theirs


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Descriptors of pipes, whose other ends show when all copies are closed."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(4):
            reading, writing = os.pipe()
            stack.callback(os.close, reading)
            stack.callback(os.close, writing)
            made.append(reading)
        yield made


def descriptors() -> set[str]:
    with os.scandir("/proc/self/fd") as found:
        return {each.name for each in found}


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_what_goes_along_arrives_and_what_follows_stays_in_the_stream(
    pair: Any, files: list[int], count: int
) -> None:
    ours, theirs = pair
    for _ in range(2):
        ours.send(b"hello", soon(), files[:count])
        ours.sock.sendall(b"between")
    for _ in range(2):
        data, fds = theirs.receive_fds(5, 4, soon())
        try:
            assert data == b"hello"
            assert len(fds) == count
            for sent, come in zip(files, fds, strict=False):
                assert sent != come and os.path.sameopenfile(sent, come)
                assert fcntl.fcntl(come, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        finally:
            close_all(fds)
        assert theirs.sock.recv(7, socket.MSG_WAITALL) == b"between"
    assert ours.sock.gettimeout() is None and theirs.sock.gettimeout() is None


def test_data_that_comes_in_pieces_is_put_together(pair: Any, files: list[int]) -> None:
    ours, theirs = pair
    reading = Call(lambda: theirs.receive_fds(6, 2, soon()))
    for data, fds in ((b"a", []), (b"bc", files[:1]), (b"d", files[1:2]), (b"ef", [])):
        ours.send(data, soon(), fds)
        time.sleep(0.01)
    data, came = reading.result()
    close_all(came)
    assert (data, len(came)) == (b"abcdef", 2)


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize(("sent", "wanted"), [(1, 0), (2, 1), (3, 1), (3, 2), (4, 1)])
def test_too_many_are_refused_and_all_closed(
    pair: Any, files: list[int], sent: int, wanted: int, pieces: int
) -> None:
    ours, theirs = pair
    before = descriptors()
    for piece in range(pieces):
        ours.send(b"x", soon(), files[piece:sent:pieces])
    with pytest.raises(WireError, match=f"more than {wanted} descriptors"):
        theirs.receive_fds(pieces, wanted, soon())
    assert descriptors() == before


def test_a_peer_that_hangs_up_half_way_leaves_nothing(pair: Any, files: list[int]) -> None:
    ours, theirs = pair
    ours.send(b"ha", soon(), files[:2])
    ours.close()
    before = descriptors()
    for call in (
        *[lambda: theirs.receive_fds(4, 2, soon())] * 2,
        lambda: theirs.send(b"hello", soon(), files[:1]),
    ):
        with pytest.raises(PeerGoneError):
            call()
        assert descriptors() == before


def test_a_peer_that_sends_too_little_or_reads_nothing_costs_no_more_than_the_deadline(
    pair: Any, files: list[int]
) -> None:
    ours, theirs = pair
    before = descriptors()
    ours.send(b"ha", soon(), files[:2])
    with pytest.raises(TimeoutError):
        theirs.receive_fds(4, 2, Deadline.after(0.05))
    assert descriptors() == before
    with pytest.raises(TimeoutError):
        ours.send(bytes(16 << 20), Deadline.after(0.05), files[:1])


def taking(parent: peers.Parent, contact: str) -> Any:
    """Take two descriptors three times, where there is room for none, for one, and for both of them."""
    outcomes = []
    for spare in range(3):
        with Connection.dial(contact, Credentials(), PURPOSE, 10) as connection:
            before = descriptors()
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = [os.dup(0) for _ in range(spare + 1)]
            close_all(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
            try:
                _, fds = connection.receive_fds(4, 2, soon())
                outcomes.append(f"{len(fds)} came")
                close_all(fds)
            except ResourceExhaustedError as e:
                outcomes.append(str(e))
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert descriptors() == before, outcomes
    return outcomes


def test_a_receiver_without_free_descriptors_raises_and_keeps_none(files: list[int]) -> None:
    with (
        accepting("unix:", Credentials(), PURPOSE) as listener,
        peers.start(taking, listener.contact) as child,
    ):
        for _ in range(3):
            with listener.accept(20) as connection:
                connection.send(b"four", soon(), files[:2])
                connection.sock.recv(1)  # until it has hung up
        *refused, taken = child.result()
    assert all("RLIMIT_NOFILE is " in text for text in refused) and taken == "2 came"
