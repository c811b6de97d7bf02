"""Pipes for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvplug import StatelessGroup
from kvplug.transport import Credentials, PipeContext
from kvplug_cpu.endpoint import CpuEndpoint
from kvplug_cpu.options import CpuOptions
from kvplug_cpu.pipe import CpuPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer


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


def peer_end(parent: peers.Parent, what: str, *args: Any) -> Any:
    """Run in a child: connect to the contact that is the first value, then run ``what`` of far_ends.py."""
    import runpy

    far_ends = runpy.run_path(str(Path(__file__).with_name("far_ends.py")))
    contact, socket, options = parent.recv()
    heartbeat = options.pop("heartbeat_timeout_s", 10.0)
    with make_endpoint(socket, heartbeat_timeout_s=heartbeat, **options).connect(contact) as pipe:
        return far_ends[what](parent, pipe, *args)


@pytest.fixture
def endpoint() -> Callable[..., CpuEndpoint]:
    return make_endpoint


@pytest.fixture(params=["unix", "tcp"])
def socket_kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def near_pair(socket_kind: str) -> Iterator[Callable[..., tuple[CpuPipe, CpuPipe]]]:
    """Makes two connected pipes, both of this process."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[CpuPipe, CpuPipe]:
            end = make_endpoint(socket_kind, **options)
            listener = end.listen()
            stack.callback(listener.close)
            one = end.connect(listener.contact)
            stack.callback(one.abort)
            other = listener.accept()
            stack.callback(other.abort)
            return one, other  # type: ignore[return-value]

        yield make


@pytest.fixture
def far_pair(socket_kind: str, fork_server: ForkServer) -> Iterator[Callable[..., Any]]:
    """Makes a pipe whose other end is in a child that runs a function of far_ends.py: (pipe, child)."""
    with ExitStack() as stack:

        def make(what: str, *args: Any, **options: Any) -> tuple[CpuPipe, peers.Peer]:
            child = stack.enter_context(fork_server.start(f"{__file__}:peer_end", what, *args))
            heartbeat = options.pop("heartbeat_timeout_s", 10.0)
            listener = make_endpoint(socket_kind, heartbeat_timeout_s=heartbeat, **options).listen()
            stack.callback(listener.close)
            child.send((listener.contact, socket_kind, {**options, "heartbeat_timeout_s": heartbeat}))
            pipe = listener.accept()
            stack.callback(pipe.abort)
            return pipe, child  # type: ignore[return-value]

        yield make


@pytest.fixture
def groups() -> Iterator[Callable[[int], list[StatelessGroup]]]:
    """Makes a group, all of whose ranks are here."""
    with ExitStack() as stack:

        def make(world_size: int) -> list[StatelessGroup]:
            listener = StatelessGroup.listen("unix:")

            def one(rank: int) -> StatelessGroup:
                address = listener.contact if rank else listener
                return StatelessGroup.create(address, rank=rank, world_size=world_size, timeout=30.0)

            with ThreadPoolExecutor(world_size) as pool:
                made = list(pool.map(one, range(world_size)))
            for group in made:
                stack.callback(group.abort)
            return made

        yield make
