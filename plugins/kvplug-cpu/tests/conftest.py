"""Pipes for tests: both ends in this process, one in a real child process, or one by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from cpu_ends import PeerByHand, make_endpoint, streams_of
from kvplug import StatelessGroup
from kvplug_cpu.endpoint import CpuEndpoint
from kvplug_cpu.pipe import CpuPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.groups import local_groups
from kvplug_testing.pairs import PipePairs, echo


def peer_end(parent: peers.Parent, contact: str, socket: str, options: Any, what: str, args: Any) -> Any:
    """In a child: connect, then run ``what``."""
    if what == "send_part":
        return send_part(parent, PeerByHand(contact), *args)
    with make_endpoint(socket, **options).connect(contact) as pipe:
        return WHAT[what](parent, pipe, *args)


def send_part(parent: peers.Parent, peer: PeerByHand, nbytes: int, before_death: int) -> None:
    """Send a whole message, then ``before_death`` bytes of a message of ``nbytes`` bytes on its
    connections.
    """
    import torch

    peer.data[0].sendall(streams_of(torch.arange(10), 1 << 20)[0])
    streams = streams_of(torch.ones(nbytes, dtype=torch.uint8), 1 << 20)
    for sock, stream in zip(peer.data, streams, strict=False):
        sock.sendall(stream[:before_death])
        before_death = max(0, before_death - len(stream))
    parent.send("sent")
    parent.recv()


WHAT = {"echo": echo}


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
def by_hand(socket_kind: str) -> Iterator[Callable[..., tuple[PeerByHand, CpuPipe]]]:
    """Makes a peer by hand, and the pipe whose other end it is."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[PeerByHand, CpuPipe]:
            listener = stack.enter_context(make_endpoint(socket_kind, connections=2, **options).listen())
            peer = PeerByHand(listener.contact)
            stack.callback(peer.close)
            pipe: Any = listener.accept()
            stack.callback(pipe.abort)
            return peer, pipe

        yield make


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
