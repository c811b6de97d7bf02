"""What happens when two things happen at once, or a step fails in the middle: the same over any socket."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import pytest
import torch

from cpu_ends import MIB
from kvplug import (
    ClosedError,
    PeerGoneError,
    TransportError,
)
from kvplug_cpu import inbox
from kvplug_testing.waits import Call

pytestmark = pytest.mark.parametrize("socket_kind", ["unix"], indirect=True)


def threads(what: str) -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith(f"kvplug-cpu-{what}")]


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


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_peer_that_closes_is_not_taken_for_one_that_died(local_pair: Any, end: str) -> None:
    one, other = local_pair()
    getattr(one, end)()
    with pytest.raises(PeerGoneError) as raised:
        other.recv_tensor(timeout=5)
    assert raised.value.closed is (end == "close")


# -- threads that cannot be started, or fail ------------------------------------------------------


@pytest.mark.parametrize(("direction", "call"), [("send", "sendmsg"), ("receive", "recv_into")])
def test_a_thread_that_fails_breaks_the_pipe(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch, direction: str, call: str
) -> None:
    one, other = local_pair(split_bytes=4096)
    work = getattr(socket.socket, call)

    def fail(*args: Any) -> int:
        if threading.current_thread() in threads(direction):
            raise MemoryError
        return int(work(*args))

    monkeypatch.setattr(socket.socket, call, fail, raising=False)
    transfer = one.send_tensor(torch.ones(20 * MIB))
    here, there = (TransportError, PeerGoneError)[:: 1 if direction == "receive" else -1]
    for _ in range(2):
        Call(lambda: other.recv_tensor(timeout=3)).raised(here)
    with pytest.raises(there):
        transfer.wait(3)
