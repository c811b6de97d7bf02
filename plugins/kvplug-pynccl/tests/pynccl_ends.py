"""Pipes "pynccl" over the fake NCCL for tests: both ends here, or one in a real child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import connect_ranks
from kvplug.transport import Credentials, PipeContext
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_pynccl.pipe.pipe import PyncclPipe
from kvplug_testing import peers
from kvplug_testing.comparison import assert_filled, assert_same
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.pairs import (
    PipePairs,
    connect_and_send,
    echo,
    receive_interrupted,
    see_no_process_end,
    send_ones,
    wait,
)

PATIENCE_S = 40.0
LARGE = 3 << 20


def endpoint(
    path: str, *, heartbeat_timeout_s: float = 10.0, device: Any = None, **options: Any
) -> PyncclEndpoint:
    return PyncclEndpoint(
        PipeContext(
            options=PyncclPipeOptions(library=path, **options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
        ),
        device or HostDevice(path),
    )


@pytest.fixture
def local_pair(fake_path: str, controls: Any) -> Iterator[Callable[..., tuple[PyncclPipe, PyncclPipe]]]:
    """Makes two connected pipes, both of this process."""
    with PipePairs() as pairs:
        yield lambda **options: pairs.local(endpoint(fake_path, **options))


@pytest.fixture
def remote_pair(
    fake_path: str, controls: Any, fork_server: ForkServer
) -> Iterator[Callable[..., tuple[PyncclPipe, peers.Peer]]]:
    """Makes a pipe whose other end is in a child that does ``what``: (pipe, child)."""
    with PipePairs() as pairs:

        def make(what: str, *args: Any, env: Any = None, **options: Any) -> tuple[PyncclPipe, peers.Peer]:
            given = (options, what, list(args), env or {})
            return pairs.remote(
                endpoint(fake_path, **options),
                lambda contact: fork_server.start(
                    f"{__file__}:remote_end", fake_path, contact, *given, timeout_s=4 * PATIENCE_S
                ),
            )

        yield make


@pytest.fixture
def gated(fake_path: str, controls: Any) -> Iterator[SimpleNamespace]:
    """A device whose caller's stream does nothing between ``shut`` and ``open``."""
    caller = controls.stream()

    def shut() -> None:
        controls.set(gate=1)
        caller.put_gate()

    yield SimpleNamespace(device=HostDevice(fake_path, caller), shut=shut, open=lambda: controls.set(gate=0))
    caller.close()


def remote_end(
    parent: peers.Parent, path: str, contact: str, options: Any, what: str, args: Any, env: dict[str, str]
) -> Any:
    """In a child: connect, then run ``what``. The fake reads ``env`` when it is loaded, which is in here."""
    os.environ.update(env)
    with endpoint(path, **options).connect(contact) as pipe:
        return WHAT[what](parent, pipe, *args)


WHAT = {
    "echo": echo,
    "wait": wait,
    "send": send_ones,
    "interrupted": partial(receive_interrupted, nbytes=LARGE, timeout=PATIENCE_S),
}


def connects(parent: peers.Parent, path: str, contact: str) -> str:
    """In a child: what becomes of a connection."""
    return connect_and_send(endpoint(path), contact, PATIENCE_S)


def mute(parent: peers.Parent, path: str, contact: str, heartbeat_s: float) -> None:
    """In a child that sees no process end: connect, and echo."""
    see_no_process_end()
    with endpoint(path, heartbeat_timeout_s=heartbeat_s).connect(contact) as pipe:
        echo(parent, pipe)


def in_ring(parent: peers.Parent, path: str, address: str, rank: int, world_size: int) -> list[int]:
    """In a child: what comes around in a ring, to rank + 1 and from rank - 1."""
    from kvplug import StatelessGroup

    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    seen = []
    with StatelessGroup.create(address, rank=rank, world_size=world_size) as group:
        pipes = connect_ranks(group, endpoint(path), {following, before}, timeout=PATIENCE_S)
        message = torch.full((100_000,), rank, dtype=torch.int32)
        for _ in range(world_size):
            transfer = pipes[following].send_tensor(message)
            message = pipes[before].recv_tensor()  # type: ignore[assignment]
            transfer.wait(PATIENCE_S)
            seen.append(int(message[0]))
            assert_filled(seen[-1], message)
        group.barrier()
        for pipe in pipes.values():
            pipe.close()
    return seen


# -- messages --------------------------------------------------------------------------------------


def noise(nbytes: int = LARGE) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def assert_works(pair: Any) -> None:
    one, other = pair
    for source, target in ((one, other), (other, one)):
        message = noise()
        source.send_tensor(message)
        assert_same(message, target.recv_tensor(timeout=PATIENCE_S))
