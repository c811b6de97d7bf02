"""What happens when two things happen at once, or a step fails in the middle."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import cpu_ends as ends
from kvplug import (
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import Deadline, TensorMismatchError
from kvplug_cpu import inbox, listener as listening
from kvplug_cpu.data_connection import DataConnection
from kvplug_cpu.pipe import CpuPipe, CpuPipeSettings
from kvplug_testing import peers
from kvplug_testing.comparison import assert_same
from kvplug_testing.resources import Resources
from kvplug_testing.waits import Call, until

MIB = 1024 * 1024


def part_sent(peer: Any, tensor: Any, count: int = 50_000) -> bytes:
    """Send the first bytes of a message that is not split; the others."""
    (stream,) = ends.streams_of(tensor, 64 * MIB)
    peer.data[0].sendall(stream[:count])
    return stream[count:]


# -- a message that is interrupted keeps its place ------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True])
def test_a_message_interrupted_while_the_peer_closes_goes_on_with_its_first_bytes(
    by_hand: Any, with_out: bool
) -> None:
    peer, other = by_hand()
    sent = torch.randint(1, 255, (MIB,), dtype=torch.uint8)
    rest = part_sent(peer, sent)
    peer.data[0].shutdown(socket.SHUT_RD)  # as a pipe that is closed, and still sends what it has
    with contextlib.suppress(PeerGoneError):  # TCP does not say so
        other.send_tensor(torch.ones(1))
    outs = [torch.zeros_like(sent) if with_out else None for _ in range(2)]
    with pytest.raises(TimeoutError):
        other.recv_tensor(outs[0], timeout=0.2)
    sender = Call(lambda: peer.data[0].sendall(rest))
    assert_same(sent, other.recv_tensor(outs[1], timeout=5))
    sender.result()


def test_no_memory_to_keep_a_part_in_breaks_the_pipe_and_says_so(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, other = by_hand()
    part_sent(peer, torch.ones(MIB, dtype=torch.uint8))

    def none_left(meta: Any) -> Any:
        raise ResourceExhaustedError("no memory", resource="memory")

    monkeypatch.setattr(inbox, "fresh", none_left)
    with pytest.raises(KvplugError):
        other.recv_tensor(torch.zeros(MIB, dtype=torch.uint8), timeout=0.2)
    monkeypatch.undo()
    with pytest.raises(TransportError):
        other.recv_tensor(timeout=0.2)


def test_memory_that_cannot_be_written_is_refused_and_the_message_stays(local_pair: Any) -> None:
    one, other = local_pair()
    sent = torch.randn(4, 3)
    one.send_tensor(sent)
    one.send_tensor(None)
    with pytest.raises(TensorMismatchError, match="stays"):
        other.recv_tensor(torch.zeros(3).expand(4, 3), timeout=2)
    assert_same(sent, other.recv_tensor(torch.zeros(3, 4).t(), timeout=2))
    assert other.recv_tensor(timeout=2) is None


def test_signals_do_not_move_the_deadline_of_a_receive(by_hand: Any) -> None:
    peer, other = by_hand()
    part_sent(peer, torch.ones(MIB, dtype=torch.uint8))
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


# -- ending in the middle -------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_just_before_a_message_is_read_from_all_connections_wakes_its_receiver(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    one, other = local_pair(split_bytes=4096)
    one.send_tensor(torch.ones(MIB))
    assert other.recv_tensor().numel() == MIB  # so that the side reader has its thread
    make = inbox.fresh

    def slow(meta: Any) -> Any:
        getattr(other, end)(*([0.1] if end == "close" else []))
        for thread in threading.enumerate():
            if thread.name.startswith("kvplug-cpu-receive"):
                thread.join(2)
        return make(meta)

    one.send_tensor(torch.ones(MIB))
    time.sleep(0.1)
    monkeypatch.setattr(inbox, "fresh", slow)
    assert isinstance(Call(lambda: other.recv_tensor(timeout=2)).outcome(), ClosedError)


@pytest.mark.parametrize("end", ["close", "abort"])
def test_ending_in_the_middle_of_a_message_wakes_its_receiver(by_hand: Any, end: str) -> None:
    peer, other = by_hand()
    peer.data[0].sendall(ends.streams_of(torch.zeros(4 * MIB, dtype=torch.uint8), MIB)[0][:1000])
    receiving = Call(lambda: other.recv_tensor(timeout=10))
    time.sleep(0.05)
    getattr(other, end)()
    assert isinstance(receiving.outcome(), ClosedError)
    with pytest.raises(OSError):
        peer.data[0].sendall(bytes(100 * MIB))


def test_a_connection_that_breaks_alone_ends_a_receive_at_once(by_hand: Any) -> None:
    peer, other = by_hand(split_bytes=4096)
    peer.data[0].sendall(ends.streams_of(torch.ones(MIB, dtype=torch.uint8), 4096)[0][:1000])
    receiving = Call(lambda: other.recv_tensor(timeout=10))
    time.sleep(0.1)
    peer.data[1].shutdown(socket.SHUT_RDWR)
    assert isinstance(receiving.outcome(3), PeerGoneError)


@pytest.mark.full
def test_a_message_that_was_received_has_been_sent_whatever_is_queued_behind_it(local_pair: Any) -> None:
    # The writer gives the kernel small messages together; the kernel has room for two or three of these.
    one, other = local_pair(connections=1, socket_buffer_bytes=4096)
    message = torch.ones(2000, dtype=torch.uint8)
    for transfer in [one.send_tensor(message) for _ in range(200)]:
        other.recv_tensor(timeout=10)
        transfer.wait(10)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_ends_its_thread_leaves_no_other_transfer_under_way(local_pair: Any) -> None:
    one, _ = local_pair(connections=1)
    first, second = (one.send_tensor(torch.ones(20 * MIB, dtype=torch.uint8)) for _ in range(2))

    def leave(_: Any) -> None:
        raise SystemExit

    first.add_done_callback(leave)
    with contextlib.suppress(SystemExit):  # or the writer meets it
        one.abort()
    with pytest.raises(ClosedError):
        second.wait(10)
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("kvplug-cpu-send")])


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


def test_a_message_that_was_sent_is_let_go(local_pair: Any) -> None:
    one, other = local_pair(split_bytes=64 * MIB)
    source = torch.ones(8 * MIB, dtype=torch.uint8)
    gone = weakref.ref(source)
    transfer = one.send_tensor(source)
    del source
    assert other.recv_tensor().numel() == 8 * MIB
    transfer.wait(5)
    limit = time.monotonic() + 3
    while gone() is not None and time.monotonic() < limit:
        gc.collect()
        time.sleep(0.01)
    assert gone() is None, "an idle pipe holds the last message's memory"


# -- threads that cannot be started, or fail ------------------------------------------------------


def num_sockets() -> int:
    """Sockets that this process has open."""
    return sum("socket:" in each for each in Resources.of().descriptors)


def no_threads(self: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_a_send_that_gets_no_thread_ends_and_so_does_every_other(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = local_pair()
    before = num_sockets()
    with peers.nothing_left():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_threads)
            with pytest.raises((RuntimeError, TransportError)):
                one.send_tensor(torch.ones(20 * MIB))
        with pytest.raises(TransportError):
            one.send_tensor(torch.ones(20 * MIB), timeout=2)
    one.close(1)
    assert num_sockets() <= before - 3


def test_a_receive_that_gets_no_thread_breaks_the_pipe_and_it_can_be_closed(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair(split_bytes=4096)
    before = num_sockets()
    one.send_tensor(torch.ones(10_000))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises((RuntimeError, TransportError)):
            other.recv_tensor(timeout=2)
    other.close(1)
    assert num_sockets() <= before - 3


def test_a_listener_that_got_no_thread_for_one_peer_takes_the_next(
    endpoint: Any, socket_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = endpoint(socket_kind)
    start = threading.Thread.start
    failed: list[str] = []

    def once(self: threading.Thread) -> None:
        if self.name == "kvplug-cpu-join" and not failed:
            failed.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    with end.listen() as listener:
        monkeypatch.setattr(threading.Thread, "start", once)
        with pytest.raises(ResourceExhaustedError, match="no more threads"):
            end.connect(listener.contact, timeout=3)
        with end.connect(listener.contact, timeout=3), listener.accept(3):
            pass
        assert failed


def test_a_writer_that_fails_ends_its_transfers(local_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = local_pair()

    def fail(*_: Any) -> int:
        raise MemoryError

    monkeypatch.setattr(DataConnection, "send", fail)
    transfer = one.send_tensor(torch.ones(20 * MIB))
    with pytest.raises(TransportError):
        transfer.wait(3)


def test_a_side_reader_that_fails_breaks_the_pipe(local_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = local_pair(split_bytes=4096)
    receive = DataConnection.receive

    def fail(*args: Any) -> int:
        if threading.current_thread().name.startswith("kvplug-cpu-receive"):
            raise MemoryError
        return receive(*args)

    monkeypatch.setattr(DataConnection, "receive", fail)
    one.send_tensor(torch.ones(10_000))
    for _ in range(2):
        assert isinstance(Call(lambda: other.recv_tensor(timeout=1)).outcome(), TransportError)


def test_a_connection_that_is_reset_before_it_becomes_a_pipe_leaves_nothing() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    dialled = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    accepted.close()  # with a reset
    time.sleep(0.05)

    class Proven:
        describe = "a peer"
        sock = dialled

        def close(self) -> None:
            dialled.close()

    pidfd = os.pidfd_open(os.getpid())
    proven: Any = Proven()
    settings = CpuPipeSettings(
        max_in_flight_bytes=MIB,
        split_bytes=MIB,
        socket_buffer_bytes=0,
        timeout_s=20,
        heartbeat_timeout_s=10,
        max_message_bytes=None,
    )
    pipe = CpuPipe(proven, [proven], settings, pidfd=pidfd, heartbeat_interval_s=None)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(pidfd)
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=2)
    pipe.abort()
    dialled.close()
    listener.close()


# -- forks ----------------------------------------------------------------------------------------


def in_forked_child(call: Any, within: float = 5.0) -> str:
    """What ``call`` returns or raises in a forked child."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            said = str(call())
        except BaseException as e:
            said = type(e).__name__
        os.write(writable, said.encode())
        os._exit(0)
    os.close(writable)
    limit = time.monotonic() + within
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            os.close(readable)
            return "it hung"
        time.sleep(0.01)
    with os.fdopen(readable) as f:
        return f.read()


