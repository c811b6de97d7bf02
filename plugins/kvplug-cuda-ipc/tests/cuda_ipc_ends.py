"""Pipes "cuda-ipc" over the fake for tests: both ends here, or one in a real child process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from kvplug import PeerGoneError
from kvplug.transport import Credentials, PipeContext
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
from kvplug_cuda_ipc.pipe.pipe import CudaIpcPipe
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_testing import peers
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
from kvplug_testing.waits import until

PATIENCE_S = 40.0
MIB = 1 << 20
LARGE = 12 * MIB
"""More than the staging memory of these pipes."""


def endpoint(
    path: str, *, heartbeat_timeout_s: float = 10.0, device: Any = None, **options: Any
) -> CudaIpcEndpoint:
    options = {"staging_bytes": 4 * MIB, "piece_bytes": MIB // 2, **options}
    return CudaIpcEndpoint(
        PipeContext(
            options=CudaIpcPipeOptions(library=path, **options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
        ),
        device or HostDevice(path),
    )


@pytest.fixture
def local_pair(fake_path: str, controls: Any) -> Iterator[Callable[..., tuple[CudaIpcPipe, CudaIpcPipe]]]:
    """Makes two connected pipes, both of this process."""
    with PipePairs() as pairs:
        yield lambda **options: pairs.local(endpoint(fake_path, **options))
        controls.set(hold=0, gate=0)
    until(lambda: not controls.get("allocations"))


@pytest.fixture
def remote_pair(
    fake_path: str, controls: Any, fork_server: ForkServer
) -> Iterator[Callable[..., tuple[CudaIpcPipe, peers.Peer]]]:
    """Makes a pipe whose other end is in a child that does ``what``: (pipe, child)."""
    with PipePairs() as pairs:

        def make(
            what: str, *args: Any, env: Any = None, device: Any = None, **options: Any
        ) -> tuple[CudaIpcPipe, peers.Peer]:
            given = (options, what, list(args), env or {})
            return pairs.remote(
                endpoint(fake_path, device=device, **options),
                lambda contact: fork_server.start(
                    f"{__file__}:remote_end", fake_path, contact, *given, timeout_s=4 * PATIENCE_S
                ),
            )

        yield make
        controls.set(hold=0, gate=0)
    until(lambda: not controls.get("allocations") and not controls.get("mappings"))
    assert not controls.get("freed_while_mapped")


def remote_end(
    parent: peers.Parent, path: str, contact: str, options: Any, what: str, args: Any, env: dict[str, str]
) -> Any:
    """In a child: connect, then run ``what``. The fake reads ``env`` when it is loaded, which is in here."""
    os.environ.update(env)
    with endpoint(path, **options).connect(contact) as pipe:
        return WHAT[what](parent, pipe, *args)


def connects(parent: peers.Parent, path: str, contact: str) -> str:
    """In a child: what becomes of a connection."""
    return connect_and_send(endpoint(path), contact, PATIENCE_S)


def mute(parent: peers.Parent, path: str, contact: str, heartbeat_s: float) -> None:
    """In a child that sees no process end: connect, and echo."""
    see_no_process_end()
    with endpoint(path, heartbeat_timeout_s=heartbeat_s).connect(contact) as pipe:
        echo(parent, pipe)


def counters(parent: peers.Parent, pipe: Any) -> dict[str, int]:
    """What its fake has counted when the other end has gone, and it has let go of everything."""
    path = parent.recv()
    parent.send("here")
    try:
        while True:
            pipe.recv_tensor(timeout=None)
    except PeerGoneError:
        pass
    made = fake.Controls(path)
    until(lambda: not made.get("allocations") and not made.get("mappings"))
    return {name: made.get(name) for name in ("allocations", "mappings", "freed_while_mapped")}


WHAT = {
    "counters": counters,
    "echo": echo,
    "wait": wait,
    "send": send_ones,
    "interrupted": partial(receive_interrupted, nbytes=LARGE, timeout=PATIENCE_S),
}
