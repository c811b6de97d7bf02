"""Peers of the pipe "pynccl" that die, stop or are silent in the middle, and calls that are cut short."""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pynccl_ends as ends
from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.metrics.record import RecordedPipe
from kvplug.metrics.stats import TransferStats
from kvplug.transport import HeartbeatTerms, PeerIdentity
from kvplug_lab.gpu.fake import NCCL
from kvplug_pynccl.pipe import join, worker
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call, raises, until

ENDS = Path(__file__).with_name("pynccl_ends.py")
local_pair, remote_pair = ends.local_pair, ends.remote_pair
LARGE, PATIENCE_S, noise = ends.LARGE, ends.PATIENCE_S, ends.noise
assert_works = ends.assert_works

# -- peers that close ------------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_peer_that_closes_is_no_failure_in_the_metrics(local_pair: Any, waits: bool) -> None:
    for _ in range(10):
        stats = TransferStats()
        one, other = local_pair()
        recorded = RecordedPipe(other, stats)
        one.send_tensor(noise(100))
        recorded.recv_tensor(timeout=PATIENCE_S)
        if waits:
            receiving = Call(lambda recorded=recorded: recorded.recv_tensor(timeout=PATIENCE_S))
            assert receiving.is_blocked(0.02)
            one.close()
            error = receiving.raised(PeerGoneError)
        else:
            one.close()
            error = raises(PeerGoneError, lambda recorded=recorded: recorded.recv_tensor(timeout=PATIENCE_S))
        assert error.closed and "the peer closed it" in str(error)
        assert not stats.snapshot()["failures"]


@pytest.mark.parametrize("how", ["abort", "close before its message was taken"])
def test_a_peer_that_ends_otherwise_is_a_failure_in_the_metrics(local_pair: Any, how: str) -> None:
    stats = TransferStats()
    one, other = local_pair()
    recorded = RecordedPipe(other, stats)
    if how == "abort":
        one.abort()
    else:
        one.send_tensor(noise())
        one.close(0.1)
    assert not raises(PeerGoneError, lambda: recorded.recv_tensor(timeout=PATIENCE_S)).closed
    assert stats.snapshot()["failures"] == {"recv": {"peer_gone": 1}}


def test_a_peer_that_is_killed_did_not_close(remote_pair: Any) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    child.kill()
    assert not raises(PeerGoneError, lambda: pipe.recv_tensor(timeout=PATIENCE_S)).closed


# -- peers that die or stop ------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True])
def test_a_sender_that_dies_inside_a_transfer_is_gone_for_its_receiver(
    remote_pair: Any, local_pair: Any, controls: Any, with_out: bool
) -> None:
    pipe, child = remote_pair("send", LARGE, env=NCCL.environment(exit_after=0))
    assert child.recv() == "sent"
    out = torch.zeros(LARGE, dtype=torch.uint8) if with_out else None
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(out, timeout=PATIENCE_S)
    if out is not None:
        out.fill_(7)
    with pytest.raises(PeerGoneError):
        pipe.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(PeerGoneError):
        pipe.send_tensor(None)
    until(lambda: controls.get("communicators") == 0)
    if out is not None:
        assert_filled(7, out)
    assert_works(local_pair())


def test_a_receiver_that_dies_inside_a_transfer_ends_it_for_its_sender(
    remote_pair: Any, local_pair: Any, controls: Any
) -> None:
    pipe, _ = remote_pair("echo", env=NCCL.environment(exit_after=0))
    transfers = []
    with suppress(PeerGoneError):  # it may be dead before the last is queued
        for _ in range(3):
            transfers.append(pipe.send_tensor(noise()))  # noqa: PERF401
    assert transfers
    for transfer in transfers:
        with pytest.raises(PeerGoneError):
            transfer.wait(PATIENCE_S)
    until(lambda: controls.get("communicators") == 0)
    assert_works(local_pair())


def test_a_peer_that_is_killed_before_it_has_cleared_a_message_ends_its_transfer(remote_pair: Any) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    transfer = pipe.send_tensor(noise())
    with pytest.raises(TimeoutError):
        transfer.wait(0.1)
    child.kill()
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)


def test_nothing_is_enqueued_for_a_peer_that_receives_nothing(remote_pair: Any, controls: Any) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    transfer = pipe.send_tensor(noise())
    child.stop()
    with pytest.raises(TimeoutError):
        transfer.wait(0.3)
    message = next(iter(pipe._outbox._pending.values()))
    assert message.operation is None
    child.cont()
    pipe.close(timeout=0)
    assert transfer.error() is not None


def test_a_receive_that_runs_out_of_time_inside_a_transfer_is_gone_on_with(
    local_pair: Any, controls: Any
) -> None:
    one, other = local_pair()
    message = noise()
    controls.set(hold=1)
    one.send_tensor(message)
    for out in (None, torch.zeros_like(message), None):
        with pytest.raises(TimeoutError, match="goes on with it"):
            other.recv_tensor(out, timeout=0.2)
    controls.set(hold=0)
    out = torch.zeros_like(message)
    assert other.recv_tensor(out, timeout=PATIENCE_S) is out
    assert_same(message, out)
    assert_works((one, other))


