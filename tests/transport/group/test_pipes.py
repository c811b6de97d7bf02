"""Contacts cross the group, pipes come out. The transport is the plainest there can be: one channel each."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kvplug.errors import KvplugError, TimeoutError, TransportError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Timeout
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.listener import Listener, dial
from kvplug.transport.group.group import StatelessGroup
from kvplug.transport.group.pipes import connect_ranks
from kvplug.transport.pipe import Pipe, PipeEndpoint, PipeListener, Transfer
from kvplug_testing.groups import local_groups

pytestmark = [pytest.mark.timeout(60), pytest.mark.usefixtures("nothing_left")]


class PlainPipe(Pipe):
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def peer(self) -> str:
        return str(self._channel.peer)

    def send_tensor(self, tensor: Any, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        self._channel.send(tensor, timeout)
        transfer = Transfer(0)
        transfer.finish()
        return transfer

    def recv_tensor(self, out: Any = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Any:
        return self._channel.recv(timeout)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._channel.close()

    abort = close


class PlainListener(PipeListener):
    def __init__(self) -> None:
        self._listener = Listener.open("unix:", Credentials(), "pipe")

    @property
    def contact(self) -> str:
        return self._listener.contact

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return PlainPipe(Channel(self._listener.accept(timeout)))

    def close(self) -> None:
        self._listener.close()


class PlainEndpoint(PipeEndpoint):
    def listen(self) -> PipeListener:
        return PlainListener()

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        return PlainPipe(Channel(dial(contact, Credentials(), "pipe", timeout)))


class DeafEndpoint(PlainEndpoint):
    def listen(self) -> PipeListener:
        raise TransportError("no room to listen")


def in_threads(world_size: int, work: Any) -> list[Any]:
    def run(group: StatelessGroup) -> Any:
        result = work(group)
        group.barrier()
        return result

    with local_groups(20) as make, ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, make(world_size)))


def test_every_pair_of_ranks_gets_its_own_pipe() -> None:
    def work(group: StatelessGroup) -> Any:
        pipes = connect_ranks(group, PlainEndpoint())
        for rank, pipe in pipes.items():
            pipe.send_tensor(f"{group.rank} to {rank}")  # type: ignore[arg-type]
        got: dict[int, Any] = {rank: pipe.recv_tensor(timeout=10) for rank, pipe in pipes.items()}
        group.barrier()
        for pipe in pipes.values():
            pipe.close()
        return got

    assert in_threads(4, work) == [
        {other: f"{other} to {rank}" for other in range(4) if other != rank} for rank in range(4)
    ]


def test_a_rank_that_cannot_listen_tells_its_peer_why() -> None:
    def work(group: StatelessGroup) -> str:
        try:
            connect_ranks(group, DeafEndpoint(), timeout=10)
        except KvplugError as e:
            return f"{type(e).__name__}: {e}"
        return "connected"

    assert in_threads(2, work) == [
        "TransportError: no room to listen",
        "TransportError: rank 0 cannot listen: no room to listen",
    ]


def test_a_peer_that_does_not_name_us_is_a_timeout_and_no_pipe_is_left() -> None:
    def work(group: StatelessGroup) -> None:
        if group.rank == 0:
            with pytest.raises(TimeoutError, match="no pipe to rank 2: "):
                connect_ranks(group, PlainEndpoint(), [1, 2], timeout=1)
        elif group.rank == 1:
            connect_ranks(group, PlainEndpoint(), [0], timeout=10)[0].close()

    in_threads(3, work)
