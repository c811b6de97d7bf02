"""The pipe "cuda-ipc" over the fake: what it shares with "pynccl", staging memory, and peers that lie."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

import cuda_ipc_ends as ends
from device_pipes import PipesOverAFake, noise
from kvplug import ClosedError, PeerGoneError, TransportError, UnsupportedError
from kvplug.net.wire.messages import NONE, tensor_prefix
from kvplug.transport import Channel, Connection, Credentials, Deadline, Lifecycle, Watch, WireError
from kvplug_cuda_ipc.device import CudaDevice
from kvplug_cuda_ipc.memory import GRANULARITY, Mapping, Ring, Staging
from kvplug_cuda_ipc.pipe import join
from kvplug_cuda_ipc.pipe.contact import CudaIpcContact
from kvplug_cuda_ipc.pipe.content import Runs
from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
from kvplug_cuda_ipc.pipe.frames import FrameKind, Piece, decode, encode
from kvplug_cuda_ipc.pipe.pieces import AnnouncedPieces
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.waits import until

LARGE, MIB, PATIENCE_S = ends.LARGE, ends.MIB, ends.PATIENCE_S
PREFIX = tensor_prefix(torch.float32, torch.Size((3,)), 12)


class TestPipeOverTheFake(PipesOverAFake):
    ends = ends
    factory = CudaIpcEndpoint
    exits = (0, 7)
    lies = {  # noqa: RUF012
        "no frame": ("hello",),
        "no list": (7,),
        "an unknown kind": (["push", 1],),
        "a place below zero": (["piece", PREFIX, -1, 12],),
        "a message within another": (["piece", PREFIX, 0, 4], ["piece", PREFIX, 512, 8]),
        "more bytes than the message has": (["piece", PREFIX, 0, 16],),
        "bytes of None": (["piece", NONE, 0, 4],),
        "bytes beyond its memory": (["piece", PREFIX, 4 * MIB - 8, 12],),
        "an invalid prefix": (["piece", b"\xff" * 40, 0, 12],),
        "taken what was not announced": (["taken", 1],),
        "more pieces than may be announced": [["piece", NONE, 0, 0]] * 1000,
    }
    nonsense = ({}, {"failed": "no room\n\x1b[2J" * 999}, {"failed": 3}, b"x" * 1000)

    def gpu(self, name: str, path: str) -> CudaDevice:
        return CudaDevice(name, path)

    def lie(self, liar: Any, lie: Any) -> None:
        with contextlib.suppress(PeerGoneError, ClosedError):  # the other end may see it before all is sent
            for value in lie:
                liar.channel.send(value)

    def join(self, contact: str, nonsense: Any) -> Any:
        connection = Connection.dial(
            CudaIpcContact.parse(contact).reachable()[0], Credentials(), join.PURPOSE
        )
        if isinstance(nonsense, bytes):
            connection.sock.sendall(nonsense)
            return connection
        channel = Channel(connection)
        channel.send(nonsense)
        return channel


# -- memory that calls and transfers use ---------------------------------------------------------------


def test_a_tensor_is_the_callers_again_once_it_lies_in_staging_memory_and_outlives_an_abort(
    local_pair: Any,
) -> None:
    one, other = local_pair()
    messages = [torch.full((MIB,), n, dtype=torch.uint8) for n in range(3)]
    for message in messages:
        one.send_tensor(message).wait(PATIENCE_S)
        message.fill_(99)
    one.abort()
    with pytest.raises(PeerGoneError):
        while True:
            other.send_tensor(None, timeout=PATIENCE_S)
    for n in range(3):
        assert_filled(n, other.recv_tensor(timeout=PATIENCE_S))
    with pytest.raises(PeerGoneError):
        other.recv_tensor(timeout=PATIENCE_S)


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
    message = noise(LARGE)
    for pair in ((one, other), local_pair()):
        transfer = pair[0].send_tensor(message)
        assert_same(message, pair[1].recv_tensor(timeout=PATIENCE_S))
        transfer.wait(PATIENCE_S)
        pair[0].close()
        pair[1].close()
    until(lambda: controls.get("allocations") == 0)


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
    with pytest.raises(TransportError):  # another process has sent that token
        Mapping(runtime, staging.token, staging.handle, 2 * GRANULARITY)
    staging.free()
    assert controls.get("allocations") == 1, "it is still borrowed"
    mapping.close()
    staging.free()
    assert controls.get("allocations") == 0


# -- what a peer may say -------------------------------------------------------------------------------

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
HELLO = ("gpu", "token", "handle", "nbytes", "sees_death", "heartbeat_ms")


@given(PLAIN | NAMED | NAMED.map(lambda value: value[:2]))
def test_any_value_is_a_frame_or_a_wire_error(value: Any) -> None:
    try:
        kind, content = decode(value)
    except WireError:
        return
    assert isinstance(kind, FrameKind)
    assert decode(encode(kind, content)) == (kind, content)


@given(PLAIN | st.fixed_dictionaries(dict.fromkeys(HELLO, PLAIN)))
def test_any_value_is_a_hello_or_a_wire_error(value: Any) -> None:
    try:
        join.Hello.decode(value)
    except WireError:
        return


def test_a_gpus_name_is_short_and_printable() -> None:
    hello = join.Hello(
        gpu="x", token=bytes(16), handle=bytes(64), nbytes=1, terms=Watch.Terms(True, 1)
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


def test_contacts_of_other_transports_and_of_other_hosts_are_refused(fake_path: str) -> None:
    end = ends.endpoint(fake_path)
    for text in ("shm1 a unix:@x", "cuda-ipc1 a tcp:1", "cuda-ipc1  unix:@x"):
        with pytest.raises(WireError, match="not a contact of the pipe 'cuda-ipc'"):
            end.connect(text)
    with pytest.raises(TransportError, match="other namespaces"):
        end.connect(str(CudaIpcContact("elsewhere", ("unix:@x",))))
