"""Descriptors over a connection: all of them or none, and none that stays behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvplug import PeerGoneError, ResourceExhaustedError, TimeoutError
from kvplug.transport import (
    Connection,
    Credentials,
    Deadline,
    Listener,
    Segment,
    WireError,
    dial,
    recv_fds,
    send_fds,
)
from kvplug_testing import peers

SIZE = 64 << 10
PURPOSE = "pipe-shm"


def soon() -> Deadline:
    return Deadline.after(20)


@contextlib.contextmanager
def connected() -> Iterator[tuple[Connection, Connection]]:
    """Both ends of a proven connection of this process."""
    with Listener.open("unix:", Credentials(), PURPOSE) as listener:
        ours = dial(listener.contact, Credentials(), PURPOSE, 10)
        with ours, listener.accept(10) as theirs:
            yield ours, theirs


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Connection, Connection]]:
    with connected() as ends:
        yield ends


@pytest.fixture
def own_pair() -> Iterator[tuple[Connection, Connection]]:
    with connected() as ends:
        yield ends


@pytest.fixture
def files() -> Iterator[list[int]]:
    """Descriptors of pipes, whose other ends tell when all copies are closed."""
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


def same(one: int, other: int) -> bool:
    return os.path.sameopenfile(one, other)


def close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_what_goes_along_arrives(pair: Any, files: list[int], count: int) -> None:
    ours, theirs = pair
    sending = files[:count]
    send_fds(ours, b"hello", sending, soon())
    data, fds = recv_fds(theirs, 5, 4, soon())
    try:
        assert data == b"hello"
        assert len(fds) == count
        for sent, come in zip(sending, fds, strict=True):
            assert sent != come and same(sent, come)
            assert fcntl.fcntl(come, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    finally:
        close_all(fds)
    assert ours.sock.gettimeout() is None and theirs.sock.gettimeout() is None


def test_what_follows_stays_in_the_stream(pair: Any, files: list[int]) -> None:
    ours, theirs = pair
    send_fds(ours, b"one", files[:1], soon())
    ours.sock.sendall(b"between")
    send_fds(ours, b"two", files[1:2], soon())
    data, fds = recv_fds(theirs, 3, 1, soon())
    close_all(fds)
    assert (data, len(fds)) == (b"one", 1)
    assert theirs.sock.recv(7, socket.MSG_WAITALL) == b"between"
    data, fds = recv_fds(theirs, 3, 1, soon())
    close_all(fds)
    assert (data, len(fds)) == (b"two", 1)


def test_data_that_comes_in_pieces_is_put_together(pair: Any, files: list[int]) -> None:
    ours, theirs = pair
    came: list[Any] = []
    reader = threading.Thread(target=lambda: came.append(recv_fds(theirs, 6, 2, soon())))
    reader.start()
    ours.sock.sendall(b"a")
    time.sleep(0.01)
    send_fds(ours, b"bc", files[:1], soon())
    time.sleep(0.01)
    send_fds(ours, b"d", files[1:2], soon())
    ours.sock.sendall(b"ef")
    reader.join(20)
    [(data, fds)] = came
    close_all(fds)
    assert (data, len(fds)) == (b"abcdef", 2)


def test_more_data_than_a_socket_holds_is_sent_with_its_descriptors_once(pair: Any, files: list[int]) -> None:
    ours, theirs = pair
    much = os.urandom(4 << 20)
    sender = threading.Thread(target=send_fds, args=(ours, much, files[:1], soon()))
    sender.start()
    data, fds = recv_fds(theirs, len(much), 4, soon())
    sender.join(20)
    close_all(fds)
    assert data == much
    assert len(fds) == 1


@pytest.mark.parametrize(("sent", "wanted"), [(1, 0), (2, 1), (3, 1), (3, 2), (4, 1)])
def test_too_many_are_refused_and_all_closed(own_pair: Any, files: list[int], sent: int, wanted: int) -> None:
    ours, theirs = own_pair
    before = descriptors()
    send_fds(ours, b"x", files[:sent], soon())
    with pytest.raises(WireError, match=f"more than {wanted} descriptors"):
        recv_fds(theirs, 1, wanted, soon())
    assert descriptors() == before


def test_too_many_in_several_pieces_are_refused_and_all_closed(own_pair: Any, files: list[int]) -> None:
    ours, theirs = own_pair
    before = descriptors()
    for fd in files[:3]:
        send_fds(ours, b"x", [fd], soon())
    with pytest.raises(WireError, match="more than 2 descriptors"):
        recv_fds(theirs, 3, 2, soon())
    assert descriptors() == before


def test_a_peer_that_hangs_up_half_way_leaves_nothing(own_pair: Any, files: list[int]) -> None:
    ours, theirs = own_pair
    send_fds(ours, b"ha", files[:2], soon())
    ours.close()
    before = descriptors()
    with pytest.raises(PeerGoneError):
        recv_fds(theirs, 4, 2, soon())
    assert descriptors() == before
    with pytest.raises(PeerGoneError):
        recv_fds(theirs, 4, 2, soon())
    with pytest.raises(PeerGoneError):
        send_fds(theirs, b"hello", files[:1], soon())


def test_a_peer_that_says_too_little_costs_no_more_than_the_deadline(own_pair: Any, files: list[int]) -> None:
    ours, theirs = own_pair
    before = descriptors()
    send_fds(ours, b"ha", files[:2], soon())
    with pytest.raises(TimeoutError):
        recv_fds(theirs, 4, 2, Deadline.after(0.05))
    assert descriptors() == before


def test_a_peer_that_reads_nothing_costs_no_more_than_the_deadline(own_pair: Any, files: list[int]) -> None:
    ours, _ = own_pair
    with pytest.raises(TimeoutError):
        send_fds(ours, bytes(16 << 20), files[:1], Deadline.after(0.05))


def test_descriptors_need_bytes_to_go_with(pair: Any, files: list[int]) -> None:
    with pytest.raises(ValueError, match="none"):
        send_fds(pair[0], b"", files[:1], soon())


def taking(parent: peers.Parent, contact: str, spare: int) -> Any:
    """Take two descriptors where there is room for ``spare``."""
    with dial(contact, Credentials(), PURPOSE, 10) as connection:
        before = descriptors()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = [os.dup(0) for _ in range(spare + 1)]
        close_all(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], hard))
        try:
            _, fds = recv_fds(connection, 4, 2, soon())
            text = f"{len(fds)} came"
            close_all(fds)
        except ResourceExhaustedError as e:
            text = str(e)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        return [text, descriptors() == before]


@pytest.mark.parametrize("spare", [0, 1, 2])
def test_who_can_hold_no_more_says_so_and_keeps_none(files: list[int], spare: int) -> None:
    with (
        Listener.open("unix:", Credentials(), PURPOSE) as listener,
        peers.start(taking, listener.contact, spare) as child,
        listener.accept(20) as connection,
    ):
        send_fds(connection, b"four", files[:2], soon())
        text, clean = child.result()
    assert clean
    assert ("2 came" if spare == 2 else "RLIMIT_NOFILE is ") in text


def writing(parent: peers.Parent, contact: str) -> None:
    with dial(contact, Credentials(), PURPOSE, 10) as connection:
        size, fds = recv_fds(connection, 8, 1, soon())
        segment = Segment.attach(fds[0], int.from_bytes(size, "little"))
        close_all(fds)
    assert bytes(segment.view[:4]) == b"here"
    segment.view[-5:] = b"there"


def test_memory_is_handed_to_another_process() -> None:
    segment, fd = Segment.create("test", SIZE)
    segment.view[:4] = b"here"
    with (
        Listener.open("unix:", Credentials(), PURPOSE) as listener,
        peers.start(writing, listener.contact) as child,
        listener.accept(20) as connection,
    ):
        send_fds(connection, SIZE.to_bytes(8, "little"), [fd], soon())
        os.close(fd)
        child.result()
    assert segment.view[-5:] == b"there"
