"""ZeroMQ over Unix sockets, with ``copy=False``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvplug_bench.links import RENDEZVOUS_TIMEOUT_S, Broadcast, Link, Rendezvous, UnavailableError

if TYPE_CHECKING:
    from torch import Tensor


def _tensor(frame: Any) -> Tensor:
    """A view of a frame's memory, which belongs to the receiver."""
    import torch

    return torch.frombuffer(frame.buffer, dtype=torch.float16)


class ZeroMQ(Link):
    """A pair of sockets. ``receive`` copies once, from the frame."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        address = f"ipc://{rendezvous.folder}/zmq"
        self._socket.bind(address) if rendezvous.is_first else self._socket.connect(address)

    def send(self, tensor: Tensor) -> None:
        self._socket.send(tensor.numpy(), copy=False)

    def receive(self, out: Tensor) -> None:
        out.copy_(_tensor(self._socket.recv(copy=False)))

    def receive_new(self, like: Tensor) -> Tensor:
        return _tensor(self._socket.recv(copy=False))

    def close(self) -> None:
        self._context.destroy(linger=1000)


class ZeroMQBroadcast(Broadcast):
    """Publish and subscribe with unlimited queues, so that no message is dropped."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        import zmq

        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.XPUB if rendezvous.is_first else zmq.SUB)
        self._socket.set_hwm(0)
        address = f"ipc://{rendezvous.folder}/zmq"
        if not rendezvous.is_first:
            self._socket.connect(address)
            self._socket.subscribe(b"")
            return
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(address)
        for _ in range(rendezvous.size - 1):  # each reader subscribes once
            if not self._socket.poll(RENDEZVOUS_TIMEOUT_S * 1000):
                raise UnavailableError("a reader did not subscribe")
            self._socket.recv()

    def send(self, tensor: Tensor) -> None:
        self._socket.send(tensor.numpy(), copy=False)

    def receive(self, like: Tensor) -> Tensor:
        return _tensor(self._socket.recv(copy=False))

    def send_value(self, value: bytes) -> None:
        self._socket.send(value)

    def receive_value(self, nbytes: int) -> None:
        self._socket.recv()

    def close(self) -> None:
        self._context.destroy(linger=1000)
