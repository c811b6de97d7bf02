"""Channels between real processes and over raw sockets."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from kvplug.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    PeerGoneError,
    TimeoutError,
    UnsupportedError,
    WireError,
)
from kvplug.net.trust.challenge import Mode
from kvplug.net.trust.channel import MAX_FRAME_BYTES, Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity
from kvplug.net.trust.listener import Listener, dial
from kvplug.net.wire import values
from kvplug.net.wire.frames import HEADER_SIZE, FrameKind, encode_header

pytestmark = pytest.mark.timeout(60)

ELSEWHERE = PeerIdentity(pid=1, host="elsewhere", label="peer")


def eventually(condition: Callable[[], bool], within_s: float = 30.0) -> bool:
    until = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.005)
    return True


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    gc.collect()
    fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    yield
    gc.collect()
    assert eventually(lambda: threading.active_count() <= threads)
    assert eventually(lambda: len(os.listdir("/proc/self/fd")) <= fds), "descriptors were left open"


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
    with Listener.open("unix:", Credentials(), "test") as listener:
        a = Channel(dial(listener.contact, Credentials(), "test", 5), timeout_s=5)
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
    thread = threading.Thread(target=a.send, args=(sent[-1],))
    thread.start()
    assert [b.recv() for _ in sent] == sent
    thread.join(5)
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


def test_a_send_that_could_not_begin_sent_nothing(raw: tuple[Channel, socket.socket]) -> None:
    channel, peer = raw
    while channel.unsent == 0:
        try:
            channel.send(b"x" * 50_000, 0.01)
        except TimeoutError:
            break
    begun = channel.unsent
    with pytest.raises(TimeoutError, match="did not read"):
        channel.send("never", 0.05)
    assert channel.unsent == begun
    received = bytearray()

    def drain() -> None:
        while chunk := peer.recv(1 << 20):
            received.extend(chunk)

    thread = threading.Thread(target=drain)
    thread.start()
    channel.flush()
    assert channel.unsent == 0
    channel.send("last")
    channel.close()
    thread.join(5)
    one = frame(b"x" * 50_000)
    assert bytes(received) == one * ((len(received) - 1) // len(one)) + frame("last")


def test_what_is_not_carried_or_too_large_is_refused_before_a_byte_is_sent(
    pair: tuple[Channel, Channel],
) -> None:
    a, b = pair
    with pytest.raises(UnsupportedError):
        a.send(object())
    with pytest.raises(CapacityError):
        a.send(b"x" * (MAX_FRAME_BYTES + 1))
    a.send("fine")
    assert b.recv() == "fine"


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
    with pytest.raises(WireError, match="channel is broken"):
        channel.recv()
    with pytest.raises(WireError, match="channel is broken"):
        channel.recv()
    with pytest.raises(WireError, match="channel is broken"):
        channel.send("x")


def test_a_length_out_of_bounds_allocates_nothing(raw: tuple[Channel, socket.socket]) -> None:
    channel, peer = raw
    peer.sendall(encode_header(FrameKind.VALUE, 1 << 40))
    tracemalloc.start()
    try:
        with pytest.raises(WireError):
            channel.recv()
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_the_peers_end_is_told_after_what_had_wholly_arrived(raw: tuple[Channel, socket.socket]) -> None:
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
    woken: list[Exception] = []

    def blocked(call: Callable[[], object]) -> None:
        try:
            call()
        except ClosedError as e:
            woken.append(e)

    calls: list[Callable[[], object]] = [
        lambda: channel.recv(None),
        lambda: channel.send(b"x" * (8 << 20), None),
    ]
    threads = [threading.Thread(target=blocked, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    channel.close()
    for thread in threads:
        thread.join(5)
    assert len(woken) == 2
    channel.close()
    assert channel.closed and channel.fileno() == -1
    for call in (channel.recv, lambda: channel.send(1), channel.flush):
        with pytest.raises(ClosedError):
            call()


def test_a_second_receiver_is_busy_and_senders_take_turns(pair: tuple[Channel, Channel]) -> None:
    a, b = pair
    thread = threading.Thread(target=lambda: b.recv(5))
    thread.start()
    time.sleep(0.1)
    with pytest.raises(BusyError):
        b.recv(0)
    a.send("let go")
    thread.join(5)
    senders = [threading.Thread(target=a.send, args=((i, b"x" * 300_000),)) for i in range(8)]
    for sender in senders:
        sender.start()
    got = sorted(b.recv()[0] for _ in senders)
    for sender in senders:
        sender.join(5)
    assert got == list(range(8))


CHILD = """
import os, sys, time
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import dial
channel = Channel(dial(sys.argv[1], Credentials(), "test", 10))
channel.send("here")
"""


def start(program: str, address: str = "unix:") -> tuple[subprocess.Popen[bytes], Channel]:
    with Listener.open(address, Credentials(), "test") as listener:
        child = subprocess.Popen([sys.executable, "-c", CHILD + program, listener.contact])
        channel = Channel(listener.accept(20), timeout_s=10)
    assert channel.recv() == "here"
    return child, channel


@pytest.mark.parametrize("address", ["unix:", "127.0.0.1:0"])
def test_a_killed_peer_wakes_who_waits_for_it(address: str) -> None:
    child, channel = start("time.sleep(60)", address)
    killer = threading.Timer(0.2, os.kill, (child.pid, signal.SIGKILL))
    killer.start()
    began = time.monotonic()
    with pytest.raises(PeerGoneError, match=f"pid {child.pid}"):
        channel.recv(30)
    assert time.monotonic() - began < 15, "it waited for its timeout"
    with pytest.raises(PeerGoneError):
        channel.send("x")
    channel.close()
    child.wait(10)
    killer.join()


def test_a_stopped_peer_is_alive() -> None:
    child, channel = start("channel.recv(); channel.send('again')")
    os.kill(child.pid, signal.SIGSTOP)
    with pytest.raises(TimeoutError):
        channel.recv(0.5)
    channel.send("wake up")
    os.kill(child.pid, signal.SIGCONT)
    assert channel.recv() == "again"
    channel.close()
    child.wait(10)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd on this platform")
def test_a_peer_whose_child_keeps_the_socket_open_is_dead_all_the_same() -> None:
    program = """
