"""The network half of queues "shm" for tests: what carries its bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any, Final

import attrs

from kvplug.transport import QueueHandle

NETWORK: Final[dict[str, Any]] = {"local_reader_ranks": ()}
"""All readers are on the network."""


def with_network(handle: QueueHandle, **changes: Any) -> QueueHandle:
    """A handle that says something else of the network."""
    return attrs.evolve(handle, data={**handle.data, "network": {**handle.data["network"], **changes}})


def address_of(handle: QueueHandle) -> tuple[str, int]:
    """Where the writer listens."""
    host, _, port = str(handle.data["network"]["contact"]).rpartition(":")
    return host.strip("[]"), int(port)


class Wire:
    """Carries bytes between a reader and the writer, until it is cut."""

    def __init__(self, handle: QueueHandle) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        here = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.handle = with_network(handle, contact=here)
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
