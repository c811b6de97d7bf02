"""Tensors that the receiver copies straight out of the sender's memory, and whose they are at the end."""

from __future__ import annotations

import ctypes
import logging
import mmap
import time
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import CapacityError, ClosedError, PeerGoneError, TimeoutError
from kvplug.testing.waits import Call, until
from kvplug.transport import TensorMismatchError
from kvplug_shm.memory import attach
from kvplug_shm.memory.attach import LONGEST_BYTES
from kvplug_shm.pipe.rings import LINE

HERE = Path(__file__)
ends = SimpleNamespace(**run_path(str(HERE.with_name("single_copy_ends.py"))))

there_are_huge_pages, pair, unread, huge = ends.there_are_huge_pages, ends.pair, ends.unread, ends.huge
NBYTES, endpoint, near_pair = ends.NBYTES, ends.endpoint, ends.near_pair


def test_a_large_tensor_in_huge_pages_does_not_go_through_the_ring(pair: Any) -> None:
    one, other = pair(slots=2, slot_bytes=1024)
    for sender, receiver in [(one, other), (other, one)]:
        tensor = huge(NBYTES)
        sent = sender.send_tensor(tensor)
        assert unread(receiver) == 2 * LINE
        assert not sent.done()
        assert sender.held.queued == NBYTES
        got = receiver.recv_tensor()
        sent.wait(10)
        assert torch.equal(got, tensor)
        assert sender.held.queued == unread(receiver) == 0
        tensor.zero_()  # is the sender's again
        assert got.any()


