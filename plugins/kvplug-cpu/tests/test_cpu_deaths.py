"""The other process is killed at a byte of a message; or it is silent, and its death could not be seen."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from kvplug import PeerGoneError

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("nbytes", "before_death"),
    [
        *((1000, before) for before in (0, 1, 16, 20, 27, 1025)),
        *((3 * MIB, before) for before in (10, 26, 100_000)),
    ],
)
def test_part_of_a_message_is_never_received_and_the_whole_one_before_it_may_be(
    remote_pair: Any, nbytes: int, before_death: int
) -> None:
    pipe, child = remote_pair("send_part", nbytes, before_death)
    child.recv()
    child.kill()
    try:
        got = pipe.recv_tensor(timeout=5)
        assert torch.equal(got, torch.arange(10))
    except PeerGoneError:
        pass
    for _ in range(2):
        with pytest.raises(PeerGoneError, match=f"pid {child.pid}"):
            pipe.recv_tensor(timeout=5)
    with pytest.raises(PeerGoneError):
        pipe.send_tensor(None, timeout=5)


@pytest.mark.full
def test_without_a_pidfd_silence_counts_as_death(remote_pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvplug.transport import PeerIdentity

    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    pipe, child = remote_pair("echo", heartbeat_timeout_s=1.0)
    for _ in range(8):  # longer than the timeout: heartbeats keep it alive
        pipe.send_tensor(torch.arange(5))
        assert pipe.recv_tensor().numel() == 5
        time.sleep(0.25)
    child.stop()
    try:
        with pytest.raises(PeerGoneError, match="silent"):
            pipe.recv_tensor(timeout=10)
    finally:
        child.cont()
