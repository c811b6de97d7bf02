"""What goes wrong beneath a pipe: NCCL fails, hangs or does not end, and peers die or stop in the middle."""

from __future__ import annotations

import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from kvplug import (
    ClosedError,
    Credentials,
    KvplugError,
    PeerGoneError,
    PeerIdentity,
    TimeoutError,
    TransportError,
    dial,
    this_process,
)
from kvplug.testing import peers
from kvplug_pynccl import interface
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.nccl.errors import NcclError
from kvplug_pynccl.pipe import joining, link
from kvplug_pynccl.pipe.contact import Contact
from kvplug_pynccl.testing.fake import GPU_VARIABLE, environment

ENDS = Path(__file__).with_name("pynccl_ends.py")
ends = SimpleNamespace(**run_path(str(ENDS)))
near_pair, far_pair = ends.near_pair, ends.far_pair
in_thread, end_of, until = ends.in_thread, ends.end_of, ends.until
LARGE, PATIENCE_S = ends.LARGE, ends.PATIENCE_S


def noise(nbytes: int = LARGE) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def assert_works(pair: Any) -> None:
    one, other = pair
    for source, target in ((one, other), (other, one)):
        message = noise()
        source.send_tensor(message)
        assert torch.equal(target.recv_tensor(timeout=PATIENCE_S), message)


# -- peers that die or stop ------------------------------------------------------------------------


@pytest.mark.parametrize("with_out", [False, True])
def test_a_sender_that_dies_inside_a_transfer_is_gone_for_its_receiver(
    far_pair: Any, near_pair: Any, controls: Any, with_out: bool
) -> None:
    pipe, child = far_pair("send", LARGE, env=environment(exit_after=0))
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
    assert out is None or bool((out == 7).all())
    assert_works(near_pair())


def test_a_receiver_that_dies_inside_a_transfer_ends_it_for_its_sender(
    far_pair: Any, near_pair: Any, controls: Any
) -> None:
    pipe, _ = far_pair("echo", env=environment(exit_after=0))
    transfers = []
    with suppress(PeerGoneError):  # it may be dead before the last is queued
        for _ in range(3):
            transfers.append(pipe.send_tensor(noise()))  # noqa: PERF401
    assert transfers
    for transfer in transfers:
        with pytest.raises(PeerGoneError):
            transfer.wait(PATIENCE_S)
    until(lambda: controls.get("communicators") == 0)
    assert_works(near_pair())


def test_a_peer_that_is_killed_before_it_has_cleared_a_message_ends_its_transfer(far_pair: Any) -> None:
    pipe, child = far_pair("wait")
    assert child.recv() == "here"
    transfer = pipe.send_tensor(noise())
    with pytest.raises(TimeoutError):
        transfer.wait(0.1)
    child.kill()
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)


def test_nothing_is_enqueued_for_a_peer_that_receives_nothing(far_pair: Any, controls: Any) -> None:
    pipe, child = far_pair("wait")
    assert child.recv() == "here"
    transfer = pipe.send_tensor(noise())
    child.stop()
    with pytest.raises(TimeoutError):
        transfer.wait(0.3)
    message = next(iter(pipe._link.outbox._held.values()))
    assert message.operation is None
    child.cont()
    pipe.close(timeout=0)
    assert transfer.error() is not None


def test_a_receive_that_runs_out_of_time_inside_a_transfer_is_gone_on_with(
    near_pair: Any, controls: Any
) -> None:
    one, other = near_pair()
    message = noise()
    controls.set(hold=1)
    one.send_tensor(message)
    for out in (None, torch.zeros_like(message), None):
        with pytest.raises(TimeoutError, match="goes on with it"):
            other.recv_tensor(out, timeout=0.2)
    controls.set(hold=0)
    out = torch.zeros_like(message)
    assert other.recv_tensor(out, timeout=PATIENCE_S) is out
    assert torch.equal(out, message)
    assert_works((one, other))


def test_memory_of_the_callers_is_taken_back_at_the_deadline_and_the_pipe_is_broken(
    near_pair: Any, controls: Any
) -> None:
    one, other = near_pair()
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
    assert bool((out == 9).all())
    assert_works(near_pair())


