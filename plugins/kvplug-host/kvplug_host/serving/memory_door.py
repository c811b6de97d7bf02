"""Hands the memory of a store out to processes of the same user on the same host, and maps what they lend.

A process connects to a Unix socket, which carries descriptors. It shows the ticket that it got over its link,
with a descriptor of memory for the pages that it puts.
"""

from __future__ import annotations

import os
import secrets
import threading
from typing import Final

import attrs

from kvplug.transport import (
    Acceptor,
    Connection,
    Credentials,
    Deadline,
    Listener,
    Memfd,
    WireError,
    close_after_fork,
)
from kvplug_host.arena.addresses import AddressSpace
from kvplug_host.arena.segments import Segments
from kvplug_host.protocol import ANSWER, MEMORY_PURPOSE, REGION_BYTES, REGIONS, TICKET_BYTES, WELCOME

_HAND_OVER_S: Final = 5.0


@attrs.frozen
class _Admitted:
    """A process that has shown a valid ticket."""

    connection: Connection
    lent: memoryview
    """Memory of the other process, to be read only."""


class MemoryDoor:
    """Listens for readers. Each ticket admits one connection."""

    def __init__(self, segments: Segments, address: str, credentials: Credentials) -> None:
        """
        Raises:
            TransportError: memory cannot be handed out here.
            KvplugError: the operator named an address that is in use, or not one of this host's.
        """
        self._segments = segments
        self._lock = threading.Lock()
        self._admitted: dict[bytes, _Admitted | None] = {}
        """By ticket; ``None``: it was not shown yet."""
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
            self._admitted[made] = None
        return made

    def _admit(self, connection: Connection) -> None:
        if not connection.is_same_user:
            raise WireError("it belongs to another user, and memory is handed to the same user only")
        ticket, fds = connection.receive_fds(TICKET_BYTES, 1, Deadline.after(_HAND_OVER_S))
        try:
            with self._lock:
                if self._admitted.get(ticket, connection) is not None:
                    raise WireError("its ticket is not valid")
                self._admitted[ticket] = _Admitted(connection, _mapped(fds))
        finally:
            for fd in fds:
                os.close(fd)
        connection.send(WELCOME, Deadline.after(_HAND_OVER_S))

    def lent(self, ticket: bytes) -> memoryview:
        """The memory that the process with this ticket lends. Raises WireError: it did not come."""
        return self._with(ticket).lent

    def _with(self, ticket: bytes) -> _Admitted:
        with self._lock:
            admitted = self._admitted.get(ticket)
        if admitted is None:
            raise WireError("the link uses shared memory, and no connection was made for it")
        return admitted

    def hand_over(self, ticket: bytes, number: int) -> None:
        """Send a segment's descriptor to the reader with this ticket, or say that it cannot be had.

        Raises:
            WireError: no reader came with this ticket.
            KvplugError: the reader is gone, or does not take it.
        """
        connection = self._with(ticket).connection
        deadline = Deadline.after(_HAND_OVER_S)
        try:
            fd = self._segments.descriptor(number)
        except (OSError, IndexError):
            connection.send(ANSWER.pack(number, 0), deadline)
            return
        try:
            connection.send(ANSWER.pack(number, self._segments.nbytes), deadline, (fd,))
        finally:
            os.close(fd)

    def forget(self, ticket: bytes) -> None:
        """The reader is gone."""
        with self._lock:
            admitted = self._admitted.pop(ticket, None)
        if admitted is not None:
            admitted.connection.close()

    def close(self) -> None:
        """Stop listening, and close every connection."""
        self._acceptor.close()
        with self._lock:
            connections = [each.connection for each in self._admitted.values() if each is not None]
            self._admitted.clear()
        for connection in connections:
            connection.close()

    def _after_fork_in_child(self) -> None:
        """The listener, the acceptor and the connections close themselves."""


def _mapped(fds: list[int]) -> memoryview:
    """The memory that a process lends. Raises WireError: it is not such memory."""
    if len(fds) != 1:
        raise WireError("it lends no memory for the pages that it puts")
    nbytes = REGIONS * REGION_BYTES
    Memfd.check(fds[0], nbytes, writable=False)
    space = AddressSpace(nbytes)
    space.place(fds[0], 0, nbytes, writable=False)
    return space.view
