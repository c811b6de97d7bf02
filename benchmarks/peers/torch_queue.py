"""What torch.multiprocessing does with a tensor: its storage in shared memory, a handle through a pipe."""

from __future__ import annotations

import torch
from torch import multiprocessing  # noqa: TID251 - it is what is measured

from kvplug_bench.links import Link, Rendezvous


class TorchQueue(Link):
    """A connection as its queues have one, between processes that did not start each other.

    Each message is copied into shared memory of its own, as a DataLoader's workers do it. A tensor that was
    sent as it is would lie there from then on, and nothing would be copied when it is sent again.
    """

    def __init__(self, rendezvous: Rendezvous) -> None:
        from multiprocessing import current_process  # noqa: TID251 - it is what is measured
        from multiprocessing.connection import Client, Listener  # noqa: TID251
        from multiprocessing.reduction import ForkingPickler  # noqa: TID251

        multiprocessing.set_sharing_strategy("file_descriptor")
        current_process().authkey = rendezvous.folder.encode()
        path = f"{rendezvous.folder}/connection"
        if rendezvous.is_first:
            with Listener(path, family="AF_UNIX") as listener:
                rendezvous.send(path)
                self._connection = listener.accept()
        else:
            self._connection = Client(rendezvous.recv(), family="AF_UNIX")
        self._pickler = ForkingPickler

    def send(self, tensor: torch.Tensor) -> None:
        shared = torch.empty(0, dtype=tensor.dtype)
        shared.set_(torch.UntypedStorage._new_shared(tensor.nbytes), 0, tensor.shape)
        self._connection.send_bytes(self._pickler.dumps(shared.copy_(tensor)))

    def receive(self, out: torch.Tensor) -> None:
        out.copy_(self.receive_new(out))

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = self._pickler.loads(self._connection.recv_bytes())
        return got

    def close(self) -> None:
        self._connection.close()