# -- NCCL --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("result", [Result.INTERNAL_ERROR, Result.UNHANDLED_CUDA_ERROR, Result.SYSTEM_ERROR])
@pytest.mark.parametrize("idle", [False, True])
def test_an_asynchronous_error_breaks_the_pipe_with_nccls_words(
    near_pair: Any, controls: Any, result: Result, idle: bool
) -> None:
    one, other = near_pair()
    controls.set(fail_after=controls.get("operations") + (2 if idle else 0), fail_result=result)
    receiving = in_thread(lambda: other.recv_tensor(timeout=PATIENCE_S))
    one.send_tensor(noise())
    end_of(receiving)
    errors = []
    for pipe in (one, other):
        with pytest.raises((TransportError, PeerGoneError)) as raised:
            for _ in range(200):
                pipe.recv_tensor(timeout=PATIENCE_S)
        errors.append(str(raised.value))
    assert any("asked to fail" in error for error in errors), errors
    controls.set(fail_after=-1)
    assert_works(near_pair())


def test_a_remote_error_is_a_peer_that_is_gone(near_pair: Any, controls: Any) -> None:
    one, other = near_pair()
    controls.set(fail_after=controls.get("operations"), fail_result=Result.REMOTE_ERROR)
    transfer = one.send_tensor(noise())
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)


def test_an_operation_that_nccl_refuses_breaks_the_pipe(near_pair: Any, controls: Any) -> None:
    one, other = near_pair()
    controls.set(call_result=Result.INVALID_ARGUMENT)
    transfer = one.send_tensor(noise())
    with pytest.raises((TransportError, PeerGoneError)):  # of this end, or the other one was faster
        other.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(KvplugError):
        transfer.wait(PATIENCE_S)
    controls.set(call_result=0)
    assert_works(near_pair())


def test_an_abort_that_hangs_holds_up_nobody(far_pair: Any, near_pair: Any, controls: Any) -> None:
    pipe, child = far_pair("wait")
    assert child.recv() == "here"
    controls.set(abort_hangs=1)
    transfers = [pipe.send_tensor(noise()) for _ in range(2)]
    receiving = in_thread(lambda: pipe.recv_tensor(timeout=None))
    child.kill()
    assert isinstance(end_of(receiving), PeerGoneError)
    for transfer in transfers:
        with pytest.raises(PeerGoneError):
            transfer.wait(PATIENCE_S)
    end_of(in_thread(pipe.close))
    pair = near_pair()
    assert_works(pair)
    controls.set(abort_hangs=0)
    until(lambda: controls.get("communicators") == 4)


