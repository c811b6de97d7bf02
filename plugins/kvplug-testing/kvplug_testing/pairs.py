"""Pairs of connected pipes for tests of a transport, and functions for the process at the other end.

with PipePairs() as pairs:
    one, other = pairs.local(make_endpoint())
    pipe, child = pairs.remote(make_endpoint(), lambda contact: peers.start(echoing, contact))

def echoing(parent, contact):
    with make_endpoint().connect(contact) as pipe:
        return echo(parent, pipe)
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from kvplug import KvplugError, PeerGoneError
from kvplug.transport import PeerIdentity, Pipe, PipeEndpoint, PipeListener
from kvplug_testing.peers import Parent, Peer


class PipePairs(ExitStack):
    """Makes pairs. At the end of the block pipes are aborted, children end, and listeners are closed."""

    def local(self, endpoint: PipeEndpoint) -> tuple[Any, Any]:
        """Two connected pipes in this process."""
        listener = self._listen(endpoint)
        one = self._aborted(endpoint.connect(listener.contact))
        return one, self._aborted(listener.accept())

    def remote(self, endpoint: PipeEndpoint, start: Callable[[str], Peer]) -> tuple[Any, Peer]:
        """A pipe, and the child process with its other end: ``start`` gets a contact and starts the child."""
        listener = self._listen(endpoint)
        child = self.enter_context(start(listener.contact))
        return self._aborted(listener.accept()), child

    def _listen(self, endpoint: PipeEndpoint) -> PipeListener:
        listener = endpoint.listen()
        self.callback(listener.close)
        return listener

    def _aborted(self, pipe: Pipe) -> Pipe:
        self.callback(pipe.abort)
        return pipe


# -- in a child --------------------------------------------------------------------------------------


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


def send_ones(parent: Parent, pipe: Pipe, nbytes: int) -> None:
    """Send a message of ``nbytes`` bytes, report it to the parent, and wait."""
    import torch

    pipe.send_tensor(torch.ones(nbytes, dtype=torch.uint8))
    parent.send("sent")
    parent.recv(None)


def receive_interrupted(parent: Parent, pipe: Pipe, nbytes: int, timeout: float) -> list[str]:
    """The errors of calls that Ctrl-C interrupts in the middle of a message, and of the next call.

    The last string says whether the caller's memory stayed unchanged afterwards.
    """
    import torch

    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = torch.zeros(nbytes, dtype=torch.uint8)
    said = []
    parent.send("here")
    for memory in (out, None):
        try:
            pipe.recv_tensor(memory, timeout=timeout)
        except (KeyboardInterrupt, KvplugError) as e:
            said.append(f"{type(e).__name__}: {e}")
            out.fill_(5)
    parent.send("struck")
    parent.recv()
    said.append(str(bool((out == 5).all())))
    return said


def connect_and_send(endpoint: PipeEndpoint, contact: str, timeout: float) -> str:
    """The result of a connection attempt: "connected", or the error."""
    import torch

    try:
        with endpoint.connect(contact, timeout=timeout) as pipe:
            pipe.send_tensor(torch.arange(3)).wait()
    except KvplugError as e:
        return f"{type(e).__name__}: {e}"
    return "connected"


def see_no_process_end() -> None:
    """Disable pidfds: from now on this process detects a dead peer only by missing heartbeats."""
    PeerIdentity.open_pidfd = lambda self: None  # type: ignore[method-assign]