def test_what_is_small_or_in_small_pages_goes_through_the_ring(pair: Any) -> None:
    one, other = pair(slots=2, slot_bytes=2**21)
    small_pages = mmap.mmap(-1, 2**21, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    small_pages.madvise(mmap.MADV_NOHUGEPAGE)
    for tensor in (huge(2**20 - 1), torch.frombuffer(small_pages, dtype=torch.uint8)):
        one.send_tensor(tensor).wait(10)  # before anybody receives
        assert unread(other) >= tensor.nbytes
        assert torch.equal(other.recv_tensor(), tensor)


def test_what_does_not_lie_as_it_is_sent_goes_through_the_ring(pair: Any) -> None:
    one, other = pair()
    tensor = huge(2**21).view(1024, 2048).T
    one.send_tensor(tensor).wait(10)
    assert torch.equal(other.recv_tensor(), tensor)


@pytest.mark.parametrize("how", ["kept", "into", "into strided", "into another shape", "blocks"])
def test_it_is_received_in_every_way(pair: Any, how: str) -> None:
    one, other = pair()
    tensor = huge(2**21).view(torch.float16).view(64, 2, 2, 4096)
    tensor.nan_to_num_()
    sent = one.send_tensor(tensor)
    if how == "kept":
        got = other.recv_tensor()
    elif how == "into":
        got = other.recv_tensor(torch.empty_like(tensor))
    elif how == "into strided":
        got = other.recv_tensor(torch.empty(4096, 2, 2, 64, dtype=torch.float16).permute(3, 1, 2, 0))
    elif how == "into another shape":
        with pytest.raises(TensorMismatchError, match="it stays"):
            other.recv_tensor(torch.empty(3))
        got = other.recv_tensor()
    else:
        caches = [torch.zeros(70, 2, 2048, dtype=torch.float16) for _ in range(2)]
        order = torch.randperm(70)[:64].tolist()
        one_by_one = torch.zeros_like(tensor)
        with pytest.raises(TensorMismatchError):
            other.recv_blocks(caches, order)
        got = other.recv_tensor(one_by_one)
    sent.wait(10)
    assert torch.equal(got, tensor)


def test_blocks_take_what_is_offered(pair: Any) -> None:
    one, other = pair()
    caches = [torch.zeros(70, 2, 2048, dtype=torch.float16) for _ in range(2)]
    order = torch.randperm(70)[:64].tolist()
    sample = [torch.randn(70, 2, 2048).to(torch.float16) for _ in range(2)]
    ring_sent = one.send_blocks(sample, order)
    shape = other.recv_tensor()
    ring_sent.wait(10)
    tensor = huge(shape.nbytes).view(torch.float16).view(shape.shape)
    tensor.copy_(shape)
    sent = one.send_tensor(tensor)
    assert unread(other) < 3 * LINE
    other.recv_blocks(caches, order)
    sent.wait(10)
    for cache, given in zip(caches, sample, strict=True):
        assert torch.equal(cache[order], given[order])


def test_blocks_without_memory_for_what_is_offered_leave_it(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair()
    caches = [torch.zeros(70, 2, 2048, dtype=torch.float16) for _ in range(2)]
    order = torch.randperm(70)[:64].tolist()
    one.send_blocks(caches, order)
    shape = other.recv_tensor()
    tensor = huge(shape.nbytes).view(torch.float16).view(shape.shape).nan_to_num_()
    sent = one.send_tensor(tensor)

    def none(_: Any) -> Any:
        raise CapacityError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(other._pool, "tensor", none)
        with pytest.raises(CapacityError):
            other.recv_blocks(caches, order)
    assert torch.equal(other.recv_tensor(), tensor)
    sent.wait(10)


def test_the_order_is_that_of_sending(pair: Any) -> None:
    one, other = pair(slots=2, slot_bytes=1024)
    tensors = [huge(2**20 + each, each) for each in range(4)]
    small = [torch.full((each + 1,), each) for each in range(4)]
    for large, little in zip(tensors, small, strict=True):
        one.send_tensor(large)
        one.send_tensor(little)
    one.send_tensor(None)
    for large, little in zip(tensors, small, strict=True):
        assert torch.equal(other.recv_tensor(), large)
        assert torch.equal(other.recv_tensor(), little)
    assert other.recv_tensor() is None


@pytest.mark.parametrize("into", [False, True])
def test_a_deadline_cuts_it_and_the_next_call_goes_on(pair: Any, into: bool) -> None:
    one, other = pair()
    tensor = huge(NBYTES)
    sent = one.send_tensor(tensor)
    for late in range(1, 4):
        out = torch.zeros_like(tensor) if into else None
        with pytest.raises(TimeoutError, match=f"{late * LONGEST_BYTES} of {NBYTES} bytes"):
            other.recv_tensor(out, timeout=0)
        assert not sent.done()
        if out is not None:
            out.zero_()  # is the caller's again
    assert torch.equal(other.recv_tensor(torch.zeros_like(tensor) if into else None, timeout=0), tensor)
    sent.wait(10)


@pytest.mark.parametrize("how", ["abort", "close"])
def test_an_offer_that_is_taken_back_is_received_by_nobody(pair: Any, how: str) -> None:
    one, other = pair()
    sent = one.send_tensor(huge(NBYTES))
    with pytest.raises(TimeoutError):
        other.recv_tensor(timeout=0)
    if how == "abort":
        one.abort()
    else:
        one.close(timeout=0.05)
    with pytest.raises(ClosedError):
        sent.wait(10)
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            other.recv_tensor(timeout=10)


def test_closing_waits_until_what_is_offered_was_taken(pair: Any) -> None:
    one, other = pair()
    tensor = huge(NBYTES)
    sent = one.send_tensor(tensor)
    closing = Call(lambda: one.close(timeout=30))
    until(lambda: one.closed)
    assert not sent.done()
    assert torch.equal(other.recv_tensor(), tensor)
    assert closing.outcome() is None
    sent.wait(0)


def test_nobody_is_told_of_a_failure_before_the_reader_can_see_it(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair(spin_us=200_000)
    ring, theirs = one._outbox._ring, other._inbox._ring
    evict = ring.end.evict

    def late(reader: int) -> None:
        time.sleep(0.6)  # meanwhile the sender has looked long enough, and finds that it is over
        evict(reader)

    monkeypatch.setattr(ring.end, "evict", late)
    tensor = huge(NBYTES)
    told: list[bool] = []

    def send() -> None:  # looks whether it is taken, when it all ends
        transfer = one.send_tensor(tensor)
        transfer.add_done_callback(lambda _: told.append(theirs.end.evicted()))

    sending = Call(send)
    until(lambda: unread(other))
    one.abort()
    sending.outcome()
    until(lambda: told)
    assert told == [True]


def test_what_was_copied_is_not_believed_once_the_offer_was_taken_back(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = pair()
    one.send_tensor(huge(2**20))
    theirs = other._inbox._theirs
    copy = theirs.copy

    def then_taken_back(*what: int) -> None:
        copy(*what)
        one._outbox._ring.end.evict(0)

    monkeypatch.setattr(theirs, "copy", then_taken_back)
    with pytest.raises(PeerGoneError, match="takes it back"):
        other.recv_tensor(timeout=10)


@pytest.mark.parametrize("which", ["connecting", "accepting"])
def test_an_end_that_is_not_set_to_it_uses_the_ring(which: str, caplog: pytest.LogCaptureFixture) -> None:
    set_to_it, plain = endpoint(single_copy=True), endpoint()
    first, second = (set_to_it, plain) if which == "connecting" else (plain, set_to_it)
    with (
        caplog.at_level(logging.WARNING, "kvplug_shm"),
        second.listen() as listener,
        first.connect(listener.contact) as one,
        listener.accept() as other,
    ):
        tensor = huge(2**21)
        for sender, receiver in [(one, other), (other, one)]:
            sender.send_tensor(tensor).wait(10)
            assert unread(receiver) > tensor.nbytes
            assert torch.equal(receiver.recv_tensor(), tensor)
    (said,) = [each.getMessage() for each in caplog.records if "single_copy" in each.getMessage()]
    assert "keeps its memory to itself" in said


def test_a_system_that_refuses_leaves_the_ring_and_says_so(
    pair: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: Any) -> int:
        ctypes.set_errno(1)
        return -1

    monkeypatch.setattr(attach, "_call", lambda: refused)
    with caplog.at_level(logging.WARNING, "kvplug_shm"):
        one, other = pair()
    assert "ptrace_scope" in caplog.text
    tensor = huge(2**21)
    one.send_tensor(tensor).wait(10)
    assert torch.equal(other.recv_tensor(), tensor)
