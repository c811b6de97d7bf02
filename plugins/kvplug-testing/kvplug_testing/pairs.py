"""Pairs of connected pipes for tests of a transport, and functions for the process at the other end.

with PipePairs() as pairs:
    one, other = pairs.local(make_endpoint())
    pipe, child = pairs.remote(make_endpoint(), lambda contact: peers.start(echoing, contact))

def echoing(parent, contact):
    with make_endpoint().connect(contact) as pipe:
        return echo(parent, pipe)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvplug import PeerGoneError
from kvplug.transport import (
    Acceptor,
    Connection,
    Credentials,
    Listener,
    Pipe,
    PipeEndpoint,
    Timeout,
    Transfer,
)
from kvplug_testing.peers import Parent, Peer


def accepting(
    address: str, credentials: Credentials, purpose: str, *, label: str = ""
) -> Acceptor[Connection]:
    """Listen at an address. ``accept`` returns the next connection that has proved itself."""
    return Acceptor(
        [Listener.open(address, credentials, purpose, label=label)],
        lambda connection: connection,
        what=f"a connection for {purpose!r}",
        name="kvplug-test",
        discard=Connection.close,
    )


class PipePairs(ExitStack):
    """Makes pairs. At the end of the block pipes are aborted, children end, and listeners are closed."""

    def local(self, endpoint: PipeEndpoint) -> tuple[Any, Any]:
        """Two connected pipes in this process."""
        listener = endpoint.listen()
        self.callback(listener.close)
        one = endpoint.connect(listener.contact)
        self.callback(one.abort)
        other = listener.accept()
        self.callback(other.abort)
        return one, other

    def remote(self, endpoint: PipeEndpoint, start: Callable[[str], Peer]) -> tuple[Any, Peer]:
        """A pipe, and the child process with its other end: ``start`` gets a contact and starts the child."""
        listener = endpoint.listen()
        self.callback(listener.close)
        child = self.enter_context(start(listener.contact))
        pipe = listener.accept()
        self.callback(pipe.abort)
        return pipe, child


class PipeAround(Pipe):
    """A pipe that does what another one does. Subclasses override some of it."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def peer(self) -> str:
        return self._pipe.peer

    def _send_tensor(self, tensor: Any, timeout: Timeout) -> Transfer:
        return self._pipe.send_tensor(tensor, timeout=timeout)

    def _receive_tensor(self, out: Any, timeout: Timeout) -> Any:
        return self._pipe.recv_tensor(out, timeout=timeout)

    def limit_messages(self, nbytes: int) -> None:
        self._pipe.limit_messages(nbytes)

    def _close(self, timeout: Timeout) -> None:
        self._pipe.close(timeout)

    def _abort(self) -> None:
        self._pipe.abort()


def wait(parent: Parent, pipe: Any) -> None:
    """Do nothing until the parent sends a value."""
    parent.send("here")
    parent.recv(None)


def echo(parent: Parent, pipe: Pipe) -> int:
    """Send every message back until the peer is gone; return the number of messages."""
    count = 0
    while True:
        try:
            message = pipe.recv_tensor(timeout=None)
        except PeerGoneError:
            return count
        pipe.send_tensor(message)
        count += 1
