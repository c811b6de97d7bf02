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
from kvplug.transport import Channel, Connection, Credentials, WireError
from kvplug_cuda_ipc.device import CudaDevice
from kvplug_cuda_ipc.memory import GRANULARITY, Mapping, Ring, Staging
from kvplug_cuda_ipc.pipe import join
from kvplug_cuda_ipc.pipe.endpoint import CudaIpcContact, CudaIpcEndpoint
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
        "a place below zero": (["offer", PREFIX, 12, -1],),
        "no place": (["offer", PREFIX, 12, "here"],),
        "bytes below zero": (["offer", PREFIX, -1, 0],),
        "a message within another": (["offer", PREFIX, 4, 0], ["offer", PREFIX, 8, 512]),
        "more bytes than the message has": (["offer", PREFIX, 16, 0],),
        "bytes of None": (["offer", NONE, 4, 0],),
        "bytes beyond its memory": (["offer", PREFIX, 12, 4 * MIB - 8],),
        "an invalid prefix": (["offer", b"\xff" * 40, 12, 0],),
        "taken what was not offered": (["taken", 1],),
        "taken less than nothing": (["taken", -1],),
        "more offers than may be untaken": [["offer", NONE, 0, 0]] * 1000,
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


def test_a_gpus_name_is_short_and_printable() -> None:
    found = join.Hello(gpu="GPU\n\x1b[2J" + "x" * 10_000, token=bytes(16), handle=bytes(64), nbytes=1)
    assert found.gpu.isprintable() and len(found.gpu) <= 64


def test_after_a_goodbye_whole_messages_are_left_and_no_part_of_one(local_pair: Any) -> None:
    one, other = local_pair()
    one.send_tensor(torch.arange(3)).wait(PATIENCE_S)
    one.channel.send(["offer", PREFIX, 4, 512])
    one.channel.send(["goodbye", False])
    assert other.recv_tensor(timeout=PATIENCE_S).tolist() == [0, 1, 2]
    with pytest.raises(PeerGoneError, match="before its messages were taken"):
        other.recv_tensor(timeout=PATIENCE_S)


def test_contacts_of_other_transports_and_of_other_hosts_are_refused(fake_path: str) -> None:
    end = ends.endpoint(fake_path)
    for text in ("shm1 a unix:@x", "cuda-ipc1 a tcp:1", "cuda-ipc1  unix:@x"):
        with pytest.raises(WireError, match="not a contact of the pipe 'cuda-ipc'"):
            end.connect(text)
    with pytest.raises(TransportError, match="other namespaces"):
        end.connect(str(CudaIpcContact("elsewhere", ("unix:@x",))))
