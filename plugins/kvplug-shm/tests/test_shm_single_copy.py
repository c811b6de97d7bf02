"""Tensors that the receiver copies straight out of the sender's memory, and whose they are at the end."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvplug import (
    CapacityError,
    ClosedError,
    PeerGoneError,
    PeerIdentity,
    TensorMismatchError,
    TimeoutError,
    TransportError,
    WireError,
    this_process,
)
from kvplug.testing import peers
from kvplug.wire.frames import FrameKind, encode_header
from kvplug.wire.messages import tensor_prefix
from kvplug_shm.memory import attach
from kvplug_shm.memory.attach import LONGEST_BYTES, PeerMemory, Word, own_word
from kvplug_shm.memory.huge_pages import in_huge_pages
from kvplug_shm.pipe import joining
from kvplug_shm.pipe.announcement import OFFERED, address_line
from kvplug_shm.pipe.rings import LINE, lines

HERE = Path(__file__)
ends = SimpleNamespace(**run_path(str(HERE.with_name("pipe_ends.py"))))
near_pair = ends.near_pair
in_thread, end_of, until = ends.in_thread, ends.end_of, ends.until

NBYTES = 3 * LONGEST_BYTES + 1000


def huge(nbytes: int, seed: int = 1) -> torch.Tensor:
    """A tensor in huge pages, if the system gives any."""
    memory = mmap.mmap(-1, nbytes + 2**22, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    skip = -ctypes.addressof(ctypes.c_char.from_buffer(memory)) % 2**21
    tensor = torch.frombuffer(memory, dtype=torch.uint8)[skip : skip + nbytes]
    generator = torch.Generator().manual_seed(seed)
    tensor.copy_(torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator))
    return tensor


@pytest.fixture(scope="module", autouse=True)
def there_are_huge_pages() -> None:
    tensor = huge(2**22)
    if not in_huge_pages(tensor.data_ptr(), tensor.nbytes):
        pytest.skip("the system gives no huge pages")


@pytest.fixture
def pair(near_pair: Any) -> Callable[..., Any]:
    def make(**options: Any) -> Any:
        return near_pair(single_copy=True, **options)

    return make


def unread(pipe: Any) -> int:
    """Bytes in the ring that ``pipe`` reads."""
    return pipe._inbox._ring.end.available()


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
    closing = in_thread(lambda: one.close(timeout=30))
    until(lambda: one.closed)
    assert not sent.done()
    assert torch.equal(other.recv_tensor(), tensor)
    assert end_of(closing) is None
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

    sending = in_thread(send)
    until(lambda: unread(other))
    one.abort()
    end_of(sending)
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
    set_to_it, plain = ends.endpoint(single_copy=True), ends.endpoint()
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


# -- a peer that says what cannot be ---------------------------------------------------------------


def put(pipe: Any, *parts: bytes) -> None:
    """Into the ring, as a peer of another kind could."""
    ring = pipe._outbox._ring
    said = b"".join(part.ljust(lines(len(part)), b"\0") for part in parts)
    ring.write(ring.end.sent, said)
    ring.end.publish(len(said))


def offer(address: int, nbytes: int = 2**21) -> tuple[bytes, bytes]:
    return tensor_prefix(torch.uint8, torch.Size([nbytes]), nbytes, OFFERED), address_line(address)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (offer(0), "at an address where none can be"),
        (offer(2**63), "at an address where none can be"),
        (offer(4096), "cannot be read: Bad address"),
        ((tensor_prefix(torch.uint8, torch.Size([0]), 0, OFFERED), address_line(4096)), "does not use"),
        ((encode_header(FrameKind.NONE, 0, OFFERED),), "does not use"),
        ((tensor_prefix(torch.uint8, torch.Size([9]), 9, 2),), "does not use"),
    ],
)
def test_an_offer_that_cannot_be_is_an_error_and_the_end(pair: Any, said: Any, error: str) -> None:
    one, other = pair()
    put(one, *said)
    with pytest.raises(WireError, match=error):
        other.recv_tensor(timeout=10)
    with pytest.raises(TransportError):
        other.recv_tensor(timeout=10)


def test_an_offer_that_was_not_agreed_on_is_an_error(near_pair: Any) -> None:
    one, other = near_pair()
    tensor = huge(2**21)
    put(one, *offer(tensor.data_ptr()))
    with pytest.raises(WireError, match="not agreed on"):
        other.recv_tensor(timeout=10)


def test_an_offer_without_its_address_is_waited_for(pair: Any) -> None:
    one, other = pair()
    tensor = huge(2**21)
    prefix, line = offer(tensor.data_ptr())
    put(one, prefix)
    with pytest.raises(TimeoutError, match="not wholly arrived"):
        other.recv_tensor(timeout=0.05)
    put(one, line)
    assert torch.equal(other.recv_tensor(timeout=10), tensor)


def tell_its_word(parent: peers.Parent) -> None:
    word = own_word()
    parent.send((attrs.asdict(this_process()), word.address, word.value))
    parent.recv()


def test_who_says_that_it_is_another_process_is_not_helped_to_read_that(
    caplog: pytest.LogCaptureFixture,
) -> None:
    tuning: Any = SimpleNamespace(single_copy=True)
    ours, theirs = socket.socketpair()  # of this process, as the kernel says
    with ours, theirs, peers.start(f"{HERE}:tell_its_word") as child:
        identity, *word = child.recv()
        for peer, said, is_read in [
            (PeerIdentity(**identity), Word(*word), False),
            (this_process(), own_word(), True),
        ]:
            control: Any = SimpleNamespace(sock=ours, peer=peer, describe=str(peer))
            PeerMemory(peer, said)  # could be read
            memory = joining._memory_of(control, joining.Join(step=0, word=said), tuning)
            assert (memory is not None) is is_read
        child.send(None)
    assert "of another pid than it says" in caplog.text


# -- in two processes ------------------------------------------------------------------------------


def far_end(parent: peers.Parent, what: str) -> Any:
    contact = parent.recv()
    with ends.endpoint(single_copy=True).connect(contact) as pipe:
        return globals()[what](parent, pipe)


def offer_and_wait(parent: peers.Parent, pipe: Any) -> None:
    tensor = huge(NBYTES, 7)
    pipe.send_tensor(tensor)
    parent.send("offered")
    parent.recv()


def offer_and_become_another_program(parent: peers.Parent, pipe: Any) -> None:
    pipe.send_tensor(huge(NBYTES, 7))
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])  # noqa: S606


def take_a_part(parent: peers.Parent, pipe: Any) -> None:
    parent.recv()
    try:
        pipe.recv_tensor(timeout=0)
    except TimeoutError as e:
        parent.send(str(e))
    parent.recv()


@pytest.fixture
def far() -> Iterator[Callable[[str], tuple[Any, peers.Peer]]]:
    with ExitStack() as stack:

        def make(what: str) -> tuple[Any, peers.Peer]:
            child = stack.enter_context(peers.start(f"{HERE}:far_end", what, timeout_s=120))
            listener = ends.endpoint(single_copy=True).listen()
            stack.callback(listener.close)
            child.send(listener.contact)
            pipe = listener.accept()
            stack.callback(pipe.abort)
            return pipe, child

        yield make


def test_a_process_that_is_stopped_is_read(far: Any) -> None:
    pipe, child = far("offer_and_wait")
    assert child.recv() == "offered"
    os.kill(child.pid, signal.SIGSTOP)
    try:
        assert torch.equal(pipe.recv_tensor(timeout=30), huge(NBYTES, 7))
    finally:
        os.kill(child.pid, signal.SIGCONT)
    child.send(None)


@pytest.mark.parametrize("begun", [False, True])
def test_an_offer_goes_with_its_process(far: Any, begun: bool) -> None:
    pipe, child = far("offer_and_wait")
    assert child.recv() == "offered"
    if begun:
        with pytest.raises(TimeoutError):
            pipe.recv_tensor(timeout=0)
    child.kill()
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            pipe.recv_tensor(timeout=30)


def test_an_offer_goes_with_its_program(far: Any) -> None:
    pipe, child = far("offer_and_become_another_program")
    until(lambda: "ended" in repr(pipe))
    for _ in range(2):
        with pytest.raises(PeerGoneError):
            pipe.recv_tensor(timeout=30)
    child.kill()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_memory_is_the_senders_again_when_its_reader_is_no_more(far: Any, how: str) -> None:
    pipe, child = far("take_a_part")
    ended = threading.Event()
    sent = pipe.send_tensor(huge(NBYTES))
    sent.add_done_callback(lambda _: ended.set())
    child.send(None)
    assert "have arrived" in child.recv()
    assert not ended.is_set()
    if how == "killed":
        child.kill()
        assert ended.wait(30)
        assert isinstance(sent.error(), PeerGoneError)
    else:
        os.kill(child.pid, signal.SIGSTOP)
        try:
            pipe.close(timeout=0.1)
            assert ended.wait(30)
            assert isinstance(sent.error(), ClosedError)
        finally:
            os.kill(child.pid, signal.SIGCONT)
        child.send(None)
    assert pipe.held.queued == 0