@pytest.mark.parametrize("how", ["death", "abort"])
def test_a_call_that_does_not_return_holds_up_nobody(
    far_pair: Any, near_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(link, "_STUCK_S", 0.5)
    pipe, child = far_pair("echo")
    controls.set(call_hangs=1)
    transfers = [pipe.send_tensor(noise()) for _ in range(2)]
    receiving = in_thread(lambda: pipe.recv_tensor(timeout=None))
    until(lambda: next(iter(pipe._link.outbox._held.values())).operation)
    if how == "abort":
        end_of(in_thread(pipe.abort))
    else:
        child.kill()
    assert isinstance(end_of(receiving), PeerGoneError | ClosedError)
    for transfer in transfers:
        with pytest.raises((PeerGoneError, ClosedError)):
            transfer.wait(PATIENCE_S)
    controls.set(call_hangs=0)
    until(lambda: controls.get("communicators") == 0)
    assert_works(near_pair())


def test_memory_that_cannot_be_taken_back_is_said(near_pair: Any, controls: Any) -> None:
    one, other = near_pair()
    controls.set(hold=1, abort_hangs=1)
    one.send_tensor(noise())
    out = torch.zeros(LARGE, dtype=torch.uint8)
    receiving = in_thread(lambda: other.recv_tensor(out, timeout=1.2))
    error = end_of(receiving)
    assert isinstance(error, TransportError) and "may still be written" in str(error)
    controls.set(hold=0, abort_hangs=0)
    until(lambda: controls.get("communicators") == 0)


# -- the start -----------------------------------------------------------------------------------------


def test_a_start_that_hangs_ends_at_the_deadline_and_the_listener_goes_on(
    fake_path: str, near_pair: Any, controls: Any
) -> None:
    end = ends.endpoint(fake_path)
    with end.listen() as listener:
        controls.set(init_hangs=1)
        with pytest.raises(TimeoutError, match="start of NCCL"):
            end.connect(listener.contact, timeout=0.5)
        controls.set(init_hangs=0)
        until(lambda: controls.get("communicators") == 0)
        connecting = in_thread(lambda: end.connect(listener.contact))
        with listener.accept() as one, end_of(connecting) as other:
            other.send_tensor(torch.arange(5))
            assert one.recv_tensor().tolist() == [0, 1, 2, 3, 4]


def test_a_start_that_fails_says_at_both_ends_why(fake_path: str, controls: Any, caplog: Any) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{ENDS}:connects",
            *(fake_path, listener.contact),
            env=environment(init_result=Result.INTERNAL_ERROR),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        assert child.result(PATIENCE_S).startswith("NcclInternalError: ")
        until(lambda: "was not completed" in caplog.text)
    assert "ncclInternalError" in caplog.text
    until(lambda: controls.get("communicators") == 0)


def test_two_ranks_on_one_gpu_are_told_so(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GPU_VARIABLE, "0")
    end = ends.endpoint(fake_path)
    with end.listen() as listener, pytest.raises(TransportError, match="same GPU") as raised:
        end.connect(listener.contact)
    assert isinstance(raised.value, NcclError) or "ncclInvalidUsage" in str(raised.value)
    until(lambda: controls.get("communicators") == 0)


@pytest.mark.parametrize("where", ["boot_id", "net_ns"])
def test_a_peer_elsewhere_is_told_that_nccl_listens_on_loopback_only(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    elsewhere = attrs.evolve(this_process(), **{where: "another"})
    monkeypatch.setattr(interface, "this_process", lambda: elsewhere)
    end = ends.endpoint(fake_path)
    monkeypatch.setenv(interface.VARIABLE, "=lo")
    with (
        end.listen() as listener,
        pytest.raises(TransportError, match=f"loopback only.*{interface.VARIABLE}"),
    ):
        end.connect(listener.contact)
    assert controls.get("communicators") == 0
    monkeypatch.setenv(interface.VARIABLE, "=eth0")
    interface.check_reach(this_process())


def test_ends_with_two_releases_of_nccl_are_told_both(fake_path: str, controls: Any) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{ENDS}:connects",
            *(fake_path, listener.contact),
            env=environment(version=22105),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        said = child.result(PATIENCE_S)
    assert "2.21.5" in said and "2.32.3" in said and "same release" in said


def test_a_peer_that_is_killed_while_nccl_starts_is_gone(fake_path: str, controls: Any) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        peers.start(
            f"{ENDS}:connects",
            *(fake_path, listener.contact),
            env=environment(init_hangs=1),
            timeout_s=PATIENCE_S,
        ) as child,
    ):
        until(lambda: controls.get("communicators") == 1)
        child.kill()
        until(lambda: controls.get("communicators") == 0)


@pytest.mark.parametrize("then", ["hangs up", "says why", "says what cannot be"])
def test_an_end_that_was_ready_first_and_then_fails_is_noticed_while_nccl_starts(
    fake_path: str, controls: Any, nccl: Any, caplog: Any, then: str
) -> None:
    end = ends.endpoint(fake_path)
    with (
        end.listen() as listener,
        dial(Contact.parse(listener.contact).reachable(), Credentials(), joining.PURPOSE) as connection,
    ):
        connection.sock.sendall(joining.Join(step=joining._HELLO, version=nccl.version.code).pack())
        until(lambda: controls.get("communicators") == 1)
        connection.sock.sendall(joining.Join(step=joining._READY).pack())
        if then == "hangs up":
            connection.sock.shutdown(socket.SHUT_WR)
        elif then == "says why":
            connection.sock.sendall(joining.Join(step=joining._FAILED, reason="its GPU fell off").pack())
        else:
            connection.sock.sendall(joining.Join(step=joining._READY).pack())
        until(lambda: "was not completed" in caplog.text)
        until(lambda: controls.get("communicators") == 0)
    said = {"hangs up": "hung up", "says why": "its GPU fell off", "says what cannot be": "does not join"}
    assert said[then] in caplog.text


@pytest.mark.parametrize("how", ["abort", "death"])
def test_a_callback_that_ends_its_thread_keeps_nothing_and_nobody(
    near_pair: Any, far_pair: Any, controls: Any, how: str
) -> None:
    pipe, child = far_pair("wait")
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
    until(lambda: pipe._link.control._closed)


def test_a_callback_of_what_the_peer_took_last_ends_nothing_else(near_pair: Any, controls: Any) -> None:
    one, other = near_pair()

    def leave(_: Any) -> None:
        raise SystemExit

    def receive_and_go() -> None:
        other.recv_tensor(timeout=PATIENCE_S)
        other.abort()

    transfer = one.send_tensor(noise())
    transfer.add_done_callback(leave)
    pending = one.send_tensor(noise())
    end_of(in_thread(receive_and_go))
    with pytest.raises(KvplugError):
        pending.wait(PATIENCE_S)
    until(lambda: controls.get("communicators") == 0)
    until(lambda: one._link.control._closed)


def test_a_pipe_that_finds_no_thread_leaves_nothing(
    fake_path: str, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = ends.endpoint(fake_path)
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if thread.name == "kvplug-pynccl-pipe":
            raise RuntimeError("can't start new thread")
        start(thread)

    with end.listen() as listener:
        descriptors = len(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(threading.Thread, "start", started)
        with pytest.raises((RuntimeError, PeerGoneError)):
            end.connect(listener.contact)
        until(lambda: controls.get("communicators") == 0)
        until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


# -- silence ---------------------------------------------------------------------------------------------


def test_a_process_that_was_stopped_itself_takes_no_peer_for_silent(
    far_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    one, _ = far_pair("echo", heartbeat_timeout_s=PATIENCE_S)
    step, behind = one._link.outbox.step, [0.0]

    def stopped_in_here() -> bool:
        if not behind[0]:
            one.send_tensor(None)
            assert select.select([one._link.control.sock], [], [], PATIENCE_S)[0]  # it is alive, and says so
            behind[0] = 10 * PATIENCE_S
        return bool(step())

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + behind[0], sleep=time.sleep)
    monkeypatch.setattr(link, "time", clock)
    monkeypatch.setattr(one._link.outbox, "step", stopped_in_here)
    one._link.control.wake()
    assert one.recv_tensor(timeout=PATIENCE_S) is None


def test_no_patience_of_a_peer_makes_a_pipe_beat_without_end() -> None:
    hello = joining.Join(step=joining._HELLO, sees_death=False, heartbeat_ms=0)
    assert hello.longest_silence_s(10.0) == 0.05
    assert attrs.evolve(hello, heartbeat_ms=2**32 - 1).longest_silence_s(10.0) == 10.0
    assert attrs.evolve(hello, sees_death=True).longest_silence_s(10.0) is None


def test_where_no_death_is_seen_silence_is_one_and_a_quiet_peer_is_not(fake_path: str, controls: Any) -> None:
    end = ends.endpoint(fake_path, heartbeat_timeout_s=1.0)
    with (
        end.listen() as listener,
        peers.start(f"{ENDS}:mute", *(fake_path, listener.contact, 1.0), timeout_s=2 * PATIENCE_S) as child,
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


def test_what_a_peer_has_taken_before_it_went_is_done_and_not_failed(near_pair: Any) -> None:
    for _ in range(30):
        one, other = near_pair()
        transfer = one.send_tensor(noise())
        other.recv_tensor(timeout=PATIENCE_S)
        other.abort()
        transfer.wait(PATIENCE_S)
        one.abort()


def test_ctrl_c_takes_the_callers_memory_back_and_breaks_the_pipe(far_pair: Any, controls: Any) -> None:
    pipe, child = far_pair("interrupted")
    assert child.recv() == "here"
    controls.set(hold=1)
    pipe.send_tensor(noise())
    until(lambda: any(message.operation for message in pipe._link.outbox._held.values()))
    os.kill(child.pid, signal.SIGINT)
    assert child.recv(PATIENCE_S) == "struck"
    controls.set(hold=0)
    child.send("go")
    first, second, untouched = child.result(PATIENCE_S)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("TransportError") and "interrupted" in second
    assert untouched == "True"
