"""Pipes for tests: both ends in this process, or one in a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvplug import StatelessGroup
from kvplug.transport import Credentials, PipeContext
from kvplug_cpu.endpoint import CpuEndpoint
from kvplug_cpu.options import CpuOptions
from kvplug_cpu.pipe import CpuPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.groups import local_groups
from kvplug_testing.pairs import PipePairs, echo


def make_endpoint(
    socket: str = "unix", *, host: str = "127.0.0.1", heartbeat_timeout_s: float = 10.0, **options: Any
) -> CpuEndpoint:
    return CpuEndpoint(
        PipeContext(
            options=CpuOptions(socket=socket, **options),
            credentials=Credentials(),
            host=host,
            timeout_s=20.0,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
    )


def peer_end(parent: peers.Parent, contact: str, socket: str, options: Any, what: str, args: Any) -> Any:
    """In a child: connect, then run ``what``."""
    with make_endpoint(socket, **options).connect(contact) as pipe:
        return WHAT[what](parent, pipe, *args)


def send_part(parent: peers.Parent, pipe: Any, nbytes: int, before_death: int) -> None:
    """Send a whole message, then ``before_death`` bytes of a message of ``nbytes`` bytes on its
    connections.
    """
    import torch

    from kvplug_cpu.message import Content, parts

    pipe.send_tensor(torch.arange(10)).wait()
    content = Content.of(torch.ones(nbytes, dtype=torch.uint8), pipe._split_bytes)
    bounds = parts(nbytes, len(pipe._data)) if content.split else [(0, nbytes)]
    streams = [bytes(content.memory[a:b]) for a, b in bounds]
    streams[0] = content.prefix + streams[0]
    for connection, stream in zip(pipe._data, streams, strict=False):
        left = memoryview(stream[:before_death])
        while left:
            left = left[connection.send([left]) :]
        before_death = max(0, before_death - len(stream))
    parent.send("sent")
    parent.recv()


WHAT = {"echo": echo, "send_part": send_part}


@pytest.fixture
def endpoint() -> Callable[..., CpuEndpoint]:
    return make_endpoint


@pytest.fixture(params=["unix", "tcp"])
def socket_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def local_pair(socket_kind: str) -> Iterator[Callable[..., tuple[CpuPipe, CpuPipe]]]:
    """Makes two connected pipes in this process."""
    with PipePairs() as pairs:
        yield lambda **options: pairs.local(make_endpoint(socket_kind, **options))


@pytest.fixture
def remote_pair(socket_kind: str, fork_server: ForkServer) -> Iterator[Callable[..., Any]]:
    """Makes a pipe whose other end is in a child that runs ``what``: (pipe, child)."""
    with PipePairs() as pairs:

        def make(what: str, *args: Any, **options: Any) -> tuple[CpuPipe, peers.Peer]:
            given = (socket_kind, options, what, list(args))
            return pairs.remote(
                make_endpoint(socket_kind, **options),
                lambda contact: fork_server.start(f"{__file__}:peer_end", contact, *given),
            )

        yield make


@pytest.fixture
def groups() -> Iterator[Callable[[int], list[StatelessGroup]]]:
    """Makes a group with all ranks in this process."""
    with local_groups(timeout=30.0) as make:
        yield make
