"""torch.distributed with gloo, which receives into existing memory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from kvplug_bench.links import Broadcast, Link, Rendezvous, UnavailableError

if TYPE_CHECKING:
    from torch import Tensor


def _group(rendezvous: Rendezvous) -> Any:
    """torch.distributed, with a group of all ends over loopback."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnavailableError("this torch is built without gloo")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"file://{rendezvous.folder}/store"
    dist.init_process_group("gloo", init_method=where, rank=rendezvous.rank, world_size=rendezvous.size)
    return dist


class Gloo(Link):
    """``send`` and ``recv``."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._dist = _group(rendezvous)
        self._other = 1 - rendezvous.rank

    def send(self, tensor: Tensor) -> None:
        self._dist.send(tensor, self._other)

    def receive(self, out: Tensor) -> None:
        self._dist.recv(out, self._other)

    def receive_new(self, like: Tensor) -> Tensor:
        import torch

        out = torch.empty_like(like)
        self._dist.recv(out, self._other)
        return out

    def close(self) -> None:
        self._dist.destroy_process_group()


class GlooBroadcast(Broadcast):
    """``broadcast``."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._dist = _group(rendezvous)

    def send(self, tensor: Tensor) -> None:
        self._dist.broadcast(tensor, 0)

    def receive(self, like: Tensor) -> Tensor:
        import torch

        out = torch.empty_like(like)
        self._dist.broadcast(out, 0)
        return out

    def send_value(self, value: bytes) -> None:
        import torch

        self._dist.broadcast(torch.frombuffer(bytearray(value), dtype=torch.uint8), 0)

    def receive_value(self, nbytes: int) -> None:
        import torch

        self._dist.broadcast(torch.empty(nbytes, dtype=torch.uint8), 0)

    def close(self) -> None:
        self._dist.destroy_process_group()
