"""Ends of a pipe "cpu" for tests, one of them by hand."""

from __future__ import annotations

import socket
from typing import Any

from kvplug.net.trust.credentials import Secret
from kvplug.net.wire.messages import tensor_prefix
from kvplug.net.wire.tensors import memory_of
from kvplug.transport import Connection, Credentials, Deadline, PipeEndpoint
from kvplug_cpu.endpoint import CONTROL, CpuContact, CpuEndpoint, Join
from kvplug_cpu.inbox import SPLIT, parts
from kvplug_cpu.options import CpuOptions
from kvplug_testing.resources import Resources

OF_CONTEXT = ("credentials", "device", "heartbeat_timeout_s", "host")
MIB = 1 << 20
SECRET = Credentials(Secret("the secret of both ends"))


def make_endpoint(socket: str = "unix", **given: Any) -> CpuEndpoint:
    """``given``: of the context, or options."""
    context = {key: given.pop(key) for key in OF_CONTEXT if key in given}
    usual = {"credentials": SECRET, "host": "127.0.0.1", "timeout_s": 20.0, "heartbeat_timeout_s": 10.0}
    return CpuEndpoint(
        PipeEndpoint.Context(options=CpuOptions(socket=socket, **given), **{**usual, **context})
    )


def sockets() -> set[str]:
    """Sockets that this process has open."""
    return {each for each in Resources.of().descriptors if "socket:" in each}


def guest(contact: str) -> Connection:
    """A connection to a listener that has proved itself, and does not join."""
    return Connection.dial(CpuContact.parse(contact).addresses[0], SECRET, CpuEndpoint.PURPOSE, 5)


class PeerByHand:
    """The connecting end of a pipe: two data connections, on which it sends what it likes."""

    def __init__(self, contact: str) -> None:
        self.control, deadline = guest(contact), Deadline.after(10)
        Join(index=CONTROL, connections=2).send(self.control)
        answer = Join.receive(self.control, deadline)
        self.data: list[socket.socket] = []
        for index in range(1, answer.connections + 1):
            connection = guest(contact)
            Join(index=index, connections=answer.connections, session=answer.session).send(connection)
            self.data.append(connection.sock)
            connection.sock.settimeout(10)
        Join.receive(self.control, deadline)

    def close(self) -> None:
        for each in (*self.data, self.control):
            each.close()


def streams_of(tensor: Any, split_bytes: int) -> list[bytes]:
    """What a pipe sends on each of two connections for a message."""
    memory = memory_of(tensor)
    split = len(memory) >= split_bytes
    bounds = parts(len(memory), 2) if split else [(0, len(memory))]
    prefix = tensor_prefix(tensor.dtype, tensor.shape, len(memory), SPLIT if split else 0)
    first, *others = (bytes(memory[a:b]) for a, b in bounds)
    return [prefix + first, *others]