def test_a_transfer_under_way_ends_in_a_forked_child_too(local_pair: Any) -> None:
    one, other = local_pair()
    called: list[int] = []
    transfer = one.send_tensor(torch.ones(20 * MIB, dtype=torch.uint8))
    transfer.add_done_callback(lambda _: called.append(os.getpid()))
    waiting = Call(lambda: transfer.wait(10))
    assert not transfer.done()
    assert in_forked_child(lambda: transfer.wait(3)) == "ClosedError"
    assert in_forked_child(lambda: (transfer.done(), called)) == "(True, [])"
    assert other.recv_tensor().numel() == 20 * MIB
    assert waiting.outcome() is None
    assert called == [os.getpid()]


def test_a_listener_can_be_closed_in_a_forked_child_whoever_was_at_work_in_it(
    endpoint: Any, socket_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(deadline: Deadline) -> float:
        held.set()
        go.wait(10)
        return 0.0

    with endpoint(socket_kind).listen() as listener:
        with monkeypatch.context() as patch:
            patch.setattr(Deadline, "remaining", hold)
            accepting = Call(lambda: listener.accept(0))
            assert held.wait(5)
        assert in_forked_child(lambda: listener.close(), 3) == "None"
        go.set()
        accepting.raised(TimeoutError)


def test_a_pipe_that_could_not_be_made_is_hung_up_on(
    endpoint: Any, socket_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, pidfd: int | None, **__: Any) -> Any:
        if pidfd is not None:
            os.close(pidfd)
        raise RuntimeError("can't start new thread")

    end = endpoint(socket_kind)
    with peers.nothing_left(), end.listen() as listener:
        monkeypatch.setattr(listening, "CpuPipe", fail)
        with end.connect(listener.contact, timeout=3) as one, pytest.raises(PeerGoneError):
            one.recv_tensor(timeout=3)
        monkeypatch.undo()
        with end.connect(listener.contact, timeout=3), listener.accept(3):
            pass
