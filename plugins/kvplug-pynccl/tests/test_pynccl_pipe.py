"""The pipe "pynccl" over the fake NCCL: what it shares with "cuda-ipc", order, and what becomes of memory."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pynccl_ends as ends
from device_pipes import PipesOverAFake, assert_works, noise
from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.metrics.record import PipeRecorder
from kvplug.metrics.stats import TransferStats
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.transport import Channel, Connection, Credentials, PeerIdentity
from kvplug.transport.pipe import offers
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.device import CudaDevice
from kvplug_pynccl.nccl.abi import Result
from kvplug_pynccl.pipe import join, pipe as pipes
from kvplug_pynccl.pipe.contact import PyncclContact
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_pynccl.pipe.pipe import PyncclPipe
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call, until

LARGE, PATIENCE_S = ends.LARGE, ends.PATIENCE_S
PREFIX = tensor_prefix(torch.float32, torch.Size((10,)), 40)
HUGE = tensor_prefix(torch.uint8, torch.Size((2**55,)), 2**55)


class TestPipeOverTheFake(PipesOverAFake):
    ends = ends
    factory = PyncclEndpoint
    lies = {  # noqa: RUF012
        "no value": ("hello",),
        "a kind that there is not": (["push", 1],),
        "a message within another": (["offer", PREFIX, 20, 1],),
        "a prefix that contradicts itself": (["offer", PREFIX + b"x", 40, 1],),
        "no pieces": (["offer", PREFIX, 40, 0],),
        "pieces that it does not have": (["offer", PREFIX, 40, 3],),
        "None in pieces": (["offer", NONE, 0, 2],),
        "clear for what was not offered": (["clear", 1],),
        "taken what was not offered": (["taken", 1],),
        "more offers than may be untaken": [["offer", NONE, 0, 0]] * 1000,
    }
    nonsense = (
        b"",
        b"x" * 1000,
        True,
        {"sees_death": True, "heartbeat_ms": 100, "own": {"version": 7}},
        {"failed": "no room\n\x1b[2J" * 999},
    )

    def gpu(self, name: str, path: str) -> CudaDevice:
        return CudaDevice(name)

    def lie(self, liar: Any, lie: Any) -> None:
        with contextlib.suppress(PeerGoneError, ClosedError):  # the other end may see it before all is sent
            for value in lie:
                liar.channel.send(value)

    def join(self, contact: str, nonsense: Any) -> Any:
        connection = Connection.dial(PyncclContact.parse(contact).reachable()[0], Credentials(), join.PURPOSE)
        if isinstance(nonsense, bytes):
            connection.sock.sendall(nonsense)
            return connection
        channel = Channel(connection)
        channel.send(nonsense)
        return channel


# -- order with the caller's stream ------------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_a_receiver_hears_of_a_message_only_when_the_senders_device_has_made_it(
    local_pair: Any, gated: Any, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    monkeypatch.setattr(offers, "_POLL_S", 3600.0)  # what wakes the sender's thread is the message
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


def test_a_small_tensor_is_the_callers_again_once_it_was_copied(local_pair: Any) -> None:
    one, other = local_pair(copy_bytes=1000)
    small, large = torch.zeros(1000, dtype=torch.uint8), torch.zeros(1001, dtype=torch.uint8)
    done = [one.send_tensor(tensor).done() for tensor in (small, large)]
    assert done == [True, False]
    small.fill_(1)
    for _ in range(2):
        assert int(other.recv_tensor(timeout=PATIENCE_S).sum()) == 0


def test_a_message_that_an_earlier_call_took_memory_for_is_handed_over_to_the_stream_of_this_one(
    local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    given: list[Any] = []

    def hand_over(device: HostDevice, tensor: torch.Tensor) -> None:
        if device.stream is None:  # the caller's, not one of the pipe's
            given.append(tensor)

    monkeypatch.setattr(HostDevice, "hand_over", hand_over)
    controls.set(hold=1)
    one.send_tensor(torch.arange(10))
    with pytest.raises(TimeoutError):
        other.recv_tensor(timeout=0.1)
    assert not given
    controls.set(hold=0)
    received = other.recv_tensor(timeout=PATIENCE_S)
    assert len(given) == 1 and given[0] is received


# -- memory that calls and transfers use ---------------------------------------------------------------


def test_nothing_is_enqueued_for_a_peer_that_receives_nothing(local_pair: Any, calls: list[str]) -> None:
    one, _ = local_pair()
    transfer = one.send_tensor(noise())
    with pytest.raises(TimeoutError):
        transfer.wait(0.3)
    assert not calls
    one.close(timeout=0)
    assert transfer.error() is not None


@pytest.mark.parametrize("hangs", [False, True])
def test_memory_of_the_callers_is_taken_back_at_the_deadline_or_its_loss_is_reported(
    local_pair: Any, controls: Any, hangs: bool
) -> None:
    one, other = local_pair()
    controls.set(hold=1, abort_hangs=hangs)
    transfer = one.send_tensor(noise(LARGE))
    out = torch.zeros(LARGE, dtype=torch.uint8)
    kind, words = (TransportError, "may still be written") if hangs else (TimeoutError, "broken")
    with pytest.raises(kind, match=words):
        other.recv_tensor(out, timeout=1.2)
    out.fill_(9)
    for _ in range(2):
        with pytest.raises(TransportError, match="ran out of time"):
            other.recv_tensor(timeout=PATIENCE_S)
    with pytest.raises(PeerGoneError):
        transfer.wait(PATIENCE_S)
    controls.set(hold=0, abort_hangs=0)
    until(lambda: controls.get("communicators") == 0)
    if not hangs:
        assert_filled(9, out)
    assert_works(local_pair())


def test_ctrl_c_takes_the_callers_memory_back_and_breaks_the_pipe(
    remote_pair: Any, controls: Any, calls: list[str]
) -> None:
    pipe, child = remote_pair("interrupted", LARGE)
    assert child.recv() == "here"
    controls.set(hold=1)
    pipe.send_tensor(noise(LARGE))
    until(lambda: calls)
    os.kill(child.pid, signal.SIGINT)
    assert child.recv(PATIENCE_S) == "struck"
    controls.set(hold=0)
    child.send("go")
    first, second, untouched = child.result(PATIENCE_S)
    assert first.startswith("KeyboardInterrupt")
    assert second.startswith("TransportError") and "interrupted" in second
    assert untouched == "True"


def test_what_a_peer_has_taken_before_it_went_is_done_and_not_failed(local_pair: Any) -> None:
    for _ in range(10):
        one, other = local_pair()
        transfer = one.send_tensor(noise(LARGE))
        other.recv_tensor(timeout=PATIENCE_S)
        other.abort()
        transfer.wait(PATIENCE_S)
        one.abort()


# -- how it ends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["close", "abort", "close untaken", "death"])
def test_only_a_peer_that_closes_is_no_failure_in_the_metrics(
    local_pair: Any, remote_pair: Any, how: str
) -> None:
    one, pipe = remote_pair("wait")[::-1] if how == "death" else local_pair()
    stats = TransferStats()
    pipe.recorder = PipeRecorder(stats)
    match how:
        case "death":
            one.kill()
        case "abort":
            one.abort()
        case "close untaken":
            one.send_tensor(noise())
            one.close(0.1)
        case _:
            one.close()
    with pytest.raises(PeerGoneError) as raised:
        pipe.recv_tensor(timeout=PATIENCE_S)
    closes = how == "close"
    assert raised.value.closed is closes
    assert stats.snapshot()["failures"] == ({} if closes else {"recv": {"peer_gone": 1}})


def test_a_process_that_was_stopped_itself_takes_no_peer_for_silent(
    remote_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    one, _ = remote_pair("echo", heartbeat_timeout_s=PATIENCE_S)
    step, behind = vars(PyncclPipe)["_step"], [0.0]

    def stopped_in_here(pipe: PyncclPipe) -> bool:
        if not behind[0]:
            behind[0] = 10 * PATIENCE_S
            one.send_tensor(None)
            assert select.select([one.channel], [], [], PATIENCE_S)[0]  # it is alive: its values arrive
        return bool(step(pipe))

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + behind[0], sleep=time.sleep)
    monkeypatch.setattr(offers, "time", clock)
    monkeypatch.setattr(PyncclPipe, "_step", stopped_in_here)
    one.send_tensor(None)
    assert one.recv_tensor(timeout=PATIENCE_S) is None
    for _ in range(2):  # what came before the pipe looked at the time is received in any case
        assert one.recv_tensor(timeout=PATIENCE_S) is None
        one.send_tensor(None)


# -- NCCL ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("faults", "kind"),
    [
        ({"fail_after": 0, "fail_result": Result.REMOTE_ERROR}, PeerGoneError),
        ({"fail_after": 2, "fail_result": Result.SYSTEM_ERROR}, (TransportError, PeerGoneError)),  # idle
        # Of this end, or the other one was faster.
        ({"call_result": Result.INVALID_ARGUMENT}, (TransportError, PeerGoneError)),
    ],
    ids=["remote error", "while idle", "refused"],
)
def test_an_operation_that_nccl_fails_or_refuses_breaks_the_pipe(
    local_pair: Any, controls: Any, faults: dict[str, int], kind: Any
) -> None:
    one, other = local_pair()
    if "fail_after" in faults:
        faults = {**faults, "fail_after": controls.get("operations") + faults["fail_after"]}
    controls.set(**faults)
    one.send_tensor(noise())
    for pipe in (other, one):
        with pytest.raises(kind):
            for _ in range(200):
                pipe.recv_tensor(timeout=PATIENCE_S)
    controls.reset()
    assert_works(local_pair())


@pytest.mark.parametrize(("fault", "how"), [("abort", "death"), ("call", "death"), ("call", "abort")])
def test_an_abort_or_a_call_of_nccl_that_hangs_blocks_no_caller(
    remote_pair: Any,
    local_pair: Any,
    controls: Any,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    fault: str,
    how: str,
) -> None:
    monkeypatch.setattr(pipes, "_STUCK_S", 0.5)
    pipe, child = remote_pair("echo" if fault == "call" else "wait")
    controls.set(**{f"{fault}_hangs": 1})
    transfers = [pipe.send_tensor(noise()) for _ in range(2)]
    receiving = Call(lambda: pipe.recv_tensor(timeout=None))
    if fault == "call":
        until(lambda: calls)
    if how == "abort":
        Call(pipe.abort).result()
    else:
        child.kill()
    assert isinstance(receiving.outcome(), PeerGoneError | ClosedError)
    for transfer in transfers:
        with pytest.raises((PeerGoneError, ClosedError)):
            transfer.wait(PATIENCE_S)
    Call(pipe.close).result()
    if fault == "abort":
        assert_works(local_pair())
    controls.set(**{f"{fault}_hangs": 0})
    assert_works(local_pair())


# -- peers that lie ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [["clear", 3], ["clear", 0], ["clear", 1 << 40], ["taken", 1], ["taken", 2]],
    ids=["other pieces", "no pieces", "too many pieces", "has it already", "has more"],
)
def test_a_peer_that_answers_what_cannot_be_to_an_offer_ends_the_pipe(local_pair: Any, value: Any) -> None:
    one, other = local_pair()
    transfer = one.send_tensor(torch.zeros(100_000))
    other.channel.send(value)
    with pytest.raises(TransportError, match="an invalid value"):
        transfer.wait(PATIENCE_S)


def test_a_message_that_is_not_ready_cannot_be_cleared(local_pair: Any, gated: Any) -> None:
    one, other = local_pair(device=gated.device)
    gated.shut()
    transfer = one.send_tensor(torch.zeros(100_000))
    other.channel.send(["clear", 1])
    with pytest.raises(TransportError, match="an invalid value"):
        transfer.wait(PATIENCE_S)
    gated.open()


def test_memory_is_allocated_for_a_message_only_when_a_call_receives_it(local_pair: Any) -> None:
    one, other = local_pair()
    one.channel.send(["offer", HUGE, 2**55, 1])
    for _ in range(2):  # it does not end the pipe
        with pytest.raises(KvplugError, match="this process can have"):
            other.recv_tensor(timeout=PATIENCE_S)
