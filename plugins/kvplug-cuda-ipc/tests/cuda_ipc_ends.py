"""Pipes "cuda-ipc" over the fake for tests: both ends here, or one in a real child process."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch

from kvplug import KvplugError, PeerGoneError
from kvplug.transport import Credentials, PipeContext
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
from kvplug_cuda_ipc.pipe.pipe import CudaIpcPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.gpu import fake
from kvplug_testing.gpu.cuda_ipc import HostDevice
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
def near_pair(fake_path: str, controls: Any) -> Iterator[Callable[..., tuple[CudaIpcPipe, CudaIpcPipe]]]:
    """Makes two connected pipes, both of this process."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[CudaIpcPipe, CudaIpcPipe]:
            end = endpoint(fake_path, **options)
            listener = end.listen()
            stack.callback(listener.close)
            one = end.connect(listener.contact)
            stack.callback(one.abort)
            other = listener.accept()
            stack.callback(other.abort)
            return one, other  # type: ignore[return-value]

        yield make
        controls.set(hold=0, gate=0)
    until(lambda: not controls.get("allocations"))


@pytest.fixture
def far_pair(
    fake_path: str, controls: Any, fork_server: ForkServer
) -> Iterator[Callable[..., tuple[CudaIpcPipe, peers.Peer]]]:
    """Makes a pipe whose other end is in a child that runs a function of this file: (pipe, child)."""
    with ExitStack() as stack:

        def make(what: str, *args: Any, env: Any = None, **options: Any) -> tuple[CudaIpcPipe, peers.Peer]:
            listener = endpoint(fake_path, **options).listen()
            stack.callback(listener.close)
            options.pop("device", None)
            start = fork_server.start if env is None else partial(peers.start, env=env)
            child = stack.enter_context(
                start(
                    f"{__file__}:far_end",
                    *(fake_path, listener.contact, options, what, list(args)),
                    timeout_s=4 * PATIENCE_S,
                )
            )
            pipe = listener.accept()
            stack.callback(pipe.abort)
            return pipe, child  # type: ignore[return-value]

        yield make
        controls.set(hold=0, gate=0)
    until(lambda: not controls.get("allocations") and not controls.get("mappings"))
    assert not controls.get("freed_while_mapped")


def far_end(
    parent: peers.Parent, path: str, contact: str, options: dict[str, Any], what: str, args: Any
) -> Any:
    """In a child: connect, then run ``what``."""
    with endpoint(path, **options).connect(contact) as pipe:
        return globals()[what](parent, pipe, *args)


def connects(parent: peers.Parent, path: str, contact: str) -> str:
    """In a child: what becomes of a connection."""
    try:
        with endpoint(path).connect(contact, timeout=PATIENCE_S) as pipe:
            pipe.send_tensor(torch.arange(3)).wait()
    except KvplugError as e:
        return f"{type(e).__name__}: {e}"
    return "connected"


def mute(parent: peers.Parent, path: str, contact: str, heartbeat_s: float) -> None:
    """In a child that sees no process end: connect, and echo."""
    from kvplug.transport import PeerIdentity

    PeerIdentity.open_pidfd = lambda self: None  # type: ignore[method-assign]
    with endpoint(path, heartbeat_timeout_s=heartbeat_s).connect(contact) as pipe:
        echo(parent, pipe)


# -- what the other process does -------------------------------------------------------------------


def echo(parent: peers.Parent, pipe: Any) -> int:
    """Sends back what comes, until the other side has gone."""
    count = 0
    while True:
        try:
            message = pipe.recv_tensor(timeout=None)
        except PeerGoneError:
            return count
        pipe.send_tensor(message)
        count += 1


def wait(parent: peers.Parent, pipe: Any) -> None:
    parent.send("here")
    parent.recv(None)


def send(parent: peers.Parent, pipe: Any, nbytes: int) -> None:
    pipe.send_tensor(torch.ones(nbytes, dtype=torch.uint8))
    parent.send("sent")
    parent.recv(None)


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


def interrupted(parent: peers.Parent, pipe: Any) -> list[str]:
    """What calls raise that are struck by Ctrl-C in the middle of a message, and what the next one does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = torch.zeros(LARGE, dtype=torch.uint8)
    said = []
    parent.send("here")
    for memory in (out, None):
        try:
            pipe.recv_tensor(memory, timeout=PATIENCE_S)
        except (KeyboardInterrupt, KvplugError) as e:
            said.append(f"{type(e).__name__}: {e}")
            out.fill_(5)
    parent.send("struck")
    parent.recv()
    said.append(str(bool((out == 5).all())))
    return said
