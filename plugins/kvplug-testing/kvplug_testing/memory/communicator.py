"""The communicator "memory": every tensor goes through a group of its own.

A group passes everything through its rank 0, and bounds a value at 16 MiB: no transport for real use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvplug import StatelessGroup
from kvplug.transport import Deadline, DeviceCommunicator

if TYPE_CHECKING:
    from torch import Tensor


class MemoryCommunicator(DeviceCommunicator):
    """The factory of the spec. The ranks are threads or processes of one host."""

    def __init__(self, context: DeviceCommunicator.Context) -> None:
        super().__init__(context)
        listener = StatelessGroup.listen("unix:") if self.rank == 0 else None
        try:
            contact = context.group.broadcast(listener and listener.contact, 0, context.timeout_s)
        except BaseException:
            if listener is not None:
                listener.close()
            raise
        self.cpu_group = StatelessGroup.create(
            listener or contact, rank=self.rank, world_size=self.world_size, timeout_s=context.timeout_s
        )

    def _everyones(self, value: Any, deadline: Deadline) -> list[Any]:
        """The values of all ranks."""
        found: list[Any] = self.cpu_group.all_gather(value, deadline.remaining())
        return found

    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        tensor.copy_(_sum(self._everyones(tensor, deadline)))

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        for output, part in zip(outputs, self._everyones(tensor, deadline), strict=True):
            output.copy_(part)

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        everyones = self._everyones(inputs, deadline)
        output.copy_(_sum([parts[self.rank] for parts in everyones]))

    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        tensor.copy_(self._everyones(tensor if self.rank == src else None, deadline)[src])

    def _exchange(
        self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]], deadline: Deadline
    ) -> None:
        for tensor, dst in sends:
            self.cpu_group.send(tensor, dst)
        for tensor, src in recvs:
            tensor.copy_(self.cpu_group.recv(src, deadline.remaining()))

    def _destroy(self) -> None:
        self.cpu_group.abort()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order of ranks, so that it is the same at every rank."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
