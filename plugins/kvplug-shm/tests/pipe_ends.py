"""Pipes "shm" for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvplug import PeerGoneError
from kvplug.transport import Credentials, PipeContext
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe.endpoint import ShmEndpoint
from kvplug_shm.pipe.pipe import ShmPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer

TINY = {"slots": 1, "slot_bytes": 1024}
PATIENCE_S = 30.0


def endpoint(*, heartbeat_timeout_s: float = 10.0, **options: Any) -> ShmEndpoint:
    return ShmEndpoint(
        PipeContext(
            options=ShmPipeOptions(**options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
        )
    )


@pytest.fixture(params=[True, False], ids=["compiled", "python"])
def local_pair(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[ShmPipe, ShmPipe]]]:
    """Makes two connected pipes, both of this process."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[ShmPipe, ShmPipe]:
            end = endpoint(**{"native": request.param, **options})
            listener = end.listen()
            stack.callback(listener.close)
            one = end.connect(listener.contact)
            stack.callback(one.abort)
            other = listener.accept()
            stack.callback(other.abort)
            return one, other  # type: ignore[return-value]

        yield make


@pytest.fixture
def remote_pair(fork_server: ForkServer) -> Iterator[Callable[..., tuple[ShmPipe, peers.Peer]]]:
    """Makes a pipe whose other end is in a child that runs a function of this file: (pipe, child)."""
    with ExitStack() as stack:

        def make(what: str, *args: Any, **options: Any) -> tuple[ShmPipe, peers.Peer]:
            child = stack.enter_context(
                fork_server.start(f"{__file__}:remote_end", what, list(args), timeout_s=4 * PATIENCE_S)
            )
            listener = endpoint(**options).listen()
            stack.callback(listener.close)
            child.send((listener.contact, options))
            pipe = listener.accept()
            stack.callback(pipe.abort)
            return pipe, child  # type: ignore[return-value]

        yield make


def remote_end(parent: peers.Parent, what: str, args: Any) -> Any:
    """In a child: connect to the contact that comes first, then run ``what``."""
    contact, options = parent.recv()
    with endpoint(**options).connect(contact) as pipe:
        return globals()[what](parent, pipe, *args)


# -- what the other process does -------------------------------------------------------------------


def echo(parent: peers.Parent, pipe: Any) -> int:
    """Sends back what comes, until the other side has gone."""
    count = 0
    while True:
        try:
            message = pipe.recv_tensor()
        except PeerGoneError:
            return count
        pipe.send_tensor(message)
        count += 1


def wait(parent: peers.Parent, pipe: Any) -> None:
    parent.send("here")
    parent.recv()


def send_part(parent: peers.Parent, pipe: Any, nbytes: int, pieces: int) -> None:
    """One whole message, then one of ``nbytes`` bytes of which ``pieces`` pieces are published.

    To be asked of a pipe without the compiled steps, which publish as many as there is room for.
    """
    from kvplug_shm.pipe.content import Content
    from kvplug_shm.pipe.message import Message

    pipe.send_tensor(torch.arange(10)).wait()
    outbox = pipe._outbox
    message = Message(Content(torch.ones(nbytes, dtype=torch.uint8)), 0)
    for _ in range(pieces):
        assert outbox._push(outbox._ring, message)
    assert not message.complete
    parent.send("sent")
    parent.recv()
