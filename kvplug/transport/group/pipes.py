"""Pipes between the ranks of a group: the one place that carries contacts through it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvplug.errors import ConfigError, PeerGoneError, TimeoutError, TransportError, WireError
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.peer_text import peer_text
from kvplug.transport.group.group import STORE_TIMEOUT_S

if TYPE_CHECKING:
    from kvplug.transport.group.group import StatelessGroup
    from kvplug.transport.pipe import Pipe, PipeEndpoint


def connect_ranks(
    group: StatelessGroup,
    endpoint: PipeEndpoint,
    peers: Iterable[int] | None = None,
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> dict[int, Pipe]:
    """One pipe to each of ``peers`` (default: all other ranks), by rank.

    Two ranks get a pipe if both name each other. The lower one listens. Every rank connects its pairs in the
    same order, lowest rank first, so that ranks cannot deadlock.

    Raises:
        TimeoutError: a peer did not come in time; names it.
        PeerGoneError: a peer is gone; names it.
        TransportError: a peer could not listen, and why.
        WireError: a peer sent something else than where it listens.
        ConfigError: ``peers`` names a rank that the group does not have, or this one.
        Whatever the endpoint raises. Pipes made so far are aborted.
    """
    deadline = Deadline.after(timeout, STORE_TIMEOUT_S)
    chosen = set(range(group.world_size)) - {group.rank} if peers is None else set(peers)
    if not chosen <= set(range(group.world_size)) - {group.rank}:
        raise ConfigError(
            f"peers of rank {group.rank} must be other ranks of the group, got {sorted(chosen)}"
        )
    pipes: dict[int, Pipe] = {}
    try:
        for peer in sorted(chosen, key=lambda p: (min(p, group.rank), max(p, group.rank))):
            with _named(peer):
                if group.rank < peer:
                    pipes[peer] = _listen_for(group, endpoint, peer, deadline)
                else:
                    pipes[peer] = _dial(group, endpoint, peer, deadline)
    except BaseException:
        for pipe in pipes.values():
            pipe.abort()
        raise
    return pipes


@contextmanager
def _named(peer: int) -> Iterator[None]:
    """Name the peer in errors: a listener does not know which one is missing."""
    try:
        yield
    except (TimeoutError, PeerGoneError) as e:
        raise type(e)(f"no pipe to rank {peer}: {e}") from e


def _listen_for(group: StatelessGroup, endpoint: PipeEndpoint, peer: int, deadline: Deadline) -> Pipe:
    try:
        listener = endpoint.listen()
    except Exception as e:
        group.send(("failed", f"rank {group.rank} cannot listen: {e}"), peer)
        raise
    try:
        # One listener for each peer: only that peer has its contact.
        group.send(("contact", listener.contact), peer)
        return listener.accept(deadline.remaining())
    finally:
        listener.close()


def _dial(group: StatelessGroup, endpoint: PipeEndpoint, peer: int, deadline: Deadline) -> Pipe:
    match group.recv(peer, deadline.remaining()):
        case ("contact", str(contact)):
            return endpoint.connect(contact, deadline.remaining())
        case ("failed", str(why)):
            raise TransportError(peer_text(why))
    raise WireError(f"rank {peer} did not say where it listens; same kvplug?")
