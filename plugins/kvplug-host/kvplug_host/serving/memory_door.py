"""Hands the memory of a store out to processes of the same user on the same host, and maps what they lend.

A process connects to a Unix socket, which carries descriptors. It shows the ticket that it got over its link,
with a descriptor of memory for the pages that it puts, and gets a descriptor of the store's memory.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import Final

from kvplug.transport import (
    Acceptor,
    Connection,
    Credentials,
    Deadline,
    Listener,
    Memfd,
    Segment,
    WireError,
    close_after_fork,
)
from kvplug_host.arena.segments import Segments
from kvplug_host.protocol import MEMORY_PURPOSE, REGION_BYTES, REGIONS, TICKET_BYTES, WELCOME

_HAND_OVER_S: Final = 5.0


class MemoryDoor:
    """Listens for readers. Each ticket is valid once."""

    def __init__(self, segments: Segments, address: str, credentials: Credentials) -> None:
        """
        Raises:
            TransportError: memory cannot be handed out here.
            KvplugError: the operator named an address that is in use, or not one of this host's.
        """
        self._segments = segments
        self._lock = threading.Lock()
        self._lent: dict[bytes, memoryview | None] = {}
        """The memory that each process lends, by its ticket; ``None``: the ticket was not shown yet."""
        close_after_fork(self)
        listener = Listener.open(address, credentials, MEMORY_PURPOSE)
        self.contact = listener.contact
        self._acceptor: Acceptor[None] = Acceptor(
            [listener],
            self._admit,
            what="a connection for shared memory",
            name="kvplug-host-memory",
        )

    def ticket(self) -> bytes:
        """A new ticket, valid until :meth:`forget`."""
        made = secrets.token_bytes(TICKET_BYTES)
        with self._lock:
            self._lent[made] = None
        return made

    def _admit(self, connection: Connection) -> None:
        if not connection.is_same_user:
            raise WireError("it belongs to another user, and memory is handed to the same user only")
        ticket, fds = connection.receive_fds(TICKET_BYTES, 1, Deadline.after(_HAND_OVER_S))
        try:
            with self._lock:
                if self._lent.get(ticket, b"") is not None:
                    raise WireError("its ticket is not valid")
                self._lent[ticket] = _mapped(fds)
            fds.append(self._segments.descriptor())
            connection.send(WELCOME, Deadline.after(_HAND_OVER_S), fds[1:])
        finally:
            for fd in fds:
                os.close(fd)
        connection.close()

    def lent(self, ticket: bytes) -> memoryview:
        """The memory that the process with this ticket lends. Raises WireError: it did not come."""
        with self._lock:
            lent = self._lent.get(ticket)
        if lent is None:
            raise WireError("it lends memory, and made no connection for it")
        return lent

    def forget(self, ticket: bytes) -> None:
        """The process with this ticket is gone."""
        with self._lock:
            self._lent.pop(ticket, None)

    def close(self) -> None:
        """Stop listening."""
        self._acceptor.close()
        with self._lock:
            self._lent.clear()

    def _after_fork_in_child(self) -> None:
        """The listener and the acceptor close themselves."""


def _mapped(fds: list[int]) -> memoryview:
    """The memory that a process lends, to be read only. Raises WireError: it is not such memory."""
    if len(fds) != 1:
        raise WireError("it lends no memory for the pages that it puts")
    nbytes = REGIONS * REGION_BYTES
    Memfd.check(fds[0], nbytes, writable=False)
    return Segment.map(fds[0], nbytes, writable=False).view
