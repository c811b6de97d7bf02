"""Handles a listener's connections that have not yet proved themselves.

Nothing here blocks, and nothing is decoded before the proof. Each connection takes a few hundred bytes (plus
the memory of a TLS handshake), and has a deadline.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Sequence

from kvplug.config.addresses import ip_address
from kvplug.errors import ResourceExhaustedError
from kvplug.net.fork import close_after_fork, no_fork
from kvplug.net.trust.challenge import MAGIC, Exchange, Refusal, RefusedError
from kvplug.net.trust.identity import PeerIdentity, same_user, unix_peer_uid
from kvplug.net.trust.tls import binding_of, reason_of

BURST = 64
PER_SECOND = 16.0
"""How many connections from one origin may fail to prove themselves, at once and per second."""
_MAX_ORIGINS = 1024
_TLS_RECORD = 0x16
"""The first byte from a client that speaks TLS."""

THIS_USER = "this user"
"""The origin of this user's own connections. Their failures are not limited."""
THIS_HOST = "this host"
"""The origin of TCP loopback connections, whose user the kernel does not show. Not limited either, since a
limit would shut out this user's own connections."""


def origin_of(sock: socket.socket) -> str:
    """Return a new connection's origin, known from the kernel before any byte arrives: a user of this host,
    or another host."""
    if sock.family == socket.AF_UNIX:
        uid = unix_peer_uid(sock)
        return THIS_USER if uid == os.geteuid() else f"user {uid} of this host"
    host = ip_address(sock.getpeername()[0])
    if host.is_loopback:
        return THIS_HOST
    # one host may have all addresses of a /64 network
    return str(ipaddress.ip_network((host, 64), strict=False) if host.version == 6 else host)


def check_same_user(sock: socket.socket) -> None:
    """Raises RefusedError: the kernel does not confirm that a Unix socket's other end is the same user."""
    try:
        uid = unix_peer_uid(sock)
        if same_user(uid):
            return
    except ResourceExhaustedError as e:
        raise RefusedError.for_lack(e) from e
    raise RefusedError(Refusal.OTHER_USER, text=f"it belongs to another user of this host (uid {uid})")


class Stranger:
    """One unproven connection, in non-blocking mode. :meth:`proceed` is called whenever bytes have arrived.

    ``challenge`` starts the listener's end of the challenge; its argument identifies the TLS session. ``tls``
    is the context of a listener that uses TLS.
    """

    def __init__(
        self,
        sock: socket.socket,
        origin: str,
        challenge: Callable[[bytes], Exchange],
        deadline: float,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sock = sock
        self.origin = origin
        self.deadline = deadline
        self._begin = challenge
        self._tls = tls
        self._challenge: Exchange | None = None
        self._received = bytearray()
        self._need = 0
        self._has_spoken = False
        """Whether the first message is complete. Later messages may begin with any byte."""

    def proceed(self) -> PeerIdentity | None:
        """Read and answer the bytes that have arrived. Returns the peer's identity once it has proved itself.

        Raises:
            RefusedError: the connection is refused.
        """
        try:
            if self._tls is not None and not isinstance(self.sock, ssl.SSLSocket):
                first = self.sock.recv(1, socket.MSG_PEEK)
                if not first:
                    raise RefusedError(Refusal.SILENT)
                if first == MAGIC[:1]:
                    raise RefusedError(Refusal.CREDENTIALS, "needs TLS")
                with no_fork:
                    self.sock = self._tls.wrap_socket(
                        self.sock, server_side=True, do_handshake_on_connect=False
                    )
                    close_after_fork(self.sock)
            if self._challenge is None:
                binding = b""
                if isinstance(self.sock, ssl.SSLSocket):
                    self.sock.do_handshake()
                    binding = binding_of(self.sock)
                self._challenge = self._begin(binding)
                _, self._need = next(self._challenge)
            while True:
                self._receive()
                reply, self._need = self._challenge.send(bytes(self._received))
                self._received.clear()
                self._has_spoken = True
                self._send(reply)
        except StopIteration as proven:
            identity: PeerIdentity = proven.value
            return identity
        except RefusedError:
            raise
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        except ResourceExhaustedError as e:
            raise RefusedError.for_lack(e) from e
        except ssl.SSLError as e:
            text = f"the TLS handshake failed: {reason_of(e)}"
            raise RefusedError(Refusal.CREDENTIALS, text=text) from e
        except OSError as e:
            raise RefusedError(Refusal.SILENT) from e

    def _receive(self) -> None:
        """Receive the rest of the next message. Raises BlockingIOError: it has not arrived."""
        while len(self._received) < self._need:
            data = self.sock.recv(self._need - len(self._received))
            if not data:
                raise RefusedError(Refusal.SILENT)
            self._received += data
            if not self._has_spoken and self._received[0] == _TLS_RECORD:
                raise RefusedError(Refusal.CREDENTIALS, "has no TLS")

    def _send(self, reply: bytes) -> None:
        """Send a reply of a few hundred bytes into an empty buffer. Drops a client for which this would
        block."""
        sent = 0
        with contextlib.suppress(BlockingIOError, ssl.SSLWantWriteError):
            sent = self.sock.send(reply) if reply else 0
        if sent != len(reply):
            raise RefusedError(Refusal.SILENT)

    def refuse(self, refused: RefusedError) -> None:
        """Send the reason without waiting, if the other end can read it, and close the connection."""
        is_encrypted = isinstance(self.sock, ssl.SSLSocket)
        # without TLS at this end, or refused for not using TLS
        is_plain = self._tls is None or refused.refusal is Refusal.CREDENTIALS
        can_read = self._challenge is not None if is_encrypted else is_plain
        with contextlib.suppress(OSError):
            if refused.refusal is not Refusal.SILENT and can_read:
                self.sock.send(refused.reply)
            socket.socket.shutdown(self.sock, socket.SHUT_WR)
        with no_fork:
            self.sock.close()


def to_drop(unproven: Sequence[Stranger], origin: str, most: int) -> Stranger | None:
    """Return the connection to drop before one from ``origin`` is added, or ``None`` if there is room.

    ``unproven`` is sorted, oldest first, and has ``most`` places. A flood from one origin leaves places for
    the others: if ``origin`` has three quarters of the places, its oldest connection is dropped. Otherwise,
    if all places are taken, the oldest of the origin with the most connections is dropped.
    """
    count = Counter(each.origin for each in unproven)
    if count[origin] >= max(1, most * 3 // 4):
        crowding = origin
    elif len(unproven) >= most:
        crowding = count.most_common(1)[0][0]
    else:
        return None
    return next(each for each in unproven if each.origin == crowding)


class FailureRate:
    """Limits how often connections from one origin may fail to prove themselves. For one thread; callers pass
    the time."""

    def __init__(self) -> None:
        self._forgiven: dict[str, float] = {}
        """By origin: when its failures no longer count."""

    def may_come(self, origin: str, now: float) -> bool:
        """Whether to handle a new connection from ``origin``; false after too many failures."""
        return self._forgiven.get(origin, now) - now <= (BURST - 1) / PER_SECOND

    def failed(self, origin: str, now: float) -> None:
        """Note that a connection from ``origin`` did not prove itself."""
        forgiven = max(now, self._forgiven.pop(origin, now)) + 1 / PER_SECOND
        self._forgiven[origin] = min(forgiven, now + BURST / PER_SECOND)  # now the last to be forgotten
        if len(self._forgiven) > _MAX_ORIGINS:
            del self._forgiven[next(iter(self._forgiven))]
