"""Reads replies of the server, also straight into the caller's memory, with a limit for each reply.

valkey-py has no limit: it takes as much memory as a reply states. It also copies a value several times. These
connections replace how it reads, and nothing else: valkey-py connects, authenticates, finds primaries, and
follows the nodes of a cluster.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from typing import Any, Final

import valkey
from valkey.cluster import ClusterParser
from valkey.connection import AbstractConnection
from valkey.exceptions import (
    ConnectionError as LostError,
    InvalidResponse,
    ReadOnlyError,
    ResponseError,
    TimeoutError as LateError,
    ValkeyError,
)
from valkey.sentinel import SentinelManagedConnection, SentinelManagedSSLConnection

from kvplug.transport import close_after_fork

_BUFFER_BYTES: Final = 1 << 16
_MAX_BULK: Final = 4 << 20
"""Limit in bytes of a value without memory of the caller. The longest is a piece of a page's header."""
_MAX_ITEMS: Final = 1 << 16
_MAX_LINE: Final = 1 << 16
_WOULD_BLOCK: Final = (TimeoutError, BlockingIOError, ssl.SSLWantReadError)


class LongReplyError(ValkeyError):  # type: ignore[misc]
    """The server has begun a reply that is longer than allowed. The reply was not read."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a reply of {length} bytes or items is longer than allowed")


class ReplyReader:
    """Reads the replies of RESP2 (redis.io, "Redis serialization protocol specification") from a socket.

    Raises (every method): OSError: the socket's errors.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        """Where the bytes in the buffer begin that were received and not yet read, and where they end."""

    def has_data(self, timeout: float) -> bool:
        """Whether a byte of a reply is there within ``timeout`` seconds.

        Raises:
            LostError: the server has closed the connection.
        """
        if self._begin < self._end:
            return True
        usual = self._sock.gettimeout()
        self._sock.settimeout(timeout)
        try:
            self._receive()
        except _WOULD_BLOCK:
            return False
        finally:
            self._sock.settimeout(usual)
        return True

    def read(self, into: Sequence[memoryview] | None = None) -> Any:
        """Read one reply.

        Args:
            into: where a value is written, one buffer after the other.

        Returns:
            Bytes, a number, a list, ``None``, or the server's error as an exception. With ``into``, the
            length of the value, which may be shorter than the buffers.

        Raises:
            LongReplyError: the reply is longer than allowed, or than ``into``.
            InvalidResponse: the server does not speak the protocol.
            LostError: the server has closed the connection, or its error says so.
        """
        line = self._line()
        kind, rest = line[:1], line[1:]
        if kind == b"+":
            return rest
        if kind == b"-":
            return self._error(rest.decode("utf-8", "replace"))
        try:
            number = int(rest)
        except ValueError:
            kind = b""
        if kind == b":":
            return number
        if kind not in (b"$", b"*") or number < -1:
            raise InvalidResponse(f"the server sent {line[:40]!r}")
        if number == -1:
            return None
        if kind == b"*":
            if number > _MAX_ITEMS:
                raise LongReplyError(number)
            return [self.read() for _ in range(number)]
        if number > (_MAX_BULK if into is None else sum(map(len, into))):
            raise LongReplyError(number)
        return self._value(number, into)

    def _value(self, length: int, into: Sequence[memoryview] | None) -> bytes | int:
        value = bytearray(length) if into is None else b""
        left = length
        for view in into if into is not None else (memoryview(value),):
            part = view[:left]
            self._fill(part)
            left -= len(part)
        self._line()
        return bytes(value) if into is None else length

    @staticmethod
    def _error(text: str) -> Exception:
        try:
            error: Exception = ClusterParser.parse_error(text)
        except ValueError as e:  # a redirection to an address that is none
            raise InvalidResponse(f"the server sent the error {text[:40]!r}") from e
        if isinstance(error, LostError):
            raise error
        return error

    def _line(self) -> bytes:
        """The next line, without its end."""
        line = b""
        while not line.endswith(b"\r\n"):
            if len(line) > _MAX_LINE:
                raise LongReplyError(len(line))
            if self._begin == self._end:
                self._receive()
            end = self._buffer.find(b"\n", self._begin, self._end) + 1 or self._end
            line += self._view[self._begin : end]
            self._begin = end
        return line[:-2]

    def _fill(self, view: memoryview) -> None:
        """Read that many bytes: first buffered ones, then from the socket."""
        had = min(len(view), self._end - self._begin)
        view[:had] = self._view[self._begin : self._begin + had]
        self._begin += had
        while had < len(view):
            had += self._received(self._sock.recv_into(view[had:]))

    def _receive(self) -> None:
        """Fill the empty buffer with what comes next."""
        self._begin, self._end = 0, self._received(self._sock.recv_into(self._view))

    @staticmethod
    def _received(count: int) -> int:
        if not count:
            raise LostError("Connection closed by server.")
        return count


class ReplyConnection(AbstractConnection):  # type: ignore[misc]
    """A connection of valkey-py whose replies a :class:`ReplyReader` reads."""

    _replies: ReplyReader

    def _connect(self) -> socket.socket:
        sock: socket.socket = super()._connect()
        close_after_fork(sock)
        self._replies = ReplyReader(sock)
        return sock

    def read_response(self, *_: Any, **__: Any) -> Any:
        return self.read_reply()

    def read_reply(self, into: Sequence[memoryview] | None = None) -> Any:
        """:meth:`ReplyReader.read`. After any error but a ResponseError the connection is closed.

        Raises:
            ResponseError: the reply is an error.
            LateError: the server does not answer in time.
        """
        try:
            reply = self._replies.read(into)
        except TimeoutError as e:
            self.disconnect()
            raise LateError("Timeout reading from socket") from e
        except OSError as e:
            self.disconnect()
            raise LostError(f"Error while reading: {e}") from e
        except BaseException:
            self.disconnect()
            raise
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    def can_read(self, timeout: float = 0) -> bool:
        try:
            return self._replies.has_data(timeout)
        except OSError as e:
            self.disconnect()
            raise LostError(f"Error while reading: {e}") from e


class ReplyTcpConnection(ReplyConnection, valkey.Connection):  # type: ignore[misc]
    """The same over TCP."""


class ReplyTlsConnection(ReplyConnection, valkey.SSLConnection):  # type: ignore[misc]
    """The same with TLS."""


class ReplyUnixConnection(ReplyConnection, valkey.UnixDomainSocketConnection):  # type: ignore[misc]
    """The same over a Unix socket."""


class ReplyPrimaryConnection(ReplyConnection, SentinelManagedConnection):  # type: ignore[misc]
    """The same to the primary that sentinels name."""

    def read_reply(self, into: Sequence[memoryview] | None = None) -> Any:
        try:
            return super().read_reply(into)
        except ReadOnlyError as e:
            self.disconnect()  # the next connection asks the sentinels again
            raise LostError("The previous primary is now a replica") from e


class ReplyTlsPrimaryConnection(ReplyPrimaryConnection, SentinelManagedSSLConnection):  # type: ignore[misc]
    """The same with TLS."""
