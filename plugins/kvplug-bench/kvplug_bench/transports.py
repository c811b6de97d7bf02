"""The ends of kvplug transports: any installed pipe or message queue that a configuration names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvplug.assembly.builders import build_queue
from kvplug.assembly.registry import Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.config.config import Config
from kvplug.errors import PluginError
from kvplug.negotiation.select import AUTO
from kvplug.transport.capabilities import Requirements
from kvplug.transport.pipe import PipeEndpoint
from kvplug.transport.queue import MessageQueue, QueueEndpoint
from kvplug.transport.spec import Kind, TransportSpec
from kvplug_bench.device import kind_of
from kvplug_bench.links import RENDEZVOUS_TIMEOUT_S, InPlaceBroadcast, Link, Rendezvous, UnavailableError

if TYPE_CHECKING:
    from torch import Tensor

_ONE_PROCESS = "its two ends can only be connected within one process"


class PipeLink(Link):
    """The pipe that a configuration names, without the wrapper that counts its messages.

    Its calls have no timeout, since the plan may make a receiver idle for long; the measuring process has a
    time limit instead.
    """

    def __init__(self, rendezvous: Rendezvous, path: str | None, overrides: Sequence[str]) -> None:
        config = Config.load(path, overrides=overrides)
        spec, endpoint = _pipe_endpoint(config, rendezvous.device)
        domain = _domain(spec)
        if rendezvous.is_first:
            with contextlib.closing(endpoint.listen()) as listener:
                rendezvous.send([listener.contact, domain])
                self.pipe = listener.accept(RENDEZVOUS_TIMEOUT_S)
        else:
            contact, other_domain = rendezvous.recv()
            if domain != other_domain:
                raise UnavailableError(_ONE_PROCESS)
            self.pipe = endpoint.connect(contact, RENDEZVOUS_TIMEOUT_S)

    def send(self, tensor: Tensor) -> None:
        self.pipe.send_tensor(tensor, timeout=None)

    def receive(self, out: Tensor) -> None:
        self.pipe.recv_tensor(out, timeout=None)

    def receive_new(self, like: Tensor) -> Tensor:
        got = self.pipe.recv_tensor(timeout=None)
        assert got is not None
        return got

    def close(self) -> None:
        self.pipe.close()


class QueueLink(InPlaceBroadcast):
    """The message queue that a configuration names. Its calls have no timeout, as in :class:`PipeLink`."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        path: str | None,
        overrides: Sequence[str],
        max_chunk_bytes: int,
        max_chunks: int,
    ) -> None:
        config = Config.load(path, overrides=overrides)
        endpoint = build_queue(
            config,
            n_reader=rendezvous.size - 1,
            max_chunk_bytes=max_chunk_bytes,
            max_chunks=max_chunks,
        )
        domain = _domain(Registry.from_env().get(Kind.QUEUE, config.queue))
        self._queue: MessageQueue
        if rendezvous.is_first:
            self._queue = endpoint.create()
            rendezvous.send([self._queue.export_handle().as_plain(), domain])
        else:
            plain, other_domain = rendezvous.recv()
            if domain != other_domain:
                raise UnavailableError(_ONE_PROCESS)
            handle = QueueEndpoint.Handle.from_plain(plain)
            self._queue = endpoint.create_from_handle(handle, rendezvous.rank - 1, RENDEZVOUS_TIMEOUT_S)
        self._queue.wait_until_ready(RENDEZVOUS_TIMEOUT_S)

    def send(self, tensor: Tensor) -> None:
        self._queue.enqueue(tensor, None)

    def receive(self, like: Tensor) -> Tensor:
        got: Tensor = self._queue.dequeue(indefinite=True)
        return got

    def send_value(self, value: bytes) -> None:
        self._queue.enqueue(value, None)

    def receive_value(self, nbytes: int) -> None:
        self._queue.dequeue(indefinite=True)

    def send_in_place(self, tensor: Tensor) -> None:
        import torch

        with self._queue.acquire_write(tensor.nbytes, None) as memory:
            torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel()).copy_(tensor)

    @contextlib.contextmanager
    def view_in_place(self, like: Tensor) -> Iterator[Tensor]:
        import torch

        with self._queue.acquire_read(indefinite=True) as memory:
            view = torch.frombuffer(memory, dtype=like.dtype, count=like.numel())
            yield view
            del view  # the memory must have no view left when it is released

    def close(self) -> None:
        self._queue.close()


def _domain(spec: TransportSpec) -> str:
    """The domain that both ends must share; empty if they may be on different hosts."""
    return "" if spec.capabilities.cross_host else spec.run_probe().domain


def _pipe_endpoint(config: Config, device: str) -> tuple[TransportSpec, PipeEndpoint]:
    """The spec of the config's transport, and its endpoint for that device.

    Raises:
        PluginError: the config has "auto" and no transport can be used.
    """
    resolved = ResolvedConfig(config, Registry.from_env())
    resolved.check(keys=("transport",))
    name = resolved.requested_transport
    if name == AUTO:
        required = Requirements(device=kind_of(device))
        able = [
            offer
            for offer in resolved.offers()
            if offer.auto and offer.probe.viable and not offer.capabilities.missing(required)
        ]
        if not able:
            raise PluginError("no pipe is available")
        name = min(able, key=lambda offer: (offer.capabilities.cost.seconds(1 << 24), offer.name)).name
    return resolved.pipes[name], resolved.pipe_endpoint(name, device)
