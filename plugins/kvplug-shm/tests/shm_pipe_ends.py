"""Pipes "shm" for tests: both ends here, one in a real child process, or one by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch

from kvplug.transport import Connection, Credentials, Deadline, PipeEndpoint, Segment
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe.endpoint import ShmContact, ShmEndpoint
from kvplug_shm.pipe.geometry import RingSizes, lines
from kvplug_shm.pipe.message import header_of
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
    address = ShmContact.parse(contact).addresses[0]
    return Connection.dial(address, Credentials(), ShmEndpoint.PURPOSE, PATIENCE_S)


def meet(end: ShmEndpoint, listener: Any) -> None:
    """A pipe between this endpoint and this listener works."""
    with end.connect(listener.contact) as one, listener.accept() as other:
        one.send_tensor(torch.arange(3))
        assert torch.equal(other.recv_tensor(), torch.arange(3))


TERMS = (True, 0xFFFF)
"""This end sees the other's death; else: milliseconds of silence that count as death."""


class PeerByHand:
    """The connecting end of a pipe, which has the memory of both rings and writes into it what it likes."""

    def __init__(self, contact: str, terms: tuple[bool, int] = TERMS) -> None:
        self.connection = guest(contact)
        with closing(JoiningPeer(self.connection, PATIENCE_S, Deadline.after(PATIENCE_S))) as peer:
            peer.send({"terms": list(terms)})
            answer = peer.receive(max_fds=1)
            sizes = RingSizes.of(answer["slots"], answer["slot_bytes"])
            segment = Segment.attach(peer.fds[0], sizes.segment_nbytes)
            peer.send("there")
        self.into, self.out = Incoming(segment, 0, sizes), Outgoing(segment, 1, sizes)

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
