"""The other process is killed, stopped, forked, or comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from kvplug import PeerGoneError, TimeoutError
from kvplug.testing import peers

MIB = 1024 * 1024


def outcome(call: Any) -> tuple[BaseException | None, float]:
    began = time.monotonic()
    try:
        call()
    except Exception as e:
        return e, time.monotonic() - began
    return None, time.monotonic() - began


def kill_soon(child: peers.Peer, after: float = 0.2) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(after), child.kill()))
    thread.start()
    return thread


def test_a_blocked_receive_wakes_at_once_when_the_peer_is_killed(far_pair: Any) -> None:
    pipe, child = far_pair("wait")
    child.recv()
    killer = kill_soon(child)
    error, took = outcome(lambda: pipe.recv_tensor(timeout=20))
    killer.join()
    assert isinstance(error, PeerGoneError)
    assert took < 2
    assert str(child.pid) in str(error)


def test_a_blocked_send_and_every_transfer_end_when_the_peer_is_killed(far_pair: Any) -> None:
    pipe, child = far_pair("wait", max_in_flight_bytes=2 * MIB)
    child.recv()
    transfers = []
    with pytest.raises(TimeoutError):
        while True:
            transfers.append(pipe.send_tensor(torch.zeros(MIB), timeout=0.2))
    killer = kill_soon(child)
    error, took = outcome(lambda: pipe.send_tensor(torch.zeros(MIB), timeout=20))
    killer.join()
    assert isinstance(error, PeerGoneError)
    assert took < 2
    for transfer in transfers:
        if transfer.error() is not None or not transfer.done():
            with pytest.raises(PeerGoneError):
                transfer.wait(1)


def test_a_close_that_is_sending_ends_when_the_peer_is_killed(far_pair: Any) -> None:
    pipe, child = far_pair("wait")
    child.recv()
    pipe.send_tensor(torch.zeros(20 * MIB))
    killer = kill_soon(child)
    error, took = outcome(lambda: pipe.close(timeout=20))
    killer.join()
    assert error is None
    assert took < 2


@pytest.mark.parametrize(
    ("nbytes", "before_death"),
    [
        *((1000, before) for before in (0, 1, 16, 20, 27, 1025)),
        *((3 * MIB, before) for before in (10, 26, 100_000)),
    ],
)
def test_part_of_a_message_is_never_received_and_the_whole_one_before_it_may_be(
    far_pair: Any, nbytes: int, before_death: int
) -> None:
    pipe, child = far_pair("send_part", nbytes, before_death)
    child.recv()
    child.kill()
    try:
        got = pipe.recv_tensor(timeout=5)
        assert torch.equal(got, torch.arange(10))
    except PeerGoneError:
        pass
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            pipe.recv_tensor(timeout=5)
    with pytest.raises(PeerGoneError):
        pipe.send_tensor(None, timeout=5)


def test_a_peer_killed_while_it_sends_much_leaves_only_whole_messages(far_pair: Any) -> None:
    pipe, child = far_pair("send_numbers", 100_000, 300_000)
    killer = kill_soon(child, 0.3)
    count = 0
    with pytest.raises(PeerGoneError):
        while True:
            got = pipe.recv_tensor(timeout=10)
            assert got.numel() == 300_000
            assert bool((got == count % 251).all())
            count += 1
    killer.join()


def test_a_peer_that_was_dead_before_the_call_is_gone(far_pair: Any) -> None:
    pipe, child = far_pair("wait")
    child.recv()
    child.kill()
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=5)
    with pytest.raises(PeerGoneError):
        for _ in range(100):
            pipe.send_tensor(torch.zeros(1000), timeout=5).wait(5)


def test_a_peer_whose_forked_child_keeps_the_sockets_open_is_gone_when_killed(far_pair: Any) -> None:
    pipe, child = far_pair("fork_and_die")
    grandchild = child.recv()
    try:
        killer = kill_soon(child)
        error, took = outcome(lambda: pipe.recv_tensor(timeout=10))
        killer.join()
        assert isinstance(error, PeerGoneError)
        assert took < 2
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_stopped_peer_on_this_host_is_alive_and_calls_time_out(far_pair: Any) -> None:
    pipe, child = far_pair("echo", heartbeat_timeout_s=0.5, max_in_flight_bytes=2 * MIB)
    pipe.send_tensor(torch.arange(5))
    assert pipe.recv_tensor().numel() == 5
    child.stop()
    try:
        pipe.send_tensor(torch.arange(7))
        with pytest.raises(TimeoutError):
            pipe.recv_tensor(timeout=1.5)
        sent = 0
        with pytest.raises(TimeoutError):
            while True:
                pipe.send_tensor(torch.zeros(MIB, dtype=torch.uint8), timeout=0.3)
                sent += 1
    finally:
        child.cont()
    assert pipe.recv_tensor().numel() == 7
    for _ in range(sent):
        assert pipe.recv_tensor().numel() == MIB


def test_without_a_pidfd_silence_counts_as_death(far_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvplug import PeerIdentity

    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    pipe, child = far_pair("echo", heartbeat_timeout_s=1.0)
    for _ in range(8):  # longer than the timeout: heartbeats keep it alive
        pipe.send_tensor(torch.arange(5))
        assert pipe.recv_tensor().numel() == 5
        time.sleep(0.25)
    child.stop()
    try:
        error, took = outcome(lambda: pipe.recv_tensor(timeout=10))
        assert isinstance(error, PeerGoneError)
        assert "silent" in str(error)
        assert took < 3
    finally:
        child.cont()


def test_a_slow_peer_is_waited_for(far_pair: Any) -> None:
    pipe, child = far_pair("be_slow", 0.05, max_in_flight_bytes=MIB)
    for _ in range(20):
        pipe.send_tensor(torch.zeros(MIB, dtype=torch.uint8), timeout=10)
    pipe.close(timeout=10)
    assert child.result() == 20


def test_a_peer_that_was_killed_may_be_replaced(endpoint: Any, socket_kind: str) -> None:
    with peers.nothing_left(), endpoint(socket_kind).listen() as listener:
        for _ in range(3):
            child = peers.start(connect_and_echo, listener.contact, timeout_s=30)
            with child, listener.accept(20) as pipe:
                pipe.send_tensor(torch.arange(3))
                assert torch.equal(pipe.recv_tensor(), torch.arange(3))
                child.kill()
                with pytest.raises(PeerGoneError):
                    pipe.recv_tensor(timeout=5)


def connect_and_echo(parent: peers.Parent, contact: str) -> None:
    import types

    from kvplug import Credentials
    from kvplug_cpu.endpoint import CpuEndpoint

    context: Any = types.SimpleNamespace(
        options=None, credentials=Credentials(), host="127.0.0.1", device="cpu", timeout_s=20.0,
        heartbeat_timeout_s=10.0,
    )  # fmt: skip
    pipe = CpuEndpoint(context).connect(contact)
    while True:
        pipe.send_tensor(pipe.recv_tensor())
