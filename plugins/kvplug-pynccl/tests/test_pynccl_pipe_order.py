"""The pipe "pynccl" over the fake NCCL: order with the caller's work, whose memory is whose, blocks."""

from __future__ import annotations

import ctypes
import os
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pynccl_ends as ends
from kvplug import TimeoutError
from kvplug.net import streams
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.device import CudaStream
from kvplug_pynccl.pipe import worker
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call, until

ENDS = Path(__file__).with_name("pynccl_ends.py")
local_pair = ends.local_pair
PATIENCE_S, gated = ends.PATIENCE_S, ends.gated

# -- order with the caller's stream ------------------------------------------------------------------


def test_what_the_caller_has_enqueued_is_done_before_it_is_sent(
    local_pair: Any, fake_path: str, controls: Any
) -> None:
    gate, caller = controls.stream(), controls.stream()
    one, other = local_pair(device=HostDevice(fake_path, caller))
    source, wanted = torch.zeros(100_000), torch.rand(100_000)
    caller.wait_for(gate, gate.record() + 1)  # something that is enqueued there later
    caller.copy(source.data_ptr(), wanted.data_ptr(), wanted.nbytes)
    transfer = one.send_tensor(source)
    receiving = Call(lambda: other.recv_tensor(timeout=PATIENCE_S))
    assert receiving.is_blocked(0.3) and not transfer.done()
    nothing = ctypes.create_string_buffer(1)
    gate.copy(ctypes.addressof(nothing), ctypes.addressof(nothing), 0)
    assert_same(wanted, receiving.outcome())
    transfer.wait(PATIENCE_S)
    for stream in (gate, caller):
        stream.close()


def test_memory_is_received_into_only_when_the_caller_has_done_with_it(
    local_pair: Any, fake_path: str, controls: Any
) -> None:
    gate, caller = controls.stream(), controls.stream()
    one, other = local_pair(device=HostDevice(fake_path, caller))
    message, out, kept = torch.rand(100_000), torch.rand(100_000), torch.zeros(100_000)
    before = out.clone()
    one.send_tensor(message)
    caller.wait_for(gate, gate.record() + 1)
    caller.copy(kept.data_ptr(), out.data_ptr(), out.nbytes)
    receiving = Call(lambda: other.recv_tensor(out, timeout=PATIENCE_S))
    assert receiving.is_blocked(0.3)
    assert_same(before, out)
    gate.copy(out.data_ptr(), out.data_ptr(), 0)
    assert receiving.outcome() is out
    assert_same(message, out)
    assert_same(before, kept)
    for stream in (gate, caller):
        stream.close()


