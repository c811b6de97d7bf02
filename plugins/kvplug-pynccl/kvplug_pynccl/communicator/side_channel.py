"""A pipe of bytes between two ranks, beside NCCL: for the mesh's messages, not for data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplug import UnsupportedError
from kvplug.transport import (
    Channel,
    Connection,
    Deadline,
    DeviceCommunicator,
    DuplexEndpoint,
    Pipe,
    PipeEndpoint,
    Timeout,
    Transfer,
    WireError,
)
from kvplug_pynccl.interface import address_for
from kvplug_pynccl.pipe.contact import PyncclContact

if TYPE_CHECKING:
    from torch import Tensor


class SideChannel(Pipe):
    """Carries ``None`` and bytes, each message a flat CPU tensor of uint8. Raises as its channel does."""

    def __init__(self, connection: Connection) -> None:
        """Takes ownership of the connection."""
        self._peer = connection.describe
        self._channel = Channel(connection, timeout_s=None)

    def __repr__(self) -> str:
        return f"<SideChannel to {self._peer}{', closed' if self.closed else ''}>"

    @property
    def closed(self) -> bool:
        return self._channel.closed

    @property
    def peer(self) -> str:
        return self._peer

    def _send_tensor(self, tensor: Tensor | None, timeout: Timeout) -> Transfer:
        """Also raises UnsupportedError: the tensor has more than one dimension, or is not uint8."""
        import torch

        if tensor is not None and (tensor.dtype != torch.uint8 or tensor.dim() != 1):
            raise UnsupportedError(
                f"a side channel sends one dimension of uint8, not {tensor.dim()} of {tensor.dtype}"
            )
        data = None if tensor is None else tensor.numpy().tobytes()
        self._channel.send(data, timeout)
        transfer = Transfer(0 if data is None else len(data))
        transfer.finish()
        return transfer

    def _receive_tensor(self, out: Tensor | None, timeout: Timeout) -> Tensor | None:
        """Also raises UnsupportedError: ``out`` was given."""
        import torch

        if out is not None:
            raise UnsupportedError("a side channel does not receive into memory of the caller's (out=)")
        data = self._channel.recv(timeout)
        if data is None:
            return None
        if not isinstance(data, bytes) or not data:
            raise WireError(f"bytes were expected, but {data!r:.60} was received")
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    def _close(self, timeout: Timeout) -> None:
        self._channel.close()

    def _abort(self) -> None:
        self._channel.close()


class SideChannelEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, or on TCP where other hosts are to connect."""

    CONTACT = PyncclContact
    PURPOSE = "communicator-pynccl"

    def __init__(self, context: DeviceCommunicator.Context) -> None:
        super().__init__(
            PipeEndpoint.Context(
                options=None,
                credentials=context.credentials,
                host=context.host,
                timeout_s=context.timeout_s,
            )
        )

    def _addresses(self) -> tuple[str, ...]:
        return (address_for(self._context.host),)

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> SideChannel:
        return SideChannel(connection)
