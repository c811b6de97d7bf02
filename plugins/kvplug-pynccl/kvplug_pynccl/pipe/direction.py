"""One direction of a pipe, and the calls of NCCL that move a message in it."""

from __future__ import annotations

from collections.abc import Callable

from kvplug_pynccl.device import Event, Stream
from kvplug_pynccl.monitored import MonitoredCommunicator
from kvplug_pynccl.nccl.abi import DataType
from kvplug_pynccl.nccl.library import Library
from kvplug_pynccl.operation import Operation
from kvplug_pynccl.pipe.content import Memory


class Direction:
    """A communicator of two ranks, and a stream that never waits for the other direction."""

    def __init__(self, nccl: Library, comm: MonitoredCommunicator, stream: Stream, peer: int) -> None:
        """``peer``: the rank of the other end."""
        self.comm = comm
        self.stream = stream
        self._nccl = nccl
        self._peer = peer

    def send(self, memory: Memory, ready: Event | None) -> Operation:
        """A ``ncclSend`` for each piece, of bytes: nothing is computed, and NCCL lacks some dtypes."""
        return self._operation(self._nccl.send, memory, ready)

    def receive(self, memory: Memory, ready: Event | None) -> Operation:
        """A ``ncclRecv`` for each piece, of bytes."""
        return self._operation(self._nccl.recv, memory, ready)

    def _operation(self, function: Callable[..., object], memory: Memory, ready: Event | None) -> Operation:
        def call(address: int) -> Callable[[int], object]:
            return lambda comm: function(
                address, memory.piece_bytes, DataType.UINT8, self._peer, comm, self.stream.handle
            )

        calls = [call(address) for address in memory.addresses]
        return Operation(self.comm, self.stream, calls, memory.tensors, ready)
