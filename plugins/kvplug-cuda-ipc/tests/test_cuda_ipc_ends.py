"""The pipe "cuda-ipc" over the fake: order with the caller's work, blocks, memory, a hostile peer."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import cuda_ipc_ends as ends
from kvplug import ClosedError, PeerGoneError, TimeoutError, TransportError, UnsupportedError
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.transport import (
    Channel,
    Credentials,
    Deadline,
    HeartbeatTerms,
    Lifecycle,
    TensorMismatchError,
    WireError,
    dial,
)
from kvplug_cuda_ipc.memory import GRANULARITY, Mapping, Ring, Staging
from kvplug_cuda_ipc.pipe import join
from kvplug_cuda_ipc.pipe.contact import CudaIpcContact
from kvplug_cuda_ipc.pipe.content import Runs
from kvplug_cuda_ipc.pipe.frames import MAX_PIECES, FrameKind, Piece, decode, encode
from kvplug_cuda_ipc.pipe.pieces import AnnouncedPieces
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import Call, until

ENDS = Path(__file__).with_name("cuda_ipc_ends.py")
local_pair = ends.local_pair
LARGE, MIB, PATIENCE_S = ends.LARGE, ends.MIB, ends.PATIENCE_S


# -- order with the caller's stream ------------------------------------------------------------------


def test_what_the_caller_has_enqueued_is_done_before_it_is_sent(
    local_pair: Any, fake_path: str, controls: Any
) -> None:
    caller = controls.stream()
    device = HostDevice(fake_path, caller)
    one, other = local_pair(device=device)
    source, wanted = torch.zeros(100_000), torch.rand(100_000)
    controls.set(gate=1)
    caller.put_gate()
    device.runtime.memcpy_async(source.data_ptr(), wanted.data_ptr(), wanted.nbytes, caller.handle)
    transfer = one.send_tensor(source)
    receiving = Call(lambda: other.recv_tensor(timeout=PATIENCE_S))
    assert receiving.is_blocked(0.3) and not transfer.done()
    controls.set(gate=0)
    assert_same(wanted, receiving.outcome())
    transfer.wait(PATIENCE_S)
    caller.close()


def test_a_callback_that_ends_its_thread_leaves_no_other_transfer_under_way(
    local_pair: Any, controls: Any
) -> None:
    one, _ = local_pair()
    controls.set(hold=1)
    first, second = (one.send_tensor(torch.ones(MIB, dtype=torch.uint8)) for _ in range(2))

    def leave(_: Any) -> None:
        raise SystemExit

    first.add_done_callback(leave)
    one._lifecycle.close("was aborted")
    with pytest.raises(SystemExit):
        one._outbox.fail()
    with pytest.raises(ClosedError):
        second.wait(PATIENCE_S)
    controls.set(hold=0)
    one.abort()


INTERRUPTED = """
import signal, threading
from kvplug.transport import Lifecycle
from kvplug_cuda_ipc.pipe.pieces import AnnouncedPieces

def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
pieces = AnnouncedPieces(100, Lifecycle("a pipe"))
for _ in range(300):
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.0002)
        while True:
            pieces.after(0)
    except KeyboardInterrupt:
        pass
    reader = threading.Thread(target=pieces.stop, daemon=True)
    reader.start()
    reader.join(5)
    assert not reader.is_alive(), "the lock is still taken"
