"""Reads replies from the socket straight into the caller's memory.

valkey-py's own parser collects a reply in chunks and copies it twice. This one gets the destination from the
thread that waits for the reply, whatever the client does in between (a cluster's redirections, a retry).

A reply that is longer than expected is refused before it is read: the connection is closed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from valkey._parsers import _RESP2Parser
from valkey.exceptions import ConnectionError as LostError, TimeoutError as LateError, ValkeyError

LANDED: Final = object()
"""Stands for a reply in the memory of :func:`landing`."""
_CRLF: Final = 2
_MAX_BULK: Final = 4 << 20
"""Limit in bytes of a value that is not landed. The longest is a piece of a page's header."""
_MAX_ITEMS: Final = 1 << 16
_MAX_LINE: Final = 1 << 16
_here = threading.local()


class LongReplyError(ValkeyError):  # type: ignore[misc]
    """The server has begun a reply that is longer than allowed. The reply was not read."""

    def __init__(self, length: int) -> None:
        super().__init__(f"a reply of {length} bytes or items is longer than allowed")
        self.length = length


@contextlib.contextmanager
def landing(nbytes: int, views: Sequence[memoryview]) -> Iterator[None]:
    """In the block, a bulk reply of exactly ``nbytes`` bytes to this thread is written into ``views``, and
    returned as :data:`LANDED`. The views have ``nbytes`` together. A shorter reply is returned as usual.

    Raises:
        LongReplyError: from the call in the block: the reply is longer.
    """
    if nbytes != sum(map(len, views)):
        raise ValueError(f"memory of {sum(map(len, views))} bytes for a reply of {nbytes}")
    _here.place = nbytes, views
    try:
        yield
    finally:
        _here.place = None


class LandingParser(_RESP2Parser):  # type: ignore[misc]
    """valkey-py's parser of RESP2, with :func:`landing`."""

    def _read_response(self, disable_decoding: bool = False) -> Any:
        place = getattr(_here, "place", None)
        begin = self._buffer.get_pos()
        line = self._line()
        kind, number = line[:1], line[1:]
        if place is not None and line == b"$%d" % place[0]:
            for view in place[1]:
                self._fill(view)
            self._buffer.read(_CRLF - 2)  # also reads the end of the line
            return LANDED
        if kind == b"$" and int(number) > (_MAX_BULK if place is None else place[0]):
            raise LongReplyError(int(number))
        if kind == b"*" and int(number) > _MAX_ITEMS:
            raise LongReplyError(int(number))
        self._buffer.rewind(begin)
        if kind == b"*":
            _here.place = None  # not a value, but a reply that the client needs
        try:
            return super()._read_response(disable_decoding=disable_decoding)
        finally:
            _here.place = place

    def _line(self) -> bytes:
        """The next line, without its end."""
        line: bytes = self._buffer._buffer.readline()
        while not line.endswith(b"\r\n"):
            if len(line) > _MAX_LINE:
                raise LongReplyError(len(line))
            self._buffer._read_from_socket()
            line += self._buffer._buffer.readline()
        return line[:-2]

    def _fill(self, view: memoryview) -> None:
        """Read the next bytes of the reply: first buffered ones, then from the socket."""
        had = self._buffer._buffer.readinto(view)
        sock = self._buffer._sock
        while had < len(view):
            try:
                count = sock.recv_into(view[had:])
            except TimeoutError as e:
                raise LateError("Timeout reading from socket") from e
            if not count:
                raise LostError("Connection closed by server.")
            had += count
