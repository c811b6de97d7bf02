"""iceoryx2, zero-copy publish and subscribe: one copy into its memory, one out of it. It is polled."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import torch

from kvplug_bench.links import Link, Rendezvous

LARGEST = 256 << 20


class Iceoryx(Link):
    """One service each way, of slices of bytes that block where they would be dropped."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        import iceoryx2 as iox

        iox.set_log_level(iox.LogLevel.Fatal)
        self._node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        name = os.path.basename(rendezvous.folder)
        ways = [self._service(iox, f"{name} {rank}") for rank in range(2)]
        self._publisher = (
            ways[rendezvous.rank]
            .publisher_builder()
            .initial_max_slice_len(1 << 20)
            .allocation_strategy(iox.AllocationStrategy.PowerOfTwo)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self._subscriber = ways[1 - rendezvous.rank].subscriber_builder().create()
        if rendezvous.is_first:
            rendezvous.send(None)
        else:
            rendezvous.recv()

    def _service(self, iox: Any, name: str) -> Any:
        return (
            self._node.service_builder(iox.ServiceName.new(name))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .enable_safe_overflow(False)
            .subscriber_max_buffer_size(8)
            .open_or_create()
        )

    def send(self, tensor: torch.Tensor) -> None:
        sample = self._publisher.loan_slice_uninit(tensor.nbytes)
        ctypes.memmove(sample.payload().as_ptr(), tensor.data_ptr(), tensor.nbytes)
        sample.assume_init().send()

    def receive(self, out: torch.Tensor) -> None:
        receive = self._subscriber.receive
        while (sample := receive()) is None:
            pass
        ctypes.memmove(out.data_ptr(), sample.payload().as_ptr(), out.nbytes)
        sample.delete()

    def receive_new(self, like: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(like)
        self.receive(out)
        return out

    def close(self) -> None:
        self._subscriber.delete()
        self._publisher.delete()
