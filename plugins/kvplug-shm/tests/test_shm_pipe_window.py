"""Senders whose receiver does not run: they use more of the ring, up to its end, and nothing is lost."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shm_pipe_ends as ends
from kvplug import KvplugError, PeerGoneError
from kvplug_shm.memory.words import Words
from kvplug_shm.ring.protocol import WRITER_ASLEEP
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.waits import Call, until

by_hand = ends.by_hand

MIB = 1024 * 1024
KEEPS_PACE, GROWN = 2 * MIB, 16 * MIB
OTHERS = MIB
"""The page of words, the other ring, and small messages that reach beyond the window."""


def touched() -> int:
    """Bytes of rings that this process has touched."""
    maps = Path("/proc/self/smaps").read_text()
    return sum(
        1024 * int(kib) for kib in re.findall(r"memfd:kvplug-pipe[^\n]*\n(?:[^\n]*\n)*?Rss: +(\d+) kB", maps)
    )


def receive(parent: peers.Parent, contact: str) -> None:
    with ends.endpoint().connect(contact) as pipe:
        target = torch.empty(64 * MIB, dtype=torch.uint8)
        with contextlib.suppress(PeerGoneError):
            for number in range(10**6):
                pipe.recv_tensor(target)
                assert target[:: MIB // 2].unique().tolist() == [number % 256], number


class Sender:
    """Sends until it is stopped, to a child that receives."""

    def __init__(self, listener: Any, server: ForkServer) -> None:
        self.child = server.start(f"{__file__}:receive", listener.contact)
        self.pipe: Any = listener.accept()
        self._stopped = threading.Event()
        self.sending = Call(self._send)

    def _send(self) -> None:
        for number in range(10**6):
            if self._stopped.is_set():
                return
            self.pipe.send_tensor(torch.full((64 * MIB,), number % 256, dtype=torch.uint8)).wait(60)

    def stop(self) -> None:
        self._stopped.set()
        self.sending.result(60)

    def grow(self) -> None:
        def has_grown() -> bool:
            self.child.stop()
            time.sleep(0.02)
            self.child.cont()
            time.sleep(0.02)
            return touched() > GROWN - MIB

        until(has_grown, 60)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer) -> Iterator[Sender]:
    monkeypatch.setattr(Words, "NAP_S", 3600.0)  # only a wake ends a sleep
    with ends.endpoint().listen() as listener:
        made = Sender(listener, fork_server)
        with made.child:
            try:
                yield made
            finally:
                made.pipe.abort()


def test_a_ring_grows_up_to_its_end_beside_a_receiver_that_is_stopped_again_and_again(sender: Sender) -> None:
    sender.grow()
    sender.stop()
    assert touched() <= GROWN + OTHERS
    sender.pipe.close()
    sender.child.result()


def test_a_receiver_that_is_killed_with_a_grown_ring_ends_the_pipe(sender: Sender) -> None:
    sender.grow()
    sender.child.stop()
    sender.child.kill()
    sender.sending.raised(KvplugError, 20)
    with pytest.raises(PeerGoneError):
        sender.pipe.recv_tensor(timeout=20)


def test_a_receiver_that_is_late_and_copies_nothing_meanwhile_takes_no_more_memory(by_hand: Any) -> None:
    peer, one = by_hand()
    before, transfer = touched(), one.send_tensor(torch.ones(20 * MIB, dtype=torch.uint8))
    while not transfer.done():
        until(lambda: transfer.done() or peer.into.words.load(WRITER_ASLEEP))
        peer.read(MIB)
    assert KEEPS_PACE <= touched() - before <= KEEPS_PACE + OTHERS
