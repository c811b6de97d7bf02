"""Pipes "shm" for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvplug.transport import Credentials, PipeContext
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe.endpoint import ShmEndpoint
from kvplug_shm.pipe.pipe import ShmPipe
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.pairs import PipePairs, echo, wait

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
    with PipePairs() as pairs:
        yield lambda **options: pairs.local(endpoint(**{"native": request.param, **options}))


@pytest.fixture
def remote_pair(fork_server: ForkServer) -> Iterator[Callable[..., tuple[ShmPipe, peers.Peer]]]:
    """Makes a pipe whose other end is in a child that does ``what``: (pipe, child)."""
    with PipePairs() as pairs:

        def make(what: str, *args: Any, **options: Any) -> tuple[ShmPipe, peers.Peer]:
            given = (options, what, list(args))
            return pairs.remote(
                endpoint(**options),
                lambda contact: fork_server.start(
                    f"{__file__}:remote_end", contact, *given, timeout_s=4 * PATIENCE_S
                ),
            )

        yield make


def remote_end(parent: peers.Parent, contact: str, options: dict[str, Any], what: str, args: Any) -> Any:
    """In a child: connect, then run ``what``."""
    with endpoint(**options).connect(contact) as pipe:
        return WHAT[what](parent, pipe, *args)


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


WHAT = {"echo": echo, "send_part": send_part, "wait": wait}
