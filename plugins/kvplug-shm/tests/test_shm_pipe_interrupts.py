"""Interrupted calls, and ends during a copy: no data is lost, mixed, or read too late."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import shm_pipe_ends as ends
from kvplug import ClosedError, KvplugError, PeerGoneError, ResourceExhaustedError, TransportError
from kvplug.transport import Deadline, HeartbeatTerms
from kvplug_shm.memory.pool import Pool
from kvplug_shm.pipe.content import Content
from kvplug_shm.pipe.outbox import Outbox
from kvplug_testing.comparison import assert_filled
from kvplug_testing.resources import Resources
from kvplug_testing.waits import Call, until

local_pair, by_hand = ends.local_pair, ends.by_hand

MIB = 1024 * 1024


def raises(error: type[BaseException]) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


def test_what_is_being_copied_is_kept_and_not_done_when_the_pipe_is_aborted(
    by_hand: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, one = by_hand(native=False)  # whose copies can be held up
    source = torch.ones(20 * MIB, dtype=torch.uint8)
    transfer = one.send_tensor(source)
    copying, go_on = threading.Event(), threading.Event()

    def held(self: Content, *_: Any) -> None:
        copying.set()
        assert go_on.wait(ends.PATIENCE_S)

    monkeypatch.setattr(Content, "copy", held)
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


def test_a_writer_whose_start_was_interrupted_writes_nothing(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, before = threading.Thread.start, threading.enumerate()

    def num_writers() -> int:
        return sum(each.name == "kvplug-shm-send" for each in threading.enumerate() if each not in before)

    def interrupted(self: threading.Thread) -> None:
        start(self)
        raise KeyboardInterrupt

    one, other = local_pair(max_in_flight_bytes=40 * MIB)
    one.send_tensor(torch.zeros(1000, dtype=torch.uint8))
    messages = [torch.full((6 * MIB,), number, dtype=torch.uint8) for number in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            one.send_tensor(torch.zeros(40 * MIB, dtype=torch.uint8))  # it waits for room
    transfers = [one.send_tensor(each) for each in messages[:3]]
    until(lambda: num_writers() == 1, what="the end of the one whose start was interrupted")
    other.recv_tensor()
    transfers.append(one.send_tensor(messages[3]))
    for each in messages:
        assert torch.equal(other.recv_tensor(), each)
    for transfer in transfers:
        transfer.wait(ends.PATIENCE_S)


def test_a_send_that_is_interrupted_before_anything_was_written_holds_nothing(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    with monkeypatch.context() as patch:
        patch.setattr(Deadline, "expired", property(raises(KeyboardInterrupt)))
        with pytest.raises(KeyboardInterrupt):
            one.send_tensor(torch.zeros(5 * MIB, dtype=torch.uint8))
    assert one.held.queued == 0
    sending = Call(lambda: one.send_tensor(torch.ones(5 * MIB, dtype=torch.uint8)))
    assert_filled(1, other.recv_tensor(), "a message that was not sent has come")
    sending.result().wait(ends.PATIENCE_S)


def test_a_send_that_is_interrupted_in_the_middle_ends_the_pipe(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    with monkeypatch.context() as patch:
        patch.setattr(Content, "leave", raises(KeyboardInterrupt))  # what the ring has no room for
        with pytest.raises(KeyboardInterrupt):
            one.send_tensor(torch.zeros(20 * MIB, dtype=torch.uint8))
    with pytest.raises(TransportError, match="the rest of a message is not sent"):
        one.send_tensor(torch.ones(4))
    with pytest.raises(PeerGoneError):
        other.recv_tensor()


def test_a_message_of_blocks_that_finds_no_memory_was_never_there(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair(**ends.TINY)
    first = one.send_tensor(torch.zeros(4000, dtype=torch.uint8))
    cache = torch.ones(8, 10, 100, dtype=torch.uint8)
    views = [cache, torch.ones(8, 100, 10, dtype=torch.uint8).transpose(1, 2)]  # torch gathers these strides
    with monkeypatch.context() as patch:
        patch.setattr(Pool, "tensor", raises(MemoryError))
        with pytest.raises(ResourceExhaustedError):
            one.send_blocks(views, range(8))
    second = one.send_blocks(views, [1])
    assert other.recv_tensor().shape == (4000,)
    assert other.recv_tensor().shape == (2, 1, 10, 100), "something of a message that was not sent has come"
    for transfer in (first, second):
        transfer.wait(ends.PATIENCE_S)


def test_a_close_that_is_interrupted_lets_go_of_everything(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    held = Resources.of().descriptors
    transfer = one.send_tensor(torch.zeros(20 * MIB, dtype=torch.uint8))
    with monkeypatch.context() as patch:
        patch.setattr(Outbox, "drain", raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            one.close()
    assert [each for each in held - Resources.of().descriptors if "socket" in each]
    with pytest.raises(ClosedError):
        transfer.wait(ends.PATIENCE_S)
    with pytest.raises(PeerGoneError):
        other.recv_tensor()


@pytest.mark.parametrize("into", [False, True])
def test_a_peer_that_was_given_up_in_the_middle_and_goes_on_is_not_believed(by_hand: Any, into: bool) -> None:
    beats = HeartbeatTerms(sees_death=False, heartbeat_ms=200)  # it sends none
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


def test_a_callback_that_ends_its_thread_ends_the_pipe_and_not_in_silence(local_pair: Any) -> None:
    one, other = local_pair()
    one.send_tensor(torch.zeros(20 * MIB, dtype=torch.uint8)).add_done_callback(raises(SystemExit))
    behind = one.send_tensor(torch.zeros(30 * MIB, dtype=torch.uint8))
    receiving = Call(other.recv_tensor)
    with pytest.raises(KvplugError):
        behind.wait(ends.PATIENCE_S)
    assert isinstance(receiving.outcome(), torch.Tensor)
