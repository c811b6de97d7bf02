"""What happens when two things happen at once, or a step fails in the middle: the same over any socket."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from typing import Any

import pytest
import torch

from cpu_ends import MIB, make_endpoint, num_sockets, streams_of
from kvplug import (
    ClosedError,
    KvplugError,
    PeerGoneError,
    ResourceExhaustedError,
    TimeoutError,
    TransportError,
)
from kvplug.transport import Deadline
from kvplug_cpu import inbox, listener as listening
from kvplug_cpu.data_connection import DataConnection
from kvplug_testing import peers
from kvplug_testing.contract.forked_child import in_forked_child
from kvplug_testing.waits import Call, until

pytestmark = pytest.mark.parametrize("socket_kind", ["unix"], indirect=True)


def threads(what: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(f"kvplug-cpu-{what}")]


def no_threads(self: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_no_memory_to_keep_a_part_in_breaks_the_pipe_and_says_so(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, other = by_hand()
    peer.data[0].sendall(streams_of(torch.ones(MIB, dtype=torch.uint8), 2 * MIB)[0][:50_000])

    def none_left(meta: Any) -> Any:
        raise ResourceExhaustedError("no memory", resource="memory")

    monkeypatch.setattr(inbox, "fresh", none_left)
    with pytest.raises(KvplugError):
        other.recv_tensor(torch.zeros(MIB, dtype=torch.uint8), timeout=0.2)
    monkeypatch.undo()
    with pytest.raises(TransportError):
        other.recv_tensor(timeout=0.2)


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
        for thread in threads("receive"):
            thread.join(2)
        return make(meta)

    one.send_tensor(torch.ones(MIB))
    time.sleep(0.1)
    monkeypatch.setattr(inbox, "fresh", slow)
    Call(lambda: other.recv_tensor(timeout=2)).raised(ClosedError)


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
    until(lambda: not threads("send"))


def test_a_message_that_was_sent_is_let_go(local_pair: Any) -> None:
    one, other = local_pair(split_bytes=64 * MIB)
    source = torch.ones(8 * MIB, dtype=torch.uint8)
    gone = weakref.ref(source)
    transfer = one.send_tensor(source)
    del source
    assert other.recv_tensor().numel() == 8 * MIB
    transfer.wait(5)
    until(lambda: gc.collect() >= 0 and gone() is None, 3, "the end of the last message's memory")


# -- threads that cannot be started, or fail ------------------------------------------------------


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_call_that_gets_no_thread_breaks_the_pipe_which_frees_everything(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    one, other = local_pair(split_bytes=4096)
    before = num_sockets()
    if direction == "receive":
        one.send_tensor(torch.ones(10_000))
        broken, call = other, lambda: other.recv_tensor(timeout=2)
    else:
        broken, call = one, lambda: one.send_tensor(torch.ones(20 * MIB), timeout=2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_threads)
        with pytest.raises((RuntimeError, TransportError)):
            call()
    with pytest.raises(TransportError):
        call()
    broken.close(1)
    assert num_sockets() <= before - 3
    assert not threads(direction)


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_thread_that_fails_breaks_the_pipe(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch, direction: str
) -> None:
    one, other = local_pair(split_bytes=4096)
    work = getattr(DataConnection, direction)

    def fail(*args: Any) -> int:
        if threading.current_thread() in threads(direction):
            raise MemoryError
        return int(work(*args))

    monkeypatch.setattr(DataConnection, direction, fail)
    transfer = one.send_tensor(torch.ones(20 * MIB))
    here, there = (TransportError, PeerGoneError)[:: 1 if direction == "receive" else -1]
    for _ in range(2):
        Call(lambda: other.recv_tensor(timeout=3)).raised(here)
    with pytest.raises(there):
        transfer.wait(3)


def test_a_pipe_that_could_not_be_made_is_hung_up_on(
    socket_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, pidfd: int | None, **__: Any) -> Any:
        if pidfd is not None:
            os.close(pidfd)
        raise RuntimeError("can't start new thread")

    end = make_endpoint(socket_kind)
    with peers.nothing_left(), end.listen() as listener:
        monkeypatch.setattr(listening, "CpuPipe", fail)
        with end.connect(listener.contact, timeout=3) as one, pytest.raises(PeerGoneError):
            one.recv_tensor(timeout=3)
        monkeypatch.undo()
        with end.connect(listener.contact, timeout=3), listener.accept(3):
            pass


def test_a_listener_can_be_closed_in_a_forked_child_whoever_was_at_work_in_it(
    socket_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, go = threading.Event(), threading.Event()

    def hold(deadline: Deadline) -> float:
        held.set()
        go.wait(10)
        return 0.0

    with make_endpoint(socket_kind).listen() as listener:
        with monkeypatch.context() as patch:
            patch.setattr(Deadline, "remaining", hold)
            accepting = Call(lambda: listener.accept(0))
            assert held.wait(5)
        assert in_forked_child(lambda: str(listener.close())) == "None"
        go.set()
        accepting.raised(TimeoutError)
