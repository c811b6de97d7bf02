"""The listening end: each connection becomes a pipe."""

from __future__ import annotations

from kvplug.transport import Connection, Deadline, Listener, Pipe, PipeAcceptor, local_domain
from kvplug_pynccl.pipe import joining
from kvplug_pynccl.pipe.contact import Contact
from kvplug_pynccl.pipe.pipe import Tuning

_JOIN_TIMEOUT_S = 60.0
"""How long a peer may take to be the other end of a pipe, once it has proved itself. NCCL starts slowly."""


class PyncclListener(PipeAcceptor):
    """Owns its listener."""

    def __init__(self, listener: Listener, tuning: Tuning) -> None:
        self._tuning = tuning
        contact = str(Contact(local_domain(), listener.contact))
        super().__init__([listener], transport="pynccl", contact=contact, timeout_s=tuning.timeout_s)

    def _join(self, connection: Connection) -> Pipe:
        return joining.accept(connection, self._tuning, Deadline.after(_JOIN_TIMEOUT_S))
