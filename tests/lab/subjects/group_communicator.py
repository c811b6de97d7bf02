"""A communicator between processes, so that the suite has one to judge: every tensor goes through the group.

A group passes everything through its rank 0, and bounds a value at 16 MiB: no transport for real use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvplug.transport import Deadline, DeviceCommunicator


class GroupCommunicator(DeviceCommunicator):
    def _all_reduce(self, tensor: Any, deadline: Deadline) -> None:
        tensor.copy_(total(self._everyones(tensor, deadline)))

    def _all_gather(self, outputs: list[Any], tensor: Any, deadline: Deadline) -> None:
        for output, part in zip(outputs, self._everyones(tensor, deadline), strict=True):
            output.copy_(part)

    def _reduce_scatter(self, output: Any, inputs: list[Any], deadline: Deadline) -> None:
        everyones = self._everyones(inputs, deadline)
        output.copy_(total([parts[self.rank] for parts in everyones]))

    def _broadcast(self, tensor: Any, src: int, deadline: Deadline) -> None:
        tensor.copy_(self._everyones(tensor if self.rank == src else None, deadline)[src])

    def _send(self, tensor: Any, dst: int, deadline: Deadline) -> None:
        self.cpu_group.send(tensor, dst)

    def _recv(self, tensor: Any, src: int, deadline: Deadline) -> None:
        tensor.copy_(self.cpu_group.recv(src, deadline.remaining()))

    def _destroy(self) -> None:
        self.cpu_group.abort()  # here the group is the data plane, and this end of it was made for us

    def _everyones(self, value: Any, deadline: Deadline) -> list[Any]:
        found: list[Any] = self.cpu_group.all_gather(value, deadline.remaining())
        return found


def total(parts: Sequence[Any]) -> Any:
    found = parts[0].clone()
    for part in parts[1:]:
        found += part
    return found
