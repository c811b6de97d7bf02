"""The communicator "cpu": collectives of CPU tensors over pipes "cpu" between all ranks."""

from __future__ import annotations

from kvplug import ConfigError
from kvplug.transport import DeviceCommunicator, PipeEndpoint
from kvplug_cpu.endpoint import CpuEndpoint
from kvplug_cpu.options import CpuOptions

_UNLIMITED = 1 << 60
"""Bytes that may be unsent. The caller holds the tensors anyway, and must not wait before it receives."""


class CpuCommunicator(DeviceCommunicator):
    """The factory of the spec. All ranks call it at the same time, and connect through the group.

    A ``device_group`` in the context is kept, and not used.
    """

    def __init__(self, context: DeviceCommunicator.Context) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(
                f"the communicator 'cpu' takes CPU tensors, and the device is {context.device!r}"
            )
        super().__init__(context)
        if self.world_size == 1:
            return
        endpoint = CpuEndpoint(
            PipeEndpoint.Context(
                options=CpuOptions(max_in_flight_bytes=_UNLIMITED, socket_buffer_bytes=1 << 20),
                credentials=context.credentials,
                host=context.host,
                timeout_s=context.timeout_s,
            )
        )
        self._connect(endpoint)
