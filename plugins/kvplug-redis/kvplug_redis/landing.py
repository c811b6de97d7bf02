"""Replies that are read from the socket straight into memory of the caller.

valkey-py's own parser collects a reply in chunks and copies it twice. This one has the place for it from the
thread that waits for the reply, whatever the client does in between (a cluster's redirections, a retry)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

from valkey._parsers import _RESP2Parser
from valkey.exceptions import ConnectionError as LostError, TimeoutError as LateError

LANDED: Final = object()
"""A reply that lies in the memory of :func:`landing`."""
_CRLF: Final = 2
_here = threading.local()


@contextlib.contextmanager
def landing(nbytes: int, views: Sequence[memoryview]) -> Iterator[None]:
    """In the block, a bulk reply to this thread of exactly ``nbytes`` bytes is written into ``views``, which
    have as many together, and is :data:`LANDED`. Any other reply is what it always is."""
    _here.place = nbytes, views
    try:
        yield
    finally:
        _here.place = None


class LandingParser(_RESP2Parser):  # type: ignore[misc]
    """valkey-py's parser of RESP2, with :func:`landing`."""

    def _read_response(self, disable_decoding: bool = False) -> Any:
        place = getattr(_here, "place", None)
        if place is None:
            return super()._read_response(disable_decoding=disable_decoding)
        nbytes, views = place
        begin = self._buffer.get_pos()
        if self._buffer.readline() != b"$%d" % nbytes:
            self._buffer.rewind(begin)
            return super()._read_response(disable_decoding=disable_decoding)
        for view in views:
            self._fill(view)
        self._buffer.read(_CRLF - 2)  # reads the end of the line, too
        return LANDED

    def _fill(self, view: memoryview) -> None:
        """The next bytes of the reply: those that are here already, then from the socket."""
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
