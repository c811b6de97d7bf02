"""The queue "relay": one Unix socket for each reader, and one piece of memory for each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplug import ConfigError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Connection,
    Deadline,
    NamedExhaustion,
    QueueEndpoint,
    Timeout,
    WireError,
)
from kvplug_relay.reader import Reader
from kvplug_relay.writer import PURPOSE, Writer

NAME: Final = "relay"
MOST_CHUNKS: Final = 128
"""The kernel buffers at least this many headers for a reader that does not read."""


class RelayEndpoint(QueueEndpoint):
    """The factory of the spec: kvplug calls it with a context, and its methods make the ends."""

    @NamedExhaustion("making a message queue")
    def create(self, reader_ranks: Sequence[int] | None = None) -> Writer:
        ranks = self._reader_ranks(reader_ranks)
        local = self._local_reader_ranks(ranks)
        if local != ranks:
            far = sorted(set(ranks) - set(local))
            raise ConfigError(f"the queue {NAME!r} reaches only readers of its host, but {far} are on others")
        if self.context.max_chunks > MOST_CHUNKS:
            given = self.context.max_chunks
            raise ConfigError(f"max_chunks: {given} was given; the queue {NAME!r} has at most {MOST_CHUNKS}")
        return Writer(self.context, NAME, ranks)

    @NamedExhaustion("attaching to a message queue")
    def create_from_handle(
        self, handle: QueueEndpoint.Handle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Reader:
        deadline = Deadline.after(timeout, self.context.timeout_s)
        handle.check(NAME, rank)
        contact = handle.data.get("contact")
        if type(contact) is not str:
            raise WireError(f"this handle of a queue {NAME!r} has no contact")
        connection = Connection.dial(contact, self.context.credentials, PURPOSE, deadline.remaining())
        try:
            reader = Reader(self.context, handle, rank, connection)
        except BaseException:
            connection.close()
            raise
        try:
            reader.join(deadline)
        except BaseException:
            reader.abort()
            raise
        return reader
