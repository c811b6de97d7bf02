"""The context of a connector: the argument of its factory, with everything from outside that it may use.

Only the composition root (:mod:`kvplug.assembly`) looks names up; a plugin gets its options, its identity,
its metrics and its access to other processes here.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvplug.config.config import Config
from kvplug.engine.connector.values import KVCacheConfig, Parallelism, Side
from kvplug.engine.members import Members
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.agreement import Agreement
from kvplug.negotiation.model import ModelInfo
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.trust.channel import Channel
from kvplug.transport.lookup import LookupEndpoint
from kvplug.transport.pipe import Pipe
from kvplug.transport.store.store import Store


class PeerLink(abc.ABC):
    """An authenticated, agreed connection to one other process."""

    agreement: Agreement
    """The agreement of the two ends, and the identity of the other one."""
    channel: Channel
    """Small plain values both ways; for the connector's own use."""

    @abc.abstractmethod
    def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """One pipe over the transport that was agreed on for tensors on ``device``.

        Both ends call it, in the same order, with the same label; the contact crosses the channel.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close the channel; pipes live on. An ``open_pipe`` under way raises. Idempotent."""


class PeerServer(abc.ABC):
    """Serves other processes at the control address, until it is closed."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """Where it listens: what ``Peers.connect`` of another process takes as ``peer``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening, close the links that are being served, and wait briefly for their threads.
        Idempotent.
        """


class Peers(abc.ABC):
    """A connector's access to other processes."""

    @abc.abstractmethod
    def serve(self, serve_link: Callable[[PeerLink, Deadline], None], *, max_served: int = 0) -> PeerServer:
        """Listen at the config's address for this worker, or as the embedding program says, and call
        ``serve_link`` for each peer that proved itself and with which an agreement was reached, each in its
        own thread. A refused peer receives the reason and is counted.

        Its second argument is the deadline of the peer's handshake: open pipes by it. The link is closed when
        ``serve_link`` returns, which may be when the peer goes; pipes that it has opened live on, and are the
        connector's to close. An error that it raises is logged and ends that link only. ``max_served`` peers
        are served at once (0: 256); more wait.
        """

    @abc.abstractmethod
    def connect(
        self,
        rank: int,
        purpose: str,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        retry: bool = True,
        peer: str | Mapping[int, str] | None = None,
    ) -> PeerLink:
        """Connect to worker ``rank`` of a peer engine; retries until it listens or the deadline passes.

        ``purpose`` is a word both connectors understand; the acceptor finds it in the agreement. With
        ``retry=False`` the peer must already listen. ``peer`` is the address of the peer engine's worker 0,
        as in the config's ``peers``, or the contact of each worker by its rank; by default the config's host
        and port, or what the embedding program says.

        Raises:
            TimeoutError: no process listened there in time; names the address.
            PeerGoneError: no process listens there, and ``retry`` is false.
            HandshakeError, AuthenticationError: at once.
            ClosedError: ``close`` was called, perhaps during the wait.
        """

    @abc.abstractmethod
    def address_of(self, rank: int, peer: str | Mapping[int, str] | None = None) -> str:
        """The address, or the contact, at which :meth:`connect` reaches worker ``rank`` of a peer engine.

        Raises:
            HandshakeError: contacts are known, and none for this rank.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close every listener, and end every wait in ``connect``. Idempotent.

        A connector calls it first in ``shutdown``. The caller that opened a link or a pipe owns it.
        """


@attrs.frozen(kw_only=True)
class ConnectorContext:
    """For the two factories of a connector."""

    config: Config
    """The whole config. Its ``options`` are in ``options``, checked."""
    options: Any
    """An instance of the spec's options class, or ``None``."""
    side: Side
    """Which side is made."""
    model: ModelInfo
    """The engine's model, as far as its KV is concerned."""
    cache: KVCacheConfig
    """The paged cache of this worker; on the scheduler's side of any one."""
    parallelism: Parallelism
    """The place of this worker among those that share the model."""
    loads_in_background: bool = False
    """The engine lets every request wait until its load has ended, because it plans a step before it knows
    how the loads of the step before have ended. A connector that can load in the background does so, whatever
    its options say.
    """
    peers: Peers
    """Listens for other processes, and connects to them."""
    members: Members | None = None
    """The engines that a directory knows, where ``peers`` names one. A connector closes it in
    ``shutdown``."""
    stats: TransferStats
    """The counters of this connector. One object for each side; sinks read it."""
    checksums: tuple[str, ...] = ()
    """Hashes this side computes and verifies with, preferred ones first; empty when integrity is off."""
    open_store: Callable[[str], Store]
    """Opens a store by its name, with the config's options for it. The caller closes it."""
    store_client: Callable[[str, PeerLink], Store]
    """Makes this process's end of the store of that name which the peer at the link's other end serves."""
    open_lookup: Callable[[], LookupEndpoint]
    """Makes the endpoint of the lookup buffer that the config's ``lookup_buffer`` names, with the config's
    options for it. The spec of a connector that calls it says ``uses_lookup_buffer``. The caller closes the
    ends that it makes."""
    close: Callable[[], None]
    """Ends what was built for this connector outside it (listeners, links, reporters).

    A connector calls it last in ``shutdown``. Idempotent.
    """
