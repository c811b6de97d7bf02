"""Remote readers of queues "shm" for tests: a relay that can be cut, and ends that break the protocol."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any, Final

import attrs

import shm_queue_ends as ends
from kvplug.transport import Connection, Deadline, QueueEndpoint
from kvplug_shm.joining import JoiningPeer
from kvplug_shm.queue import join
from kvplug_shm.queue.ring_buffer import Sizes
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call

NETWORK: Final[dict[str, Any]] = {"local_reader_ranks": ()}
"""No reader shares the writer's memory."""


def with_contact(handle: QueueEndpoint.Handle, contact: str, **changes: Any) -> QueueEndpoint.Handle:
    """The same handle with another address of the writer."""
    return attrs.evolve(handle, data={**handle.data, "remote_contact": contact, **changes})


def address_of(handle: QueueEndpoint.Handle) -> tuple[str, int]:
    """Where the writer listens."""
    host, _, port = str(handle.data["remote_contact"]).rpartition(":")
    return host.strip("[]"), int(port)


class Wire:
    """Carries bytes between a reader and the writer, until it is cut."""

    def __init__(self, handle: QueueEndpoint.Handle) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.handle = with_contact(handle, f"127.0.0.1:{self._listening.getsockname()[1]}")
        self._there = address_of(handle)
        self._ends: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        one, _ = self._listening.accept()
        other = socket.create_connection(self._there)
        self._ends += [one, other]
        threading.Thread(target=self._carry, args=(one, other), daemon=True).start()
        self._carry(other, one)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def close(self) -> None:
        self._listening.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


def insider(handle: QueueEndpoint.Handle, rank: int = 0) -> Connection:
    """The connection of a reader that has joined, whose bytes the test sends."""
    with ends.joining(handle, "remote_contact", ends.SECRET) as (peer, queue):
        join.ask(peer, queue, rank, shares_memory=False)
        join.confirm(peer)
        return peer.connection


class LyingWriter:
    """A writer that has the secret, and sends any bytes that the test chooses."""

    def __init__(self) -> None:
        self._listener = accepting("127.0.0.1:0", ends.SECRET, join.PURPOSE)
        self.handle = QueueEndpoint.Handle(
            transport="shm",
            reader_ranks=(0,),
            local_reader_ranks=(),
            data={
                "queue": "q",
                "domain": "another host",
                "contact": "",
                "remote_contact": self._listener.contact,
            },
        )
        self._connection: Connection | None = None

    def reader(self, attach: Callable[[], Any], first: bytes) -> Any:
        """A reader that has joined, to which ``first`` was sent."""
        attaches = Call(attach)
        self._connection = connection = self._listener.accept(ends.PATIENCE_S)
        deadline = Deadline.after(ends.PATIENCE_S)
        with contextlib.closing(JoiningPeer(connection, ends.PATIENCE_S, deadline)) as peer:
            join.asked(peer)
            join.admit(peer, 0, Sizes(1, 4, 1 << 16, 1 << 20))
        self.say(first)
        return attaches.result()

    def wait_for_hang_up(self) -> None:
        """Wait until the reader has ended the connection."""
        assert self._connection is not None
        with contextlib.suppress(OSError):
            while self._connection.sock.recv(4096):
                pass

    def say(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.sock.sendall(data)

    def close(self) -> None:
        self._listener.close()
        if self._connection is not None:
            self._connection.close()
