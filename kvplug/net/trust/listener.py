"""A listener: an address of this host where connections prove themselves for one purpose.

Nothing is decoded before the proof. At most 64 connections of a listener are unproven at once, and one origin
cannot take all places: see :mod:`kvplug.net.trust.admission`. Each has 5 seconds, and is served by a thread
of its own, so a client that is silent or slow, or sends garbage, does not delay others.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import select
import socket
import ssl
import threading
import time
from typing import Self

from kvplug.config.addresses import Address
from kvplug.errors import KvplugError, ResourceExhaustedError
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import NamedExhaustion
from kvplug.net.fork import close_after_fork, close_sockets, no_fork
from kvplug.net.log import LogEvent
from kvplug.net.trust.addresses import BoundSocket
from kvplug.net.trust.admission import FailureRate, origin_of, place_to_free
from kvplug.net.trust.challenge import MAGIC, Mode, Refusal, RefusedError, admit
from kvplug.net.trust.connection import Connection, run_challenge, tune
from kvplug.net.trust.credentials import Credentials
from kvplug.net.trust.identity import PeerIdentity, encode_identity, same_user, unix_peer_uid
from kvplug.net.trust.relay import plain_end
from kvplug.net.trust.tls import ListenerTls, binding_of, reason_of

logger = logging.getLogger(__name__)

_PROOF_TIMEOUT_S = 5.0
"""How long a connection may take to prove itself."""
_MAX_UNPROVEN = 64
_TLS_RECORD = b"\x16"
"""The first byte from a client that speaks TLS."""


class Stranger:
    """A connection that has not proved itself."""

    def __init__(self, sock: socket.socket, tls: ssl.SSLContext | None) -> None:
        self.sock = sock
        self.origin = ""
        self.tls = tls
        self.deadline = Deadline.after(_PROOF_TIMEOUT_S)
        self.can_read = tls is None
        """Whether the client can read a refusal now."""

    def end(self, refused: RefusedError | None = None) -> None:
        """Send the reason without waiting, if the client can read it, and end the connection. The thread that
        serves it, if any, closes it."""
        with contextlib.suppress(OSError):
            if refused is not None and refused.refusal is not Refusal.SILENT and self.can_read:
                self.sock.setblocking(False)
                self.sock.send(refused.reply)
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)  # without TLS's closing messages


class Listener:
    """Listens at one address for one purpose. Any thread may call any method.

    Made by :meth:`open`. Connections wait until an :class:`Acceptor` serves the listener. In a forked child
    the listener is closed.
    """

    def __init__(self, bound: BoundSocket, credentials: Credentials, purpose: str, label: str) -> None:
        """Owns ``bound`` from here on, even if this raises. For the other arguments see :meth:`open`."""
        self._bound = bound
        self._contact = str(bound.address)
        self._key = credentials.key
        self._mode = credentials.mode_at(bound.address)
        self._purpose = purpose
        self._label = label
        self._lock = threading.RLock()
        self._taking = threading.RLock()
        """Held while a thread waits for connections, since the number of a closed socket may be reused."""
        self._closed = False
        self._unproven: list[Stranger] = []
        """Oldest first."""
        self._failures = FailureRate()
        self._refusals: collections.Counter[str] = collections.Counter()
        self.last_refusal: RefusedError | None = None
        """Why the latest refused connection was refused."""
        close_after_fork(self)
        try:
            tls = None if bound.address.is_unix else credentials.tls
            self._tls = None if tls is None else ListenerTls(tls)
            bound.sock.setblocking(False)
        except BaseException:
            self.close()
            raise

    @classmethod
    def open(
        cls, address: str | Address, credentials: Credentials, purpose: str, *, label: str = ""
    ) -> Listener:
        """Start to listen at ``host:port`` (port 0: any free port), ``unix:@name``, ``unix:`` (any name) or
        ``unix:/path``. The listener removes its path's file when it closes, and takes over a file left by a
        dead process.

        Without a secret, only this user's processes on this host can connect to a Unix socket. TCP needs a
        secret or TLS in ``credentials``, and uses TLS if given. The dialling end must name the same
        ``purpose``; ``label`` names this process to the dialling end.

        Raises:
            InsecureAddressError: it is a TCP address, and neither a secret nor TLS is set; nothing is bound.
            AddressInUseError: another process listens there. Names the address, and the process if known.
            TransportError: it cannot be bound for another reason.
            ResourceExhaustedError: the process has no free descriptor.
            ConfigError: it is not an address, or not an address of this host, or a TLS file cannot be used.
        """
        with NamedExhaustion(f"listening at {address}"):
            if isinstance(address, str):
                address = Address.parse(address)
            credentials.mode_at(address, "host")
            return cls(BoundSocket.listen(address), credentials, purpose, label)

    def __repr__(self) -> str:
        return f"<Listener at {self._contact} for {self._purpose!r}{', closed' if self._closed else ''}>"

    @property
    def contact(self) -> str:
        """The listener's address with its port: the argument of :meth:`Connection.dial`."""
        return self._contact

    @property
    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by reason.

        "garbage": not kvplug, or another version of the challenge. "purpose": the client asked for another
        service. "credentials": a wrong secret or certificate, or one end has a secret or TLS and the other
        does not. "other user": another user of this host. "busy": too many connections, or a resource ran out
        here. "silent": the client did not prove itself in time, or hung up.
        """
        return dict(self._refusals)

    def close(self) -> None:
        """Stop listening, and end the unproven connections. Idempotent. Proven connections stay open."""
        self._closed = True
        self._bound.shut_down()
        with self._lock:
            for stranger in self._unproven:
                stranger.end()
            self._unproven.clear()
        with self._taking:
            close_sockets(self._bound.sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        self._closed = True

    # -- for an acceptor -----------------------------------------------------------------------

    def take(self) -> Stranger | None:
        """Wait for a connection, and return it as one of the unproven; ``None`` if the listener is closed.

        Raises:
            ResourceExhaustedError: the next connection cannot be accepted, and stays queued.
        """
        with self._taking:
            poller = select.poll()
            while not self._closed:
                poller.register(self._bound.sock, select.POLLIN)
                poller.poll()
                sock = self._accept()
                if sock is not None:
                    stranger = Stranger(sock, None if self._tls is None else self._tls.context)
                    if self._admits(stranger):
                        return stranger
        return None

    def _accept(self) -> socket.socket | None:
        """Accept the next connection; ``None`` if it has gone or the listener is closed."""
        try:
            with no_fork:
                sock, _ = self._bound.sock.accept()
                close_after_fork(sock)
            return sock
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return None
        except OSError as e:
            if self._closed:
                return None
            shortage = NamedExhaustion.of(e, f"accepting a connection at {self._contact}")
            if shortage is None:
                raise
            self._drop(0, RefusedError.for_lack(shortage))  # which frees a descriptor
            raise shortage from e

    def _admits(self, stranger: Stranger) -> bool:
        """Give the connection a place among the unproven, or refuse and close it. Raises
        ResourceExhaustedError."""
        try:
            stranger.origin = origin_of(stranger.sock)
            if stranger.sock.family != socket.AF_UNIX:
                tune(stranger.sock)
            if self._mode is Mode.SAME_USER:
                uid = unix_peer_uid(stranger.sock)
                if not same_user(uid):
                    text = f"it belongs to another user of this host (uid {uid})"
                    raise RefusedError(Refusal.OTHER_USER, text=text)
            with self._lock:
                if not self._failures.may_come(stranger.origin, time.monotonic()):
                    text = f"too many connections from {stranger.origin} failed"
                    raise RefusedError(Refusal.BUSY, text=text)
                origins = [each.origin for each in self._unproven]
                if (at := place_to_free(origins, stranger.origin, _MAX_UNPROVEN)) is not None:
                    self._drop(at, RefusedError(Refusal.BUSY))
                if not self._closed:
                    self._unproven.append(stranger)
                    return True
        except RefusedError as refused:
            self._refuse(stranger, refused)
        except ResourceExhaustedError as shortage:
            self.refuse(stranger, shortage)
            raise
        except OSError:  # the client has already gone
            pass
        close_sockets(stranger.sock)
        return False

    def _drop(self, at: int, refused: RefusedError) -> None:
        """Refuse an unproven connection. Its own thread, which may be using TLS, closes it."""
        with self._lock:
            for stranger in self._unproven[at : at + 1]:
                stranger.can_read = stranger.tls is None
                self._refuse(stranger, refused)

    def prove(self, stranger: Stranger) -> Connection | None:
        """Run the challenge with a connection from :meth:`take`, and own it from here on. Returns ``None`` if
        it was refused.

        Raises:
            ResourceExhaustedError: it was refused, because this process lacks a resource.
        """
        try:
            peer = self._challenge(stranger)
            with self._lock:
                if stranger not in self._unproven:
                    raise RefusedError(Refusal.BUSY)
                self._unproven.remove(stranger)
                sock = stranger.sock
            with NamedExhaustion(f"taking a TLS connection at {self._contact}"):
                if isinstance(sock, ssl.SSLSocket):
                    stranger.sock = sock = plain_end(sock, str(peer))
            sock.settimeout(None)
            return Connection(sock, peer, self._purpose, self._mode, self._contact)
        except Exception as e:
            shortage = NamedExhaustion.of(e, f"the proof of a connection at {self._contact}")
            with self._lock:
                if stranger in self._unproven:  # otherwise it was refused already, or the listener is closed
                    self._refuse(stranger, _refusal_for(e))
            close_sockets(stranger.sock)
            if shortage is not None:
                raise shortage from e
            if not isinstance(e, KvplugError | OSError | EOFError):
                logger.exception("a challenge at %s failed because of a fault in kvplug", self._contact)
            return None

    def _challenge(self, stranger: Stranger) -> PeerIdentity:
        """Run this end of the challenge."""
        sock, deadline, binding = stranger.sock, stranger.deadline, b""
        sock.settimeout(deadline.remaining())
        first = sock.recv(1, socket.MSG_PEEK)
        if not first:
            raise EOFError
        if stranger.tls is None and first == _TLS_RECORD:
            raise RefusedError(Refusal.CREDENTIALS, "has no TLS")
        if stranger.tls is not None:
            if first == MAGIC[:1]:
                stranger.can_read = True
                raise RefusedError(Refusal.CREDENTIALS, "needs TLS")
            with self._lock, no_fork:
                stranger.sock = sock = stranger.tls.wrap_socket(
                    sock, server_side=True, do_handshake_on_connect=False
                )
                close_after_fork(sock)
            sock.settimeout(deadline.remaining())
            sock.do_handshake()
            binding = binding_of(sock)
            stranger.can_read = True
        identity = encode_identity(PeerIdentity.of_this_process(self._label))
        return run_challenge(sock, admit(self._purpose, self._mode, self._key, identity, binding), deadline)

    def refuse(self, stranger: Stranger, error: Exception) -> None:
        """Refuse and close a connection from :meth:`take` that cannot be served because of ``error``."""
        self._refuse(stranger, _refusal_for(error))
        close_sockets(stranger.sock)

    def _refuse(self, stranger: Stranger, refused: RefusedError) -> None:
        reason = refused.refusal.reason
        with self._lock:
            self._refusals[reason] += 1  # before the client knows
            self.last_refusal = refused
            if stranger in self._unproven:
                self._unproven.remove(stranger)
                self._failures.failed(stranger.origin, time.monotonic())
            stranger.end(refused)
        LogEvent.CONNECTION_REFUSED.log(
            logger,
            f"a connection to {self._contact} was refused: {refused}",
            level=None if self._refusals[reason] == 1 else logging.DEBUG,
            address=self._contact,
            reason=reason,
            error=refused,
        )


def _refusal_for(error: Exception) -> RefusedError:
    """Return the refusal of a client whose proof failed with ``error``."""
    if isinstance(error, RefusedError):
        return error
    if (shortage := NamedExhaustion.of(error)) is not None:
        return RefusedError.for_lack(shortage)
    if isinstance(error, ssl.SSLError):
        return RefusedError(Refusal.CREDENTIALS, text=f"the TLS handshake failed: {reason_of(error)}")
    return RefusedError(Refusal.SILENT)
