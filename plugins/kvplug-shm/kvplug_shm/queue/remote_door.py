"""The front door of a queue's network half: the only socket of it that listens on the network.

ZeroMQ accepts every connection and keeps it until its handshake is over, so that strangers could use up the
process's descriptors. So remote readers come to a :class:`~kvplug.transport.Listener`, which rates and bounds
connections that have not proved themselves. A proven one is carried to ZeroMQ's socket, which listens at an
abstract Unix socket for connections of this process only.
"""

from __future__ import annotations

import socket
import threading
import time
from typing import Final

from kvplug import ConfigError
from kvplug.transport import Acceptor, Connection, Credentials, Listener, Relay
from kvplug_shm.queue.remote_contact import PURPOSE

_CONNECT_S: Final = 5.0


class FrontDoor:
    """Lets proven readers in. Any thread may call any method. In a forked child it is closed."""

    def __init__(self, host: str, credentials: Credentials) -> None:
        """Listen at a free port of ``host``. Proven connections wait until :meth:`open`.

        Raises:
            InsecureAddressError: there is neither a secret nor TLS.
            ConfigError: it is no address of this host, or a Unix socket; or a TLS file cannot be used.
            TransportError: listening failed for another reason.
        """
        if host.startswith("unix:"):
            raise ConfigError(f"readers on other hosts need an address of TCP, and the host is {host!r}")
        self._listener = Listener.open(f"[{host}]:0" if ":" in host else f"{host}:0", credentials, PURPOSE)
        self._acceptor: Acceptor[None] | None = None
        self.endpoint = ""
        self._lock = threading.RLock()
        self._closed = False
        self._relays: list[Relay] = []

    @property
    def contact(self) -> str:
        """For :meth:`kvplug.transport.Connection.dial`."""
        return self._listener.contact

    @property
    def refusals(self) -> dict[str, int]:
        """How many connections were refused, by reason."""
        return self._listener.refusals

    def open(self, endpoint: str) -> None:
        """Carry proven connections to the abstract Unix socket of this name.

        Raises:
            TransportError: this process can have no more threads. It is closed.
        """
        self.endpoint = endpoint
        self._acceptor = Acceptor(
            [self._listener],
            self._let_in,
            what="the connection of a queue's remote reader",
            name="kvplug-shm-door",
        )

    def close(self, linger_s: float) -> None:
        """Refuse new connections and end the others: what ZeroMQ has sent has ``linger_s`` to arrive.

        Idempotent.
        """
        with self._lock:
            self._closed = True
            relays = list(self._relays)
        (self._acceptor or self._listener).close()
        for relay in relays:
            relay.finish() if linger_s else relay.abort()
        until = time.monotonic() + linger_s
        for relay in relays:
            relay.join(max(0.0, until - time.monotonic()))
            relay.abort()

    def _let_in(self, connection: Connection) -> None:
        near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            near.settimeout(_CONNECT_S)
            near.connect("\0" + self.endpoint)
        except BaseException:
            near.close()
            raise
        relay = Relay(connection.sock, near, connection.describe)
        with self._lock:
            self._relays = [each for each in self._relays if not each.ended]
            if not self._closed:
                self._relays.append(relay)
                return
        relay.abort()
