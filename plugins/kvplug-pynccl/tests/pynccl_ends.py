"""Pipes "pynccl" over the fake NCCL for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvplug import KvplugError, PeerGoneError, connect_ranks
from kvplug.transport import Credentials, PipeContext
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_pynccl.pipe.pipe import PyncclPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.gpu.pynccl import HostDevice

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
def near_pair(fake_path: str, controls: Any) -> Iterator[Callable[..., tuple[PyncclPipe, PyncclPipe]]]:
    """Makes two connected pipes, both of this process."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[PyncclPipe, PyncclPipe]:
            end = endpoint(fake_path, **options)
            listener = end.listen()
            stack.callback(listener.close)
            one = end.connect(listener.contact)
            stack.callback(one.abort)
            other = listener.accept()
            stack.callback(other.abort)
            return one, other  # type: ignore[return-value]

        yield make


@pytest.fixture
def far_pair(
    fake_path: str, controls: Any, fork_server: ForkServer
) -> Iterator[Callable[..., tuple[PyncclPipe, peers.Peer]]]:
    """Makes a pipe whose other end is in a child that runs a function of this file: (pipe, child)."""
    with ExitStack() as stack:

        def make(what: str, *args: Any, env: Any = None, **options: Any) -> tuple[PyncclPipe, peers.Peer]:
            listener = endpoint(fake_path, **options).listen()
            stack.callback(listener.close)
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


@pytest.fixture
def gated(fake_path: str, controls: Any) -> Iterator[SimpleNamespace]:
    """A device whose caller's stream does nothing between ``shut`` and ``open``."""
    caller = controls.stream()

    def shut() -> None:
        controls.set(gate=1)
        caller.put_gate()

    yield SimpleNamespace(device=HostDevice(fake_path, caller), shut=shut, open=lambda: controls.set(gate=0))
    caller.close()


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
    """In a child that sees no process end: connect, and do nothing."""
    from kvplug.transport import PeerIdentity

    PeerIdentity.open_pidfd = lambda self: None  # type: ignore[method-assign]
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
            assert bool((message == seen[-1]).all())
        group.barrier()
        for pipe in pipes.values():
            pipe.close()
    return seen


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


def interrupted(parent: peers.Parent, pipe: Any) -> list[str]:
    """What calls raise that are struck by Ctrl-C in the middle of a message, and what the next one does."""
    import signal

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


# -- messages --------------------------------------------------------------------------------------


def noise(nbytes: int = LARGE) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


def assert_works(pair: Any) -> None:
    one, other = pair
    for source, target in ((one, other), (other, one)):
        message = noise()
        source.send_tensor(message)
        assert torch.equal(target.recv_tensor(timeout=PATIENCE_S), message)
