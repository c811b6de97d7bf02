"""Pipes "shm" for tests: both ends here, one in a real child process, or one by hand."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvplug.transport import Connection, Credentials, Deadline, PipeEndpoint, Segment, Watch
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe.contact import ShmContact
from kvplug_shm.pipe.endpoint import ShmEndpoint
from kvplug_shm.pipe.geometry import lines, segment_size
from kvplug_shm.pipe.header import header_of
from kvplug_shm.pipe.join import PURPOSE, Join
from kvplug_shm.pipe.pipe import ShmPipe
from kvplug_shm.pipe.rings import Incoming, Outgoing
from kvplug_testing.pairs import PipePairs

TINY = {"slots": 1, "slot_bytes": 1024}
PATIENCE_S = 30.0


def endpoint(*, heartbeat_timeout_s: float = 10.0, device: str = "cpu", **options: Any) -> ShmEndpoint:
    return ShmEndpoint(
        PipeEndpoint.Context(
            options=ShmPipeOptions(**options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
            device=device,
        )
    )


def guest(contact: str) -> Connection:
    """A connection to a listener that has proved itself, and does not join."""
    return Connection.dial(ShmContact.parse(contact).addresses[0], Credentials(), PURPOSE, PATIENCE_S)


def meet(end: ShmEndpoint, listener: Any) -> None:
    """A pipe between this endpoint and this listener works."""
    with end.connect(listener.contact) as one, listener.accept() as other:
        one.send_tensor(torch.arange(3))
        assert torch.equal(other.recv_tensor(), torch.arange(3))


TERMS: Watch.Terms = Join(step=0).terms


class PeerByHand:
    """The connecting end of a pipe, which has the memory of both rings and writes into it what it likes."""

    def __init__(self, contact: str, terms: Watch.Terms = TERMS) -> None:
        self.connection, deadline = guest(contact), Deadline.after(PATIENCE_S)
        self.connection.send(Join(step=0, terms=terms).pack(), deadline)
        data, (fd,) = self.connection.receive_fds(len(Join(step=0).pack()), 1, deadline)
        answer = Join.unpack(data, self.connection, 1)
        ring_bytes = answer.slots * answer.slot_bytes
        segment = Segment.attach(fd, segment_size(ring_bytes))
        os.close(fd)
        self.connection.send(Join(step=3).pack(), deadline)
        self.into, self.out = Incoming(segment, 0, ring_bytes), Outgoing(segment, 1, ring_bytes)

    def lay(self, data: bytes) -> None:
        """Put bytes, for which there is room, where the pipe expects a message or the next part of one."""
        at = self.out.end.sent % self.out.nbytes
        first = min(len(data), self.out.nbytes - at)
        self.out.bytes[at : at + first] = data[:first]
        self.out.bytes[: len(data) - first] = data[first:]
        self.out.end.publish(lines(len(data)))

    def read(self, nbytes: int = 2**31) -> None:
        """Take what has come, and no more than ``nbytes``."""
        self.into.end.release(min(nbytes, self.into.end.available()))


def content_of(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def prefix_of(tensor: Any) -> bytes:
    return header_of(tensor.dtype, tensor.shape).prefix


@pytest.fixture
def local_pair() -> Iterator[Callable[..., tuple[ShmPipe, ShmPipe]]]:
    """Makes two connected pipes, both of this process."""
    with PipePairs() as pairs:
        yield lambda **options: pairs.local(endpoint(**options))


@pytest.fixture
def by_hand() -> Iterator[Callable[..., tuple[PeerByHand, ShmPipe]]]:
    """Makes a peer by hand, and the pipe whose other end it is. ``terms``: its heartbeats."""
    with ExitStack() as stack:

        def make(terms: Any = TERMS, **options: Any) -> tuple[PeerByHand, ShmPipe]:
            end = endpoint(**options)
            listener = stack.enter_context(end.listen())
            peer = PeerByHand(listener.contact, terms)
            stack.callback(peer.connection.close)
            pipe: Any = listener.accept()
            stack.callback(pipe.abort)
            return peer, pipe

        yield make
