"""Connections to other processes: a control channel, a handshake that leads to an agreement, then pipes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from kvplug.assembly.examination import answer
from kvplug.assembly.links import CONTROL, ControlLink, LinkSettings, is_examined_by
from kvplug.engine.context import Peers, PeerServer
from kvplug.errors import ClosedError, HandshakeError, KvplugError
from kvplug.negotiation.hello import DOCTOR
from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline, Timeout
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork
from kvplug.net.log import LogEvent
from kvplug.net.threads import ExitGuard
from kvplug.net.trust.channel import Channel
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.listener import Listener
from kvplug.transport.acceptor import Acceptor

_log = logging.getLogger(__name__)

T = TypeVar("T")


class LinkServer(Acceptor[T], PeerServer):
    """Shakes hands with each peer that connects, and turns each link into a result, concurrently.

    Each peer has its own thread and deadline, so a peer that stops or dies does not delay the others.
    Failures are logged and counted. ``complete`` returns a link's result by the handshake's deadline, or
    serves the link to its end and returns ``None``; the link is then closed. ``discard`` ends a result that
    was not accepted. At most ``max_served`` links are served at once (0: the acceptor's default).
    """

    def __init__(
        self,
        settings: LinkSettings,
        address: str,
        complete: Callable[[ControlLink, Deadline], T | None],
        discard: Callable[[T], None] = lambda result: None,
        max_served: int = 0,
    ) -> None:
        """Raises InsecureAddressError, AddressInUseError, ResourceExhaustedError: it cannot listen."""
        self._settings = settings
        self._complete = complete
        super().__init__(
            [Listener.open(address, settings.credentials, CONTROL)],
            self._make_of,
            what="a link",
            name="kvplug-link",
            discard=discard,
            timeout_s=settings.config.timeout_s,
            max_served=max_served,
        )
        ExitGuard.register(self)
        LogEvent.LISTENING.log(_log, f"listening for peers at {self.contact}", address=self.contact)

    def _end_at_exit(self) -> None:
        self.close()

    def _is_in_use(self) -> bool:
        return False  # it waits only on sockets

    def _make_of(self, connection: Connection) -> T | None:
        channel, address = Channel(connection), connection.address
        text = f"{channel.peer} connects at {address}"
        LogEvent.PEER_CONNECTED.log(_log, text, peer=channel.peer, address=address)
        link: ControlLink | None = None
        deadline, result = Deadline.after(self._settings.config.timeout_s), None
        try:
            agreement = self._settings.agree(channel, "", deadline.remaining())
            is_doctor = agreement.purpose == DOCTOR
            settings = self._settings.uncounted() if is_doctor else self._settings
            link = ControlLink(settings, channel, agreement, accepted=True)
            if is_doctor:
                answer(self._settings, channel, link)
            else:
                result = self._complete(link, deadline)
            return result
        except Exception as e:
            if isinstance(e, KvplugError) and is_examined_by(e):
                _log.info("a doctor's handshake with %s: %s", channel.peer, e)
                answer(self._settings, channel, None)
                return None
            if shortage := NamedExhaustion.of(e, f"serving {channel.peer}"):
                channel.decline(shortage)
            raise
        finally:
            if result is None:
                (link or channel).close()


class ControlPeers(Peers):
    """Reaches peers over control channels at the config's addresses, or at the addresses passed in."""

    def __init__(
        self,
        settings: LinkSettings,
        *,
        rank: int = 0,
        listen: str | None = None,
        connect: str | Mapping[int, str] | None = None,
    ) -> None:
        self._settings = settings
        self._rank = rank
        self._listen = listen
        self._connect = {0: connect} if isinstance(connect, str) else connect
        self._lock = threading.Lock()
        self._servers: list[LinkServer[Any]] = []
        self._shaking: set[Channel] = set()
        self._closed = threading.Event()
        ExitGuard.register(self)
        close_after_fork(self)

    def _after_fork_in_child(self) -> None:
        self._closed.set()

    def serve(
        self,
        serve_link: Callable[[ControlLink, Deadline], T | None],
        discard: Callable[[T], None] = lambda result: None,
        *,
        max_served: int = 0,
    ) -> LinkServer[T]:
        """See :meth:`Peers.serve`. The server's ``accept`` returns the results of ``serve_link``."""
        address = self._listen or self._settings.config.control_address(self._rank)
        server = LinkServer(self._settings, address, serve_link, discard, max_served)
        with self._lock:
            self._servers.append(server)
            closed = self._closed.is_set()
        if closed:
            server.close()
            raise ClosedError("this connector was shut down")
        return server

    def address_of(self, rank: int, peer: str | Mapping[int, str] | None = None) -> str:
        if isinstance(peer, str):
            return self._settings.config.address_beside(peer, rank)
        contacts = self._connect if peer is None else peer
        if contacts is None:
            return self._settings.config.control_address(rank)
        if rank not in contacts:
            known = ", ".join(str(known) for known in sorted(contacts))
            raise HandshakeError(f"no contact is known for rank {rank} of the peer engine, only for {known}")
        return contacts[rank]

    def connect(
        self,
        rank: int,
        purpose: str,
        timeout: Timeout = DEFAULT_TIMEOUT,
        *,
        retry: bool = True,
        peer: str | Mapping[int, str] | None = None,
    ) -> ControlLink:
        if self._closed.is_set():
            raise ClosedError("this connector was shut down")
        deadline = Deadline.after(timeout, self._settings.config.connect_timeout_s)
        address, _, announced = self.address_of(rank, peer).partition("#")
        credentials = self._settings.credentials
        if retry:
            connection = Connection.dial_until(address, credentials, CONTROL, deadline, stop=self._closed)
        else:
            connection = Connection.dial(address, credentials, CONTROL, deadline.remaining())
        channel = Channel(connection)
        with self._lock:
            self._shaking.add(channel)
        try:
            if self._closed.is_set():
                raise ClosedError("this connector was shut down")
            agreement = self._settings.agree(channel, purpose, deadline.remaining(), announced)
        except BaseException:
            channel.close()
            raise
        finally:
            with self._lock:
                self._shaking.discard(channel)
        return ControlLink(self._settings, channel, agreement, accepted=False)

    def close(self) -> None:
        self._closed.set()
        with self._lock:
            servers, self._servers = self._servers, []
            shaking = list(self._shaking)
        for channel in shaking:
            channel.close()
        for server in servers:
            server.close()

    def _end_at_exit(self) -> None:
        self.close()

    def _is_in_use(self) -> bool:
        return False  # it waits only on sockets
