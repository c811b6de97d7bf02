"""Interrupted calls, and ends during a copy: no data is lost, mixed, or read too late."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

import shm_pipe_ends as ends
from kvplug import ClosedError, PeerGoneError, TransportError
from kvplug_shm.pipe.rings import Outgoing

local_pair, by_hand = ends.local_pair, ends.by_hand

MIB = 1024 * 1024


def test_what_is_being_copied_is_kept_and_not_done_when_the_pipe_is_aborted(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, one = by_hand()
    source = torch.ones(20 * MIB, dtype=torch.uint8)
    transfer = one.send_tensor(source)
    copying, go_on = threading.Event(), threading.Event()

    def held(*_: Any, **__: Any) -> int:
        copying.set()
        assert go_on.wait(ends.PATIENCE_S)
        return 0

    monkeypatch.setattr(Outgoing, "push", held)
    peer.read()
    assert copying.wait(ends.PATIENCE_S)
    kept = weakref.ref(source.untyped_storage())
    del source
    one.abort()
    gc.collect()
    try:
        assert kept() is not None, "memory was freed while it was copied"
        assert not transfer.done(), "the caller was told that its memory is its own while it was copied"
    finally:
        go_on.set()
    with pytest.raises(ClosedError):
        transfer.wait(ends.PATIENCE_S)


def test_a_send_that_is_interrupted_in_the_middle_ends_the_pipe(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    push = Outgoing.push

    def interrupted(*args: Any, **given: Any) -> int:
        push(*args, **given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Outgoing, "push", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.send_tensor(torch.zeros(20 * MIB, dtype=torch.uint8))
    with pytest.raises(TransportError, match="the rest of a message is not sent"):
        one.send_tensor(torch.ones(4))
    with pytest.raises(PeerGoneError):
        other.recv_tensor()


@pytest.mark.parametrize("into", [False, True])
def test_a_peer_that_was_given_up_in_the_middle_and_goes_on_is_not_believed(by_hand: Any, into: bool) -> None:
    beats = (False, 200)  # it sends none
    peer, other = by_hand(beats, slots=2, slot_bytes=4096, heartbeat_timeout_s=0.2)
    sent = torch.ones(7_000, dtype=torch.uint8)
    content = ends.content_of(sent)
    peer.lay(ends.prefix_of(sent) + content[:1024])
    out = torch.zeros_like(sent) if into else None
    with pytest.raises(PeerGoneError, match="silent"):
        other.recv_tensor(out)
    peer.lay(content[1024:])
    for _ in range(3):
        with pytest.raises(PeerGoneError):
            other.recv_tensor()
