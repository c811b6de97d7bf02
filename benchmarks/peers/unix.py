"""Unix sockets: one, or two that carry half of a large tensor each."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kvplug_bench.links import Link, Rendezvous

SPLIT_BYTES = 1 << 20


class UnixSockets(Link):
    """``sendall`` from the tensor's memory, ``recv_into`` the receiver's."""

    def __init__(self, rendezvous: Rendezvous, connections: int) -> None:
        path = f"{rendezvous.folder}/socket"
        self._sockets = []
        if rendezvous.is_first:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path)
                listener.listen()
                rendezvous.send(path)
                self._sockets = [listener.accept()[0] for _ in range(connections)]
        else:
            path = rendezvous.recv()
            for _ in range(connections):
                self._sockets.append(socket.socket(socket.AF_UNIX))
                self._sockets[-1].connect(path)
        self._others = ThreadPoolExecutor(max(1, connections - 1))

    def send(self, tensor: torch.Tensor) -> None:
        self._each(_send, tensor)

    def receive(self, out: torch.Tensor) -> None:
        self._each(_receive, out)

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(like)
        self._each(_receive, out)
        return out

    def _each(self, move: Any, tensor: torch.Tensor) -> None:
        memory = memoryview(tensor.numpy()).cast("B")
        if len(self._sockets) == 1 or len(memory) < SPLIT_BYTES:
            move(self._sockets[0], memory)
            return
        share = len(memory) // len(self._sockets)
        parts = [memory[i * share :][:share] for i in range(len(self._sockets) - 1)]
        rest = memory[len(parts) * share :]
        moving = [self._others.submit(move, each, part) for each, part in zip(self._sockets[1:], parts)]
        move(self._sockets[0], rest)
        for each in moving:
            each.result()

    def close(self) -> None:
        self._others.shutdown()
        for each in self._sockets:
            each.close()


def _send(sock: socket.socket, memory: memoryview) -> None:
    sock.sendall(memory)


def _receive(sock: socket.socket, memory: memoryview) -> None:
    while memory:
        got = sock.recv_into(memory)
        if not got:
            raise EOFError("the other end is gone")
        memory = memory[got:]
