"""The listening end: each connection becomes a pipe."""

from __future__ import annotations

from kvplug.transport import Connection, Deadline, Listener, Pipe, PipeAcceptor
from kvplug_cuda_ipc.pipe import joining
from kvplug_cuda_ipc.pipe.contact import Contact
from kvplug_cuda_ipc.pipe.pipe import Tuning
from kvplug_cuda_ipc.probe import domain

_JOIN_TIMEOUT_S = 20.0
"""How long a peer may take to become the other end of a pipe. CUDA starts slowly."""


class CudaIpcListener(PipeAcceptor):
    """Owns its listener."""

    def __init__(self, listener: Listener, tuning: Tuning) -> None:
        self._tuning = tuning
        contact = str(Contact(domain(), listener.contact))
        super().__init__([listener], transport="cuda-ipc", contact=contact, timeout_s=tuning.timeout_s)

    def _join(self, connection: Connection) -> Pipe:
        return joining.accept(connection, self._tuning, Deadline.after(_JOIN_TIMEOUT_S))
