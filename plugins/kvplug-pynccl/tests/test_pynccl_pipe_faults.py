"""NCCL fails, refuses, hangs or does not end beneath a pipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import pynccl_ends as ends
from kvplug import ClosedError, KvplugError, PeerGoneError, TransportError
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.pipe import worker
from kvplug_testing.waits import Call, until

ENDS = Path(__file__).with_name("pynccl_ends.py")
local_pair, remote_pair = ends.local_pair, ends.remote_pair
LARGE, PATIENCE_S, noise = ends.LARGE, ends.PATIENCE_S, ends.noise
assert_works = ends.assert_works


@pytest.mark.parametrize("result", [Result.INTERNAL_ERROR, Result.UNHANDLED_CUDA_ERROR, Result.SYSTEM_ERROR])
@pytest.mark.parametrize("idle", [False, True])
def test_an_asynchronous_error_breaks_the_pipe_with_nccls_message(
    local_pair: Any, controls: Any, result: Result, idle: bool
) -> None:
    one, other = local_pair()
    controls.set(fail_after=controls.get("operations") + (2 if idle else 0), fail_result=result)
    receiving = Call(lambda: other.recv_tensor(timeout=PATIENCE_S))
    one.send_tensor(noise())
    received = receiving.outcome()
    assert idle or not isinstance(received, torch.Tensor)  # with two operations more it may arrive
    errors = []
    for pipe in (one, other):
        with pytest.raises((TransportError, PeerGoneError)) as raised:
            for _ in range(200):
                pipe.recv_tensor(timeout=PATIENCE_S)
        errors.append(str(raised.value))
    assert any("asked to fail" in error for error in errors), errors
    controls.set(fail_after=-1)
    assert_works(local_pair())


def test_a_remote_error_is_a_peer_that_is_gone(local_pair: Any, controls: Any) -> None:
    one, other = local_pair()
    controls.set(fail_after=controls.get("operations"), fail_result=Result.REMOTE_ERROR)
    transfer = one.send_tensor(noise())
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)


def test_an_operation_that_nccl_refuses_breaks_the_pipe(local_pair: Any, controls: Any) -> None:
    one, other = local_pair()
    controls.set(call_result=Result.INVALID_ARGUMENT)
    transfer = one.send_tensor(noise())
    with pytest.raises((TransportError, PeerGoneError)):  # of this end, or the other one was faster
        other.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(KvplugError):
        transfer.wait(PATIENCE_S)
    controls.set(call_result=0)
    assert_works(local_pair())


@pytest.mark.parametrize("half", ["_outbox", "_inbox", "_control"])
def test_an_abort_waits_for_no_lock_and_wakes_every_caller_once_it_is_free(
    local_pair: Any, half: str
) -> None:
    # A signal's handler may abort the pipe: its own thread may hold one lock, and the worker another one
    # while it waits for the first.
    one, _ = local_pair()
    receiving = Call(lambda: one.recv_tensor(timeout=None))
    assert receiving.is_blocked(0.1)
    with getattr(one, half)._lock:
        Call(one.abort).result(PATIENCE_S)
        with pytest.raises(ClosedError):
            one.send_tensor(noise(100))
    assert isinstance(receiving.outcome(PATIENCE_S), ClosedError)


def test_an_abort_that_hangs_blocks_no_call(remote_pair: Any, local_pair: Any, controls: Any) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    controls.set(abort_hangs=1)
    transfers = [pipe.send_tensor(noise()) for _ in range(2)]
    receiving = Call(lambda: pipe.recv_tensor(timeout=None))
    child.kill()
    assert isinstance(receiving.outcome(), PeerGoneError)
    for transfer in transfers:
        with pytest.raises(PeerGoneError):
            transfer.wait(PATIENCE_S)
    Call(pipe.close).result()
    pair = local_pair()
    assert_works(pair)
    controls.set(abort_hangs=0)
    until(lambda: controls.get("communicators") == 4)


@pytest.mark.parametrize("how", ["death", "abort"])
def test_a_call_of_nccl_that_does_not_return_blocks_no_caller(
    remote_pair: Any, local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(worker, "_STUCK_S", 0.5)
    pipe, child = remote_pair("echo")
    controls.set(call_hangs=1)
    transfers = [pipe.send_tensor(noise()) for _ in range(2)]
    receiving = Call(lambda: pipe.recv_tensor(timeout=None))
    until(lambda: next(iter(pipe._outbox._pending.values())).operation)
    if how == "abort":
        Call(pipe.abort).result()
    else:
        child.kill()
    assert isinstance(receiving.outcome(), PeerGoneError | ClosedError)
    for transfer in transfers:
        with pytest.raises((PeerGoneError, ClosedError)):
            transfer.wait(PATIENCE_S)
    controls.set(call_hangs=0)
    until(lambda: controls.get("communicators") == 0)
    assert_works(local_pair())


def test_memory_that_cannot_be_taken_back_is_said(local_pair: Any, controls: Any) -> None:
    one, other = local_pair()
    controls.set(hold=1, abort_hangs=1)
    one.send_tensor(noise())
    out = torch.zeros(LARGE, dtype=torch.uint8)
    receiving = Call(lambda: other.recv_tensor(out, timeout=1.2))
    error = receiving.outcome()
    assert isinstance(error, TransportError) and "may still be written" in str(error)
    controls.set(hold=0, abort_hangs=0)
    until(lambda: controls.get("communicators") == 0)
