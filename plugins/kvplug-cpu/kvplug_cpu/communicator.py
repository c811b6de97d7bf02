"""The communicator "cpu": collectives over gloo, and pipes over which the ranks watch each other."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import torch

from kvplug import ConfigError, connect_ranks
from kvplug.transport import Deadline, DeviceCommunicator, Mesh, PipeEndpoint
from kvplug_cpu.endpoint import CpuEndpoint
from kvplug_cpu.gloo import Gloo
from kvplug_cpu.interface import address_of
from kvplug_cpu.options import CpuOptions
from kvplug_cpu.store import GroupStore

if TYPE_CHECKING:
    from torch import Tensor

_UNLIMITED = 1 << 60
"""Bytes that a batch may queue. The caller holds the tensors anyway, and must not wait before it receives."""
_COPIED = 256 * 1024
"""Bytes up to which a copy for each rank, and one operation, is faster than an operation for each rank."""
_WIDER = {torch.int16: torch.int32}
"""The dtypes that gloo cannot sum."""


class CpuCommunicator(DeviceCommunicator):
    """The factory of the spec. All ranks call it at the same time, and exchange addresses through the group.

    With a torch process group as ``device_group`` collectives use that group, which the caller still owns.
    Without one, gloo is bound to the context's host: an address, a name, or a network interface.
    """

    def __init__(self, context: DeviceCommunicator.Context) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(
                f"the communicator 'cpu' takes CPU tensors, and the device is {context.device!r}"
            )
        self._gloo = Gloo(None, lambda: None, owned=False)
        super().__init__(context)
        if self.world_size == 1:
            return
        deadline = Deadline.after(context.timeout_s)
        group, address = context.group, address_of(context.host)
        prefix = group.all_gather(f"kvplug-cpu/{secrets.token_hex(8)}/", deadline.remaining())[0]
        try:
            self._mesh = Mesh(connect_ranks(group, self._endpoint(address), timeout=deadline.remaining()))
            if context.device_group is not None:
                self._gloo = Gloo.of(
                    context.device_group, self.rank_in_group, self.world_size, self._mesh.check
                )
            else:
                store = GroupStore(group, prefix, deadline)
                try:
                    with self._mesh.diagnose():
                        self._gloo = Gloo.meet(
                            store, self.rank_in_group, self.world_size, address, deadline, self._mesh.check
                        )
                    self._mesh.compare(b"ready", deadline)
                finally:
                    store.abandon()
                    store.forget()
                self.device_group = self._gloo.group
        except BaseException as e:
            self._mesh.give_up(e)
            self.destroy()
            raise

    def _endpoint(self, address: str) -> CpuEndpoint:
        return CpuEndpoint(
            PipeEndpoint.Context(
                options=CpuOptions(max_in_flight_bytes=_UNLIMITED),
                credentials=self.context.credentials,
                host=address,
                timeout_s=self.context.timeout_s,
            )
        )

    # -- collectives -----------------------------------------------------------------------------

    def _all_reduce(self, tensor: Tensor, deadline: Deadline) -> None:
        if not tensor.numel():
            return
        wider = _WIDER.get(tensor.dtype)
        work = tensor if wider is None else tensor.to(wider)
        with self._mesh.diagnose():
            self._gloo.all_reduce(work, deadline)
        if work is not tensor:
            tensor.copy_(work)

    def _all_gather(self, outputs: list[Tensor], tensor: Tensor, deadline: Deadline) -> None:
        if max(output.nbytes for output in outputs) <= _COPIED:  # equal at all ranks
            self._all_to_all([tensor] * self.world_size, outputs, deadline)
            return
        outputs[self.rank_in_group].copy_(tensor)
        for rank, output in enumerate(outputs):
            self._broadcast(output, rank, deadline)

    def _reduce_scatter(self, output: Tensor, inputs: list[Tensor], deadline: Deadline) -> None:
        parts = [torch.empty_like(output) for _ in inputs]
        self._all_to_all(inputs, parts, deadline)
        output.copy_(parts[0])
        for part in parts[1:]:
            output += part

    def _all_to_all(self, inputs: list[Tensor], outputs: list[Tensor], deadline: Deadline) -> None:
        """``inputs[r]`` to rank r, and ``outputs[r]`` from it: gloo's all-to-all, on bytes."""
        sizes = [each.nbytes for each in outputs]
        given = torch.cat([_bytes(each) for each in inputs])
        taken = given.new_empty(sum(sizes))
        with self._mesh.diagnose():
            self._gloo.all_to_all(taken, given, sizes, [each.nbytes for each in inputs], deadline)
        for output, part in zip(outputs, taken.split(sizes), strict=True):
            _bytes(output).copy_(part)

    def _broadcast(self, tensor: Tensor, src: int, deadline: Deadline) -> None:
        if tensor.numel():
            with self._mesh.diagnose():
                self._gloo.broadcast(_bytes(tensor), src, deadline)

    def _destroy(self) -> None:
        super()._destroy()
        self.device_group = self.context.device_group
        self._gloo.close()

    def _after_fork_in_child(self) -> None:
        super()._after_fork_in_child()
        self._gloo.after_fork_in_child()


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory."""
    return tensor.view(-1).view(torch.uint8)