import subprocess
keep = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"],
                        pass_fds=[channel.fileno()], stdin=int(sys.argv[2]) if len(sys.argv) > 2 else None)
channel.send(keep.pid)
time.sleep(60)
"""
    read_end, write_end = os.pipe()
    with Listener.open("unix:", Credentials(), "test") as listener:
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD + program, listener.contact, str(read_end)], pass_fds=[read_end]
        )
        channel = Channel(listener.accept(20), timeout_s=10)
    os.close(read_end)
    try:
        assert channel.recv() == "here"
        assert isinstance(channel.recv(), int)
        os.kill(child.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerGoneError):
            channel.recv(30)
        with pytest.raises(PeerGoneError):
            channel.send("x")
        assert time.monotonic() - began < 15, "it waited for its timeout"
    finally:
        os.close(write_end)  # the grandchild ends
        channel.close()
        child.wait(10)


def test_what_a_peer_said_before_it_died_is_still_received() -> None:
    child, channel = start("[channel.send(i) for i in range(100)]; os._exit(0)")
    child.wait(10)
    assert [channel.recv() for _ in range(100)] == list(range(100))
    with pytest.raises(PeerGoneError):
        channel.recv()
    channel.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_channel_in_a_forked_child_is_closed_and_the_parents_is_not(
    pair: tuple[Channel, Channel],
) -> None:
    a, b = pair
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for call in (a.recv, lambda: b.send(1)):
                try:
                    call()
                except ClosedError:
                    status = 0
                else:
                    status = 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    a.send("still here")
    assert b.recv() == "still here"


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
    told: list[object] = []

    def send() -> None:
        try:
            channel.send("in between", timeout=30)
        except BusyError as e:
            told.append(e)
        reading.start()

    received = bytearray()
    value = b"x" * (4 << 20)
    size = HEADER_SIZE + len(values.encode(value))
    reading = threading.Thread(target=lambda: received.extend(theirs.recv(size, socket.MSG_WAITALL)))
    assert when_it_waits(send, lambda: channel.send(value)) is None
    reading.join(30)
    assert len(told) == 1
    assert values.decode(bytes(received[HEADER_SIZE:])) == value


@pytest.mark.parametrize("verb", ["send", "recv"])
def test_a_signals_handler_may_close_the_channel_that_its_thread_uses(
    raw: tuple[Channel, socket.socket], verb: str
) -> None:
    channel, _ = raw
    calls = {"send": lambda: channel.send(b"x" * (4 << 20)), "recv": channel.recv}
    assert isinstance(when_it_waits(channel.close, calls[verb]), ClosedError)
    assert channel.fileno() == -1
