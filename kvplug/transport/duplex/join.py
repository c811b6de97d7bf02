"""The messages of fixed size that two ends exchange over a proven connection before it is a pipe."""

from __future__ import annotations

import builtins
import socket

from kvplug.errors import PeerGoneError, TimeoutError
from kvplug.net.deadline import Deadline
from kvplug.net.exhaustion import raise_if_exhausted
from kvplug.net.trust.connection import Connection
from kvplug.net.trust.decline import raise_if_declined
from kvplug.net.wire.frames import HEADER_SIZE


class JoinStream:
    """Sends and receives whole messages over ``connection`` until a deadline. It stays its owner's.

    The texts end the sentence that begins with the peer: ``late`` after the deadline ("did not join in
    time"), ``gone`` when it hung up.
    """

    def __init__(self, connection: Connection, *, late: str, gone: str) -> None:
        self._connection = connection
        self._late = late
        self._gone = gone

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Raises TimeoutError, PeerGoneError; ResourceExhaustedError: here, or at the peer."""
        sock = self._connection.sock
        try:
            sock.settimeout(_seconds(deadline))
            sock.sendall(data)
            sock.settimeout(None)
        except OSError as e:
            raise_if_exhausted(e, f"joining {self._connection.describe}")
            self._check_last_word()
            raise self._error(e) from e

    def _check_last_word(self) -> None:
        """The peer has hung up: raise what it said of a resource that it lacked, if it did."""
        try:
            data = self._connection.sock.recv(HEADER_SIZE, socket.MSG_DONTWAIT)
        except OSError:
            return
        raise_if_declined(self._connection, data, Deadline.after(0))

    def receive(self, nbytes: int, deadline: Deadline) -> bytes:
        """Exactly so many bytes.

        Raises:
            TimeoutError, PeerGoneError: they did not come.
            ResourceExhaustedError: the peer has no resources to go on; or this process has none.
        """
        data = b""
        while len(data) < nbytes:
            data += self.receive_some(nbytes - len(data), deadline)
            raise_if_declined(self._connection, data, deadline)
        self._connection.sock.settimeout(None)
        return data

    def receive_some(self, nbytes: int, deadline: Deadline) -> bytes:
        """One byte at least, ``nbytes`` at most. Raises TimeoutError, PeerGoneError."""
        sock = self._connection.sock
        try:
            sock.settimeout(_seconds(deadline))
            chunk = sock.recv(nbytes)
        except OSError as e:
            raise_if_exhausted(e, f"joining {self._connection.describe}")
            raise self._error(e) from e
        if not chunk:
            raise PeerGoneError(f"{self._connection.describe} {self._gone}")
        return chunk

    def _error(self, error: OSError) -> Exception:
        if isinstance(error, builtins.TimeoutError):
            return TimeoutError(f"{self._connection.describe} {self._late}")
        return PeerGoneError(f"{self._connection.describe} {self._gone}")


def _seconds(deadline: Deadline) -> float | None:
    """For ``settimeout``, where 0 would mean not to wait at all."""
    left = deadline.remaining()
    return None if left is None else max(0.001, left)