@pytest.mark.parametrize("copied", [False, True])
def test_a_receiver_hears_of_a_message_only_when_the_senders_device_has_made_it(
    local_pair: Any, gated: Any, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(worker, "_IDLE_CHECK_S", 3600.0)  # what wakes the sender's thread is the message
    one, other = local_pair(device=gated.device, copy_bytes=1000 if copied else 0)
    source, after = torch.arange(250, dtype=torch.float32), torch.arange(5)
    gated.shut()
    transfers = [one.send_tensor(message) for message in (source, after, None)]
    out = torch.zeros_like(source)
    with pytest.raises(TimeoutError, match="no message has arrived"):
        other.recv_tensor(out, timeout=1.2)
    assert not any(transfer.done() for transfer in transfers)
    gated.open()
    if copied:
        for transfer in transfers:
            transfer.wait(PATIENCE_S)
    assert other.recv_tensor(out, timeout=PATIENCE_S) is out
    assert_same(source, out)
    assert_same(after, other.recv_tensor(timeout=PATIENCE_S))
    assert other.recv_tensor(timeout=PATIENCE_S) is None


def test_a_sender_hears_of_memory_only_when_the_receivers_device_has_done_with_it(
    local_pair: Any, gated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair(device=gated.device, copy_bytes=0)
    source = torch.rand(1000)
    one.send_tensor(source)
    heard: list[Any] = []
    clear = one._outbox.clear
    monkeypatch.setattr(one._outbox, "clear", lambda frame: (heard.append(frame), clear(frame)))
    gated.shut()
    out = torch.zeros_like(source)
    with pytest.raises(TimeoutError, match="stays"):
        other.recv_tensor(out, timeout=1.2)
    out.fill_(7)
    with pytest.raises(TimeoutError, match="stays"):
        other.recv_tensor(timeout=0.1)
    assert not heard
    assert_filled(7, out)
    gated.open()
    assert_same(source, other.recv_tensor(timeout=PATIENCE_S))


@pytest.mark.full
@pytest.mark.parametrize("where", ["strided", "blocks"])
def test_a_copy_behind_what_never_ends_keeps_the_deadline_and_the_message(
    local_pair: Any, gated: Any, controls: Any, where: str
) -> None:
    one, other = local_pair(device=gated.device)
    source, memory = torch.rand(2, 3, 5000), torch.zeros(2, 6, 5000)

    def receive(timeout: float) -> None:
        if where == "strided":
            other.recv_tensor(memory[:, 1::2], timeout=timeout)
        else:
            other.recv_blocks(list(memory), [1, 3, 5], timeout=timeout)

    controls.set(hold=1)
    one.send_tensor(source)
    receiving = Call(lambda: receive(4.0))
    until(lambda: other._inbox._active and other._inbox._active.operation)
    gated.shut()
    controls.set(hold=0)
    error = receiving.outcome()
    assert isinstance(error, TimeoutError) and "has not ended" in str(error)
    gated.open()
    receive(PATIENCE_S)
    assert_same(source, memory[:, 1::2])


def test_a_small_tensor_is_the_callers_again_once_it_was_copied(local_pair: Any) -> None:
    one, other = local_pair(copy_bytes=1000)
    small, large = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1001, dtype=torch.uint8)
    done = [one.send_tensor(tensor).done() for tensor in (small, large)]
    assert done == [True, False]
    small.fill_(1)
    for _ in range(2):
        assert int(other.recv_tensor(timeout=PATIENCE_S).sum()) == 0


def test_a_stream_is_lent_to_one_at_a_time_and_again_only_when_it_has_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = torch.device("cuda", 0)
    handles = iter(range(1, 100))

    def made(device: torch.device) -> SimpleNamespace:
        busy = SimpleNamespace(device=device, cuda_stream=next(handles), idle=False)
        busy.query = lambda: busy.idle
        return busy

    monkeypatch.setattr(streams, "_idle", defaultdict(list))
    monkeypatch.setattr(streams, "_made", made)
    lent = [CudaStream(gpu) for _ in range(40)]
    assert len({stream.handle for stream in lent}) == 40
    first = lent[0]
    for _ in range(2):
        first.close()
    assert CudaStream(gpu).handle == 41
    first._stream.idle = True
    assert [CudaStream(gpu).handle for _ in range(2)] == [1, 42]
    assert CudaStream(torch.device("cuda", 1)).handle == 43


def test_a_message_that_an_earlier_call_took_memory_for_is_handed_over_to_the_stream_of_this_one(
    local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    given: list[Any] = []
    monkeypatch.setattr(HostDevice, "hand_over", lambda _, tensor: given.append(tensor))
    controls.set(hold=1)
    one.send_tensor(torch.arange(10))
    with pytest.raises(TimeoutError):
        other.recv_tensor(timeout=0.1)
    assert not given
    controls.set(hold=0)
    received = other.recv_tensor(timeout=PATIENCE_S)
    assert len(given) == 1 and given[0] is received


# -- blocks ----------------------------------------------------------------------------------------------


def test_blocks_that_follow_one_another_are_sent_and_received_in_place_in_one_group(
    local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    source = [torch.rand(20, 4, 1000) for _ in range(3)]
    target = [torch.zeros(20, 4, 1000) for _ in range(3)]
    before = controls.get("operations")
    monkeypatch.setattr(HostDevice, "empty", lambda *_: pytest.fail("memory was taken"))
    transfer = one.send_blocks(source, [5, 6, 7])
    other.recv_blocks(target, [11, 12, 13])
    transfer.wait(PATIENCE_S)
    for sent, got in zip(source, target, strict=True):
        assert_same(sent[5:8], got[11:14])
        assert not got[:11].any() and not got[14:].any()
    assert controls.get("operations") - before == 6  # a send and a receive for each view


@pytest.mark.parametrize("ids", [[5, 6, 7], [9, 2, 4]])
@pytest.mark.parametrize("into", [[1, 2, 3], [8, 0, 5]])
def test_blocks_come_as_they_were_however_they_lie_at_either_end(
    local_pair: Any, ids: list[int], into: list[int]
) -> None:
    one, other = local_pair()
    source, target = [torch.rand(10, 9000) for _ in range(2)], [torch.zeros(10, 9000) for _ in range(2)]
    one.send_blocks(source, ids)
    other.recv_blocks(target, into)
    one.send_blocks(source, ids)
    for sent, got in zip(source, target, strict=True):
        assert_same(sent[ids], got[into])
    assert_same(torch.stack([each[ids] for each in source]), other.recv_tensor())


# -- rest ------------------------------------------------------------------------------------------------


def test_a_pipe_that_has_nothing_to_do_costs_next_to_nothing(local_pair: Any) -> None:
    one, other = local_pair()
    one.send_tensor(torch.arange(100_000))
    other.recv_tensor()
    before = sum(os.times()[:2])
    time.sleep(3.0)
    assert sum(os.times()[:2]) - before < 0.3
