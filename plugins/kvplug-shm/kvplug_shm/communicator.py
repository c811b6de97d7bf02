"""The communicator "shm": collectives of CPU tensors over pipes "shm" between all ranks of one host."""

from __future__ import annotations

from kvplug import ConfigError
from kvplug.transport import DeviceCommunicator, PipeEndpoint
from kvplug_shm.options import ShmPipeOptions
from kvplug_shm.pipe.endpoint import ShmEndpoint

_UNLIMITED = 1 << 60
"""Bytes that may be unsent. The caller holds the tensors anyway, and must not wait before it receives."""


class ShmCommunicator(DeviceCommunicator):
    """The factory of the spec. All ranks call it at the same time, and connect through the group.

    A ``device_group`` in the context is kept, and not used.
    """

    def __init__(self, context: DeviceCommunicator.Context) -> None:
        if context.device.partition(":")[0] != "cpu":
            raise ConfigError(
                f"the communicator 'shm' takes CPU tensors, and the device is {context.device!r}"
            )
        super().__init__(context)
        if self.world_size == 1:
            return
        endpoint = ShmEndpoint(
            PipeEndpoint.Context(
                options=ShmPipeOptions(max_in_flight_bytes=_UNLIMITED),
                credentials=context.credentials,
                host=context.host,
                timeout_s=context.timeout_s,
            )
        )
        self._connect(endpoint)
