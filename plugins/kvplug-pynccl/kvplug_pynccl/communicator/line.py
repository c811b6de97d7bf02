"""A connection between two ranks as a pipe of bytes: for what the mesh says beside NCCL, and no data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvplug import UnsupportedError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Channel,
    CommunicatorContext,
    Connection,
    Deadline,
    Listener,
    Pipe,
    PipeEndpoint,
    PipeListener,
    Timeout,
    Transfer,
    WireError,
    dial,
    local_domain,
)
from kvplug_pynccl.interface import address_for
from kvplug_pynccl.pipe.contact import Contact

if TYPE_CHECKING:
    from torch import Tensor

PURPOSE: Final = "communicator-pynccl"


class Line(Pipe):
    """Carries bytes, each message a flat CPU tensor of uint8, and ``None``. Raises as its channel does."""

    def __init__(self, connection: Connection) -> None:
        """Owns the connection from here on."""
        self._peer = connection.describe
        self._channel = Channel(connection, timeout_s=None)

    def __repr__(self) -> str:
        return f"<Line to {self._peer}{', closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def peer(self) -> str:
        return self._peer

    def send_tensor(self, tensor: Tensor | None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Transfer:
        """Raises UnsupportedError too: it is not flat, or no bytes."""
        import torch

        if tensor is not None and (tensor.dtype != torch.uint8 or tensor.dim() != 1):
            raise UnsupportedError(f"bytes in a flat tensor are needed, not {tensor.dtype}")
        data = None if tensor is None else tensor.numpy().tobytes()
        self._channel.send(data, timeout)
        transfer = Transfer(0 if data is None else len(data))
        transfer.finish()
        return transfer

    def recv_tensor(self, out: Tensor | None = None, *, timeout: Timeout = DEFAULT_TIMEOUT) -> Tensor | None:
        """Raises UnsupportedError too: ``out`` was given."""
        import torch

        if out is not None:
            raise UnsupportedError("nothing is received into memory here")
        data = self._channel.recv(timeout)
        if data is None:
            return None
        if not isinstance(data, bytes) or not data:
            raise WireError(f"bytes were expected, and {data!r:.60} came")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def close(self, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        self._channel.close()

    def abort(self) -> None:
        self._channel.close()


class LineListener(PipeListener):
    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._contact = Contact(local_domain(), listener.contact)

    @property
    def contact(self) -> str:
        return str(self._contact)

    def accept(self, timeout: Timeout = DEFAULT_TIMEOUT) -> Line:
        return Line(self._listener.accept(None if timeout is DEFAULT_TIMEOUT else timeout))

    def close(self) -> None:
        self._listener.close()


class LineEndpoint(PipeEndpoint):
    """Listens on an abstract Unix socket, or on TCP where other hosts are to come."""

    def __init__(self, context: CommunicatorContext) -> None:
        self._context = context

    def listen(self) -> LineListener:
        return LineListener(
            Listener.open(address_for(self._context.host), self._context.credentials, PURPOSE)
        )

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Line:
        deadline = Deadline.after(timeout, self._context.timeout_s)
        where = Contact.parse(contact).reachable()
        return Line(dial(where, self._context.credentials, PURPOSE, deadline.remaining()))
