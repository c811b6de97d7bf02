"""vLLM's message queue: as a pipe of one reader each way, and as what it is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from kvplug_bench.links import InPlaceBroadcast, Link, Rendezvous


def _queue(**more: Any) -> Any:
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    return MessageQueue(**more)


def _plain(queue: Any) -> dict[str, Any]:
    handle = queue.export_handle()
    return {field.name: getattr(handle, field.name) for field in dataclasses.fields(handle)}


def _reader(plain: dict[str, Any], rank: int) -> Any:
    from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

    return MessageQueue.create_from_handle(Handle(**plain), rank)


class VllmPipe(Link):
    """Two queues, of one reader each."""

    def __init__(self, rendezvous: Rendezvous, max_chunk_bytes: int, max_chunks: int) -> None:
        sizes = {"max_chunk_bytes": max_chunk_bytes, "max_chunks": max_chunks}
        self._out = _queue(n_reader=1, n_local_reader=1, **sizes)
        rendezvous.send(_plain(self._out))
        self._in = _reader(rendezvous.recv(), 0)
        first, second = (self._out, self._in) if rendezvous.is_first else (self._in, self._out)
        first.wait_until_ready()
        second.wait_until_ready()

    def send(self, tensor: torch.Tensor) -> None:
        self._out.enqueue(tensor)

    def receive(self, out: torch.Tensor) -> None:
        out.copy_(self._in.dequeue())

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._in.dequeue()
        return got

    def close(self) -> None:
        del self._out, self._in  # their shared memory is unlinked with them


class VllmBroadcast(InPlaceBroadcast):
    """One writer, many readers. With its arena, readers read large tensors in place."""

    def __init__(self, rendezvous: Rendezvous, max_chunk_bytes: int, max_chunks: int, arena: bool) -> None:
        readers = rendezvous.size - 1
        if rendezvous.is_first:
            self._queue = _queue(
                n_reader=readers,
                n_local_reader=readers,
                max_chunk_bytes=max_chunk_bytes,
                max_chunks=max_chunks,
                **({"enable_shm_tensor_arena": True} if arena else {}),
            )
            rendezvous.send(_plain(self._queue))
        else:
            self._queue = _reader(rendezvous.recv(), rendezvous.rank - 1)
        self._queue.wait_until_ready()

    def send(self, tensor: torch.Tensor) -> None:
        self._queue.enqueue(tensor)

    def receive(self, like: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._queue.dequeue()
        return got

    send_in_place = send

    @contextlib.contextmanager
    def view_in_place(self, like: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self._queue.dequeue()

    def send_value(self, value: bytes) -> None:
        self._queue.enqueue(value)

    def receive_value(self, nbytes: int) -> None:
        self._queue.dequeue()

    def close(self) -> None:
        del self._queue  # its shared memory is unlinked with it
