"""Pipes for tests: both ends in this process, or one by hand; and groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import communicator_ranks
from cpu_ends import PeerByHand, make_endpoint
from kvplug_cpu.pipe import CpuPipe
from kvplug_testing.pairs import PipePairs

groups, ranks = communicator_ranks.groups, communicator_ranks.ranks


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