def test_memory_of_the_callers_is_taken_back_at_the_deadline_and_the_pipe_is_broken(
    local_pair: Any, controls: Any
) -> None:
    one, other = local_pair()
    controls.set(hold=1)
    transfer = one.send_tensor(noise())
    out = torch.zeros(LARGE, dtype=torch.uint8)
    with pytest.raises(TimeoutError, match="broken"):
        other.recv_tensor(out, timeout=1.2)
    out.fill_(9)
    for _ in range(2):
        with pytest.raises(TransportError, match="ran out of time"):
            other.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)
    controls.set(hold=0)
    until(lambda: controls.get("communicators") == 0)
    assert_filled(9, out)
    assert_works(local_pair())


# -- callbacks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["abort", "death"])
def test_a_callback_that_ends_its_thread_keeps_no_memory_and_blocks_no_transfer(
    local_pair: Any, remote_pair: Any, controls: Any, how: str
) -> None:
    pipe, child = remote_pair("wait")
    assert child.recv() == "here"
    transfers = [pipe.send_tensor(noise()) for _ in range(3)]

    def leave(_: Any) -> None:
        raise SystemExit

    transfers[0].add_done_callback(leave)
    if how == "abort":
        pipe.abort()
    else:
        child.kill()
    for transfer in transfers:
        with pytest.raises((ClosedError, PeerGoneError)):
            transfer.wait(PATIENCE_S)
    until(lambda: controls.get("communicators") == 0)
    until(lambda: pipe._control._closed)


def test_a_callback_of_what_the_peer_took_last_ends_nothing_else(local_pair: Any, controls: Any) -> None:
    one, other = local_pair()

    def leave(_: Any) -> None:
        raise SystemExit

    def receive_and_go() -> None:
        other.recv_tensor(timeout=PATIENCE_S)
        other.abort()

    transfer = one.send_tensor(noise())
    transfer.add_done_callback(leave)
    pending = one.send_tensor(noise())
    Call(receive_and_go).result()
    with pytest.raises(KvplugError):
        pending.wait(PATIENCE_S)
    until(lambda: controls.get("communicators") == 0)
    until(lambda: one._control._closed)


# -- silence ---------------------------------------------------------------------------------------------


def test_a_process_that_was_stopped_itself_takes_no_peer_for_silent(
    remote_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    one, _ = remote_pair("echo", heartbeat_timeout_s=PATIENCE_S)
    step, behind = one._outbox.step, [0.0]

    def stopped_in_here() -> bool:
        if not behind[0]:
            one.send_tensor(None)
            assert select.select([one._control.sock], [], [], PATIENCE_S)[0]  # it is alive, and says so
            behind[0] = 10 * PATIENCE_S
        return bool(step())

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + behind[0], sleep=time.sleep)
    monkeypatch.setattr(worker, "time", clock)
    monkeypatch.setattr(one._outbox, "step", stopped_in_here)
    one._control.wake()
    assert one.recv_tensor(timeout=PATIENCE_S) is None


def test_no_patience_of_a_peer_makes_a_pipe_beat_without_end(fake_path: str) -> None:
    settings = ends.endpoint(fake_path, heartbeat_timeout_s=10.0)._settings

    def silence_s(heartbeat_ms: int, *, sees_death: bool = False) -> float | None:
        terms = HeartbeatTerms(sees_death, heartbeat_ms)
        return join.Join(step=join.Step.ID, terms=terms).silence_s(settings)

    assert silence_s(0) == 0.05
    assert silence_s(2**32 - 1) == 10.0
    assert silence_s(2**32 - 1, sees_death=True) is None


@pytest.mark.full
def test_where_no_death_is_seen_silence_is_one_and_a_quiet_peer_is_not(
    fake_path: str, controls: Any, fork_server: Any
) -> None:
    end = ends.endpoint(fake_path, heartbeat_timeout_s=1.0)
    with (
        end.listen() as listener,
        fork_server.start(
            f"{ENDS}:mute", *(fake_path, listener.contact, 1.0), timeout_s=2 * PATIENCE_S
        ) as child,
    ):
        with listener.accept() as pipe:
            with pytest.raises(TimeoutError):
                pipe.recv_tensor(timeout=3.0)
            pipe.send_tensor(torch.arange(4))
            assert pipe.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2, 3]
            child.stop()
            with pytest.raises(PeerGoneError, match="silent for"):
                pipe.recv_tensor(timeout=PATIENCE_S)
        child.kill()


def test_what_a_peer_has_taken_before_it_went_is_done_and_not_failed(local_pair: Any) -> None:
    for _ in range(30):
        one, other = local_pair()
        transfer = one.send_tensor(noise())
        other.recv_tensor(timeout=PATIENCE_S)
        other.abort()
        transfer.wait(PATIENCE_S)
        one.abort()


def test_ctrl_c_takes_the_callers_memory_back_and_breaks_the_pipe(remote_pair: Any, controls: Any) -> None:
    pipe, child = remote_pair("interrupted")
    assert child.recv() == "here"
    controls.set(hold=1)
    pipe.send_tensor(noise())
    until(lambda: any(message.operation for message in pipe._outbox._pending.values()))
    os.kill(child.pid, signal.SIGINT)
    assert child.recv(PATIENCE_S) == "struck"
    controls.set(hold=0)
    child.send("go")
    first, second, untouched = child.result(PATIENCE_S)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("TransportError") and "interrupted" in second
    assert untouched == "True"


def test_the_handler_of_a_signal_may_abort_the_pipe_in_the_middle_of_a_call(local_pair: Any) -> None:
    one, other = local_pair()

    def interrupted() -> None:
        with one._outbox._lock, one._inbox._lock, one._control._lock:  # what a call of this thread may hold
            one.abort()

    Call(interrupted).result()
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)
