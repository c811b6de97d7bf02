"""The queue "relay": a Unix socket to each reader, and memory of its own for each message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvplug import ConfigError, KvplugError, PeerGoneError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    NamedExhaustion,
    QueueEndpoint,
    QueueHandle,
    Timeout,
    WireError,
    dial,
    peer_text,
    recv_fds,
)
from kvplug_relay.message import HEADER, JOIN, Kind
from kvplug_relay.reader import Reader
from kvplug_relay.writer import PURPOSE, Writer

NAME: Final = "relay"
MOST_CHUNKS: Final = 128
"""The kernel takes at least so many headers without waiting for their reader."""


class RelayEndpoint(QueueEndpoint):
    """The factory of the spec: kvplug calls it with a context, and its methods make the ends."""

    @NamedExhaustion("making a message queue")
    def create(self, reader_ranks: Sequence[int] | None = None) -> Writer:
        ranks = self._reader_ranks(reader_ranks)
        local = self._local_reader_ranks(ranks)
        if local != ranks:
            far = sorted(set(ranks) - set(local))
            raise ConfigError(f"the queue {NAME!r} reaches readers of its own host, and {far} are on others")
        if self.context.max_chunks > MOST_CHUNKS:
            given = self.context.max_chunks
            raise ConfigError(f"max_chunks: the queue {NAME!r} has {MOST_CHUNKS} at most, not {given}")
        return Writer(self.context, NAME, ranks)

    @NamedExhaustion("attaching to a message queue")
    def create_from_handle(
        self, handle: QueueHandle, rank: int, timeout: Timeout = DEFAULT_TIMEOUT
    ) -> Reader:
        deadline = Deadline.after(timeout, self.context.timeout_s)
        handle.check(NAME, rank)
        contact = handle.data.get("contact")
        if type(contact) is not str:
            raise WireError(f"this handle of a queue {NAME!r} has no contact")
        connection = dial(contact, self.context.credentials, PURPOSE, deadline.remaining())
        try:
            connection.sock.settimeout(None)
            connection.sock.sendall(JOIN.pack(rank))
            data, _ = recv_fds(connection, HEADER.size, 0, deadline)
            kind, nbytes = HEADER.unpack(data)
            if kind == Kind.REFUSED and nbytes <= 1000:
                why, _ = recv_fds(connection, nbytes, 0, deadline)
                raise ConfigError(peer_text(why.decode(errors="replace")))
            if kind != Kind.JOINED:
                raise WireError(f"{connection.describe} answered with something else")
            return Reader(self.context, handle, rank, connection)
        except BaseException as e:
            connection.close()
            if isinstance(e, OSError) and not isinstance(e, KvplugError):
                raise PeerGoneError(f"{connection.describe} hung up: {e}") from e
            raise