"""


def test_ctrl_c_leaves_the_announced_pieces_to_the_reader() -> None:
    # In a process that nothing measures: an interrupt in the middle of coverage leaves its locks taken.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_memory_is_received_into_only_when_the_caller_has_done_with_it(
    local_pair: Any, fake_path: str, controls: Any
) -> None:
    caller = controls.stream()
    device = HostDevice(fake_path, caller)
    one, other = local_pair(device=device)
    message, out, kept = torch.rand(100_000), torch.rand(100_000), torch.zeros(100_000)
    before = out.clone()
    one.send_tensor(message)
    controls.set(gate=1)
    caller.put_gate()
    device.runtime.memcpy_async(kept.data_ptr(), out.data_ptr(), out.nbytes, caller.handle)
    receiving = Call(lambda: other.recv_tensor(out, timeout=PATIENCE_S))
    assert receiving.is_blocked(0.3)
    assert_same(before, out)
    controls.set(gate=0)
    assert receiving.outcome() is out
    assert_same(message, out)
    assert_same(before, kept)
    caller.close()


def test_a_tensor_is_the_callers_again_once_it_lies_in_staging_memory(local_pair: Any) -> None:
    one, other = local_pair()
    messages = [torch.full((MIB,), n, dtype=torch.uint8) for n in range(3)]
    for message in messages:
        one.send_tensor(message).wait(PATIENCE_S)
        message.fill_(99)
    for n in range(3):
        assert_filled(n, other.recv_tensor(timeout=PATIENCE_S))


def test_what_has_no_room_in_staging_memory_is_the_pipes_until_it_has(local_pair: Any) -> None:
    one, other = local_pair()
    transfer = one.send_tensor(torch.ones(LARGE, dtype=torch.uint8))
    with pytest.raises(TimeoutError):
        transfer.wait(0.3)
    assert_filled(1, other.recv_tensor(timeout=PATIENCE_S))
    transfer.wait(PATIENCE_S)


def test_messages_of_a_peer_that_has_aborted_are_received_and_its_memory_is_given_back(
    local_pair: Any, controls: Any
) -> None:
    one, other = local_pair()
    for n in range(3):
        one.send_tensor(torch.full((MIB,), n, dtype=torch.uint8)).wait(PATIENCE_S)
    one.abort()
    until(lambda: other._lifecycle.ended)
    for n in range(3):
        assert_filled(n, other.recv_tensor(timeout=PATIENCE_S))
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)
    until(lambda: controls.get("allocations") == 0)


def test_no_message_becomes_part_of_a_graph_and_no_graph_is_disturbed(
    local_pair: Any, fake_path: str, controls: Any
) -> None:
    device = HostDevice(fake_path)
    one, other = local_pair(device=device)
    device.capturing = True
    for call in (lambda: one.send_tensor(torch.arange(3)), lambda: other.recv_tensor(timeout=0)):
        with pytest.raises(UnsupportedError, match="a CUDA graph is being captured"):
            call()
    device.capturing = False
    controls.set(capturing=1)  # by another thread
    message = torch.randint(0, 256, (LARGE,), dtype=torch.uint8)
    for pair in ((one, other), local_pair()):
        transfer = pair[0].send_tensor(message)
        assert_same(message, pair[1].recv_tensor(timeout=PATIENCE_S))
        transfer.wait(PATIENCE_S)
        pair[0].close()
        pair[1].close()
    until(lambda: controls.get("allocations") == 0)


def test_a_message_that_came_and_could_not_be_written_outlives_its_sender(
    local_pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    message = torch.rand(300, 500)
    one.send_tensor(message)
    read_only = torch.zeros(500, 300).t()

    def refuses(*_: Any) -> Any:
        raise RuntimeError("it cannot be written")

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", refuses)
        with pytest.raises(TensorMismatchError, match="the message stays"):
            other.recv_tensor(read_only, timeout=PATIENCE_S)
    one.close()
    until(lambda: not other._worker.is_alive())
    assert_same(message, other.recv_tensor(read_only, timeout=PATIENCE_S))
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)


# -- blocks ----------------------------------------------------------------------------------------------


def test_consecutive_blocks_are_copied_from_where_they_are_to_where_they_belong(
    local_pair: Any, controls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = local_pair()
    source = [torch.rand(20, 4, 1000) for _ in range(3)]
    target = [torch.zeros(20, 4, 1000) for _ in range(3)]
    before = controls.get("copies")
    monkeypatch.setattr(HostDevice, "empty", lambda *_: pytest.fail("memory was taken"))
    transfer = one.send_blocks(source, [5, 6, 7])
    other.recv_blocks(target, [11, 12, 13])
    transfer.wait(PATIENCE_S)
    for sent, got in zip(source, target, strict=True):
        assert_same(sent[5:8], got[11:14])
        assert not got[:11].any() and not got[14:].any()
    assert controls.get("copies") - before == 6  # one in and one out for each view


@pytest.mark.parametrize("ids", [[5, 6, 7], [9, 2, 4]])
@pytest.mark.parametrize("into", [[1, 2, 3], [8, 0, 5]])
@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn", "complex64"])
def test_blocks_come_as_they_were_however_they_lie_at_either_end(
    local_pair: Any, ids: list[int], into: list[int], dtype: str
) -> None:
    one, other = local_pair()
    bits = torch.randint(0, 256, (10, 2, 40_000), dtype=torch.uint8)
    cache = bits.view(getattr(torch, dtype))
    for views in ([cache[:, 0], cache[:, 1]], [cache[:, 0].contiguous(), cache[:, 1].contiguous()]):
        target = torch.zeros_like(bits).view(cache.dtype)
        one.send_blocks(views, ids)
        other.recv_blocks([target[:, 0], target[:, 1]], into)
        assert_same(bits[ids], target.view(torch.uint8)[into])
        one.send_blocks(views, ids)
        whole = other.recv_tensor(timeout=PATIENCE_S)
        assert_same(bits[ids].transpose(0, 1), whole.view(torch.uint8))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=5), st.integers(1, 7), st.data())
def test_parts_of_runs_are_the_bytes_in_order(sizes: list[int], count: int, data: Any) -> None:
    tensors = [torch.arange(sizes[0], dtype=torch.uint8) + n for n in range(count)]
    whole = bytes(torch.cat(tensors).tolist())
    runs = Runs(tensors)
    begin = {tensor.data_ptr(): bytes(tensor.tolist()) for tensor in tensors}
    done = data.draw(st.integers(0, len(whole)))
    nbytes = data.draw(st.integers(0, len(whole) - done))
    got = b""
    for address, length in runs.parts(done, nbytes):
        at = next(start for start, held in begin.items() if start <= address < start + len(held))
        got += begin[at][address - at : address - at + length]
    assert got == whole[done : done + nbytes]


# -- staging memory ------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 8192)), max_size=60))
def test_room_is_reserved_once_and_in_contiguous_pieces(steps: list[tuple[bool, int]]) -> None:
    ring, held = Ring(16384), deque()
    for releases, nbytes in steps:
        if releases and held:
            held.popleft()
            ring.release()
        else:
            at = ring.reserve(nbytes)
            if at is None:
                assert held
                continue
            assert at >= 0 and at + nbytes <= 16384
            assert all(at + nbytes <= begin or at >= end for begin, end in held)
            held.append((at, at + nbytes))
    while held:
        held.popleft()
        ring.release()
    assert ring.reserve(16384) == 0


def test_staging_memory_is_of_whole_pieces_that_nothing_else_is_exported_with(
    runtime: Any, controls: Any
) -> None:
    staging = Staging(runtime, 1)
    assert staging.nbytes == GRANULARITY
    mapping = Mapping(runtime, staging.token, staging.handle, GRANULARITY)
    assert mapping.address == staging.address  # its own process has it mapped already
    mapping.close()
    with pytest.raises(TransportError):  # another process has sent that token
        Mapping(runtime, staging.token, staging.handle, 2 * GRANULARITY)
    staging.free()
    staging.free()
    assert controls.get("allocations") == 0


# -- a hostile peer ------------------------------------------------------------------------------------

PREFIX = tensor_prefix(torch.float32, torch.Size((3,)), 12)
LIES: dict[str, list[Any]] = {
    "no frame": ["hello"],
    "no list": [7],
    "nothing": [[]],
    "an unknown kind": [["push", 1]],
    "a kind with too much": [["heartbeat", 1]],
    "a piece without its place": [["piece", PREFIX]],
    "a piece of text": [["piece", "prefix", 0, 12]],
    "a place below zero": [["piece", PREFIX, -1, 12]],
    "bytes of no message": [["piece", b"", 0, 12]],
    "a message within another": [["piece", PREFIX, 0, 4], ["piece", PREFIX, 512, 8]],
    "more bytes than the message has": [["piece", PREFIX, 0, 16]],
    "no bytes of a message that has some": [["piece", PREFIX, 0, 0]],
    "bytes of None": [["piece", NONE, 0, 4]],
    "bytes beyond its memory": [["piece", PREFIX, 4 * MIB - 8, 12]],
    "a prefix that contradicts itself": [["piece", PREFIX + b"x", 0, 12]],
    "a prefix that is none": [["piece", b"\xff" * 40, 0, 12]],
    "taken what was not announced": [["taken", 1]],
    "more pieces than may be announced": [["piece", NONE, 0, 0]] * (MAX_PIECES + 1),
}


@pytest.mark.parametrize("what", list(LIES))
def test_a_peer_that_sends_what_cannot_be_ends_the_pipe_and_nothing_else(local_pair: Any, what: str) -> None:
    one, other = local_pair()
    for value in LIES[what]:
        one._channel.send(value)
    until(lambda: other._lifecycle.ended)
    for call in (lambda: other.recv_tensor(timeout=PATIENCE_S), lambda: other.send_tensor(None)):
        with pytest.raises(TransportError, match="the peer sent what cannot be"):
            call()
    with pytest.raises(PeerGoneError):
        one.recv_tensor(timeout=PATIENCE_S)
    a, b = local_pair()
    a.send_tensor(torch.arange(3))
    assert b.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2]


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
NAMED = st.tuples(st.sampled_from([each.value for each in FrameKind]), PLAIN, PLAIN, PLAIN).map(list)


@given(PLAIN | NAMED | NAMED.map(lambda value: value[:2]))
def test_any_value_is_a_frame_or_a_wire_error(value: Any) -> None:
    try:
        kind, content = decode(value)
    except WireError:
        return
    assert isinstance(kind, FrameKind)
    assert decode(encode(kind, content)) == (kind, content)


HELLO = ("gpu", "token", "handle", "nbytes", "sees_death", "heartbeat_ms")


@given(PLAIN | st.fixed_dictionaries(dict.fromkeys(HELLO, PLAIN)))
def test_any_value_is_a_hello_or_a_wire_error(value: Any) -> None:
    try:
        join.Hello.decode(value)
    except WireError:
        return


def test_a_connection_that_does_not_join_properly_disturbs_no_other(
    fake_path: str, local_pair: Any, controls: Any, caplog: Any
) -> None:
    end = ends.endpoint(fake_path)
    with end.listen() as listener, ExitStack() as stack:
        where = CudaIpcContact.parse(listener.contact).reachable()[0]
        for value in (
            None,
            {},
            {"failed": "no room\n\x1b[2J" * 999},
            {"ready": True},
            {"failed": 3},
            ["piece"],
        ):
            channel = Channel(dial(where, Credentials(), join.PURPOSE))
            stack.callback(channel.close)
            channel.send(value)
        raw = stack.enter_context(dial(where, Credentials(), join.PURPOSE))
        raw.sock.sendall(b"x" * 1000)
        connecting = Call(lambda: end.connect(listener.contact))
        with listener.accept() as one, connecting.result() as other:
            one.send_tensor(torch.arange(2))
            assert other.recv_tensor().tolist() == [0, 1]
    told = [record.getMessage() for record in caplog.records if "no room" in record.getMessage()]
    assert told and all(line.isprintable() and len(line) < 1500 for line in told)


@pytest.mark.parametrize("heartbeat_ms", [1, 10, 2**40])
def test_an_impatient_peer_does_not_make_this_end_beat_all_the_time(heartbeat_ms: int) -> None:
    ours = HeartbeatTerms.of(5.0, sees_death=False)
    agreed = ours.agreed(HeartbeatTerms(False, heartbeat_ms))
    assert 0.05 <= agreed.silence_s(at_least_s=join._SHORTEST_SILENCE_S) <= 5.0


def test_a_gpus_name_is_short_and_printable() -> None:
    hello = join.Hello(
        gpu="x", token=bytes(16), handle=bytes(64), nbytes=1, terms=HeartbeatTerms(True, 1)
    ).encode()
    found = join.Hello.decode({**hello, "gpu": "GPU\n\x1b[2J" + "x" * 10_000})
    assert found.gpu.isprintable() and len(found.gpu) <= 64


def test_after_the_goodbye_only_whole_messages_are_left() -> None:
    lifecycle = Lifecycle("the pipe")
    pieces = AnnouncedPieces(MIB, lifecycle)
    for piece in (Piece(PREFIX, 0, 12), Piece(PREFIX, 512, 4), Piece(b"", 1024, 4)):
        pieces.add(piece)
    lifecycle.lose_peer("the peer closed it")
    pieces.expect_no_more()
    pieces.expect_no_more()
    assert pieces.after(0) == [pieces.oldest(Deadline.after(0))] == [Piece(PREFIX, 0, 12)]
    pieces.take(1)
    with pytest.raises(PeerGoneError):
        pieces.oldest(Deadline.after(None))


# -- rest ------------------------------------------------------------------------------------------------


def test_a_pipe_that_has_nothing_to_do_costs_next_to_nothing(local_pair: Any) -> None:
    one, other = local_pair()
    one.send_tensor(torch.arange(100_000))
    other.recv_tensor()
    before = sum(os.times()[:2])
    time.sleep(3.0)
    assert sum(os.times()[:2]) - before < 0.3
