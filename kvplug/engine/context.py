"""The context passed to a connector's factories: everything from outside that the connector may use.

Only the composition root (:mod:`kvplug.assembly`) looks names up. A plugin gets its options, its identity,
its metrics and its access to other processes from the context.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvplug.config.config import Config
from kvplug.engine.connector.values import KVCacheConfig, Parallelism, Side
from kvplug.metrics.spans import SpanLog
from kvplug.metrics.stats import TransferStats
from kvplug.negotiation.agreement import Agreement
from kvplug.negotiation.model import ModelInfo
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.trust.channel import Channel
from kvplug.transport.lookup import LookupEndpoint
from kvplug.transport.pipe import Pipe
from kvplug.transport.store.store import Store


class PeerLink(abc.ABC):
    """An authenticated connection to one other process, with an agreement."""

    agreement: Agreement
    """The agreement of the two ends, and the identity of the other end."""
    channel: Channel
    """A channel for small plain values in both directions, for the connector's own use."""

    @abc.abstractmethod
    def open_pipe(self, label: str, *, device: str = "cpu", timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        """Open a pipe over the transport that was agreed on for tensors on ``device``.

        Both ends call it, in the same order, with the same label. The channel carries the pipe's contact.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close the channel; pipes stay open. An ``open_pipe`` in progress raises. Idempotent."""


class PeerServer(abc.ABC):
    """Serves other processes at the control address until it is closed."""

    @property
    @abc.abstractmethod
    def contact(self) -> str:
        """The address where this listens. Another process passes it to ``Peers.connect`` as ``peer``."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop listening, close the links that are being served, and wait briefly for their threads.
        Idempotent.
        """


class Peers(abc.ABC):
    """A connector's access to other processes."""

    @abc.abstractmethod
    def serve(self, serve_link: Callable[[PeerLink, Deadline], None], *, max_served: int = 0) -> PeerServer:
        """Listen at the config's address for this worker, or at one that the embedding program chose.

        Call ``serve_link`` in a thread for each peer whose handshake succeeds. A refused peer receives the
        reason and is counted.

        The second argument of ``serve_link`` is the deadline of the peer's handshake, by which pipes must be
        open. ``serve_link`` may run until the peer is gone; the link is closed when it returns. Pipes that it
        opened stay open until the connector closes them. An error that it raises is logged and ends that link
        only. At most ``max_served`` peers are served at once (0: 256); others wait.
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
        """Connect to worker ``rank`` of a peer engine; retry until it listens or the deadline passes.

        ``purpose`` is a word that both connectors know; the acceptor finds it in the agreement. With
        ``retry=False`` the peer must be listening. ``peer`` is the address of the peer engine's worker 0,
        as in the config's ``peers``, or the contact of each worker by its rank. By default it is the config's
        host and port, or the embedding program's choice.

        Raises:
            TimeoutError: no process listened there in time; the message names the address.
            PeerGoneError: no process listens there, and ``retry`` is false.
            HandshakeError, AuthenticationError: the peer was refused; raised without a retry.
            ClosedError: ``close`` was called, perhaps during the wait.
        """

    @abc.abstractmethod
    def address_of(self, rank: int, peer: str | Mapping[int, str] | None = None) -> str:
        """Return the address or contact at which :meth:`connect` reaches worker ``rank`` of a peer engine.

        Raises:
            HandshakeError: the peer's contacts do not include this rank.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close every listener, and end every wait in ``connect``. Idempotent.

        A connector calls it first in ``shutdown``. Links and pipes belong to the callers that opened them.
        """


@attrs.frozen(kw_only=True)
class Engine:
    """An engine whose workers have all announced themselves."""

    engine_id: str
    """The config's ``engine_id``, which is unique."""
    epochs: tuple[str, ...]
    """The epochs of the workers' processes, by rank. They change when the engine restarts."""
    contacts: Mapping[int, str] = attrs.field(repr=False)
    """Where each worker listens, by rank, for ``Peers.connect(peer=...)``. Connecting fails if another engine
    listens there, or if this engine has restarted. Opaque."""
    role: str
    """``producer``, ``consumer`` or ``both``."""
    model: str
    """A fingerprint, equal for engines with interchangeable KV."""


MembersListener = Callable[[tuple[Engine, ...], bool], None]


class Members(abc.ABC):
    """This process's access to the directory that the config's ``peers`` names."""

    model: str
    """The fingerprint of this engine's own model."""

    @abc.abstractmethod
    def announce(self, contact: str) -> None:
        """Announce that this worker listens at ``contact``, and renew the announcement until :meth:`close`.

        Raises:
            ConfigError: other hosts can reach the directory but not the contact.
        """

    @abc.abstractmethod
    def follow(self, listener: MembersListener) -> None:
        """Call ``listener(engines, is_stale)`` with all other engines after each change, in a background
        thread. ``is_stale`` means that the directory has not answered for longer than a lease, so that
        ``engines`` are the last known ones. Such calls repeat until the directory answers; then a call with
        ``is_stale`` false follows. A call that raises is logged and repeated later."""

    @abc.abstractmethod
    def wait_until_known(self, deadline: Deadline) -> None:
        """Wait for the first answer of the directory.

        Raises:
            TimeoutError: the directory did not answer in time; the message gives the cause.
            ClosedError: :meth:`close` was called.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Withdraw the announcement, and end the thread. Waits at most a second. Idempotent."""


@attrs.frozen(kw_only=True)
class ConnectorContext:
    """The argument of a connector's two factories."""

    config: Config
    """The whole config. :attr:`options` has the checked options of this connector."""
    options: Any
    """An instance of the spec's options class, or ``None``."""
    side: Side
    """The side that the factory makes."""
    model: ModelInfo
    """The properties of the engine's model that its KV depends on."""
    cache: KVCacheConfig
    """The paged cache of this worker; on the scheduler side, that of any worker."""
    parallelism: Parallelism
    """The place of this worker among the workers that share the model."""
    loads_in_background: bool = False
    """Whether the engine makes every request wait until its load has ended, because it plans a step before it
    knows the outcome of the previous step's loads. A connector that can load in the background then does so,
    regardless of its options.
    """
    peers: Peers
    """Listens for other processes, and connects to them."""
    members: Members | None = None
    """The engines in a directory, if the config's ``peers`` names one. A connector closes it in
    ``shutdown``."""
    stats: TransferStats
    """The counters of this connector. Each side has one object; sinks read it."""
    spans: SpanLog = attrs.field(factory=SpanLog)
    """Receives what each request waited for. Each side has one object."""
    checksums: tuple[str, ...] = ()
    """Hashes that this side supports, preferred ones first; empty when integrity is off."""
    open_store: Callable[[str], Store]
    """Opens a store by its name, with the config's options for it. The caller closes it."""
    store_client: Callable[[str, PeerLink], Store]
    """Makes a client of the named store, which the peer at the other end of the link serves."""
    open_lookup: Callable[[], LookupEndpoint]
    """Makes the endpoint of the config's ``lookup_buffer``, with the config's options for it. A connector
    that calls it sets ``uses_lookup_buffer`` in its spec. The caller closes what it makes with the
    endpoint."""
    close: Callable[[], None]
    """Closes what kvplug built for this connector (listeners, links, reporters).

    A connector calls it last in ``shutdown``. Idempotent.
    """
