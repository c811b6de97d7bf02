"""The listening end: each connection becomes a pipe."""

from __future__ import annotations

from kvplug.transport import Connection, Deadline, Listener, Pipe, PipeAcceptor, local_domain
from kvplug_shm.pipe import joining
from kvplug_shm.pipe.contact import Contact
from kvplug_shm.pipe.pipe import Tuning

_JOIN_TIMEOUT_S = 10.0
"""How long a peer may take to become the other end of a pipe, once it has proved itself."""


class ShmListener(PipeAcceptor):
    """Owns its listener."""

    def __init__(self, listener: Listener, tuning: Tuning) -> None:
        self._tuning = tuning
        contact = str(Contact(local_domain(), listener.contact))
        super().__init__([listener], transport="shm", contact=contact, timeout_s=tuning.timeout_s)

    def _join(self, connection: Connection) -> Pipe:
        return joining.accept(connection, self._tuning, Deadline.after(_JOIN_TIMEOUT_S))
