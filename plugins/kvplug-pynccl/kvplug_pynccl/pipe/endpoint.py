"""The factory of the pipe "pynccl": where to listen, and how to connect."""

from __future__ import annotations

from kvplug.transport import Connection, Deadline, DuplexEndpoint, Pipe, PipeEndpoint
from kvplug_pynccl.device import CudaDevice, Device
from kvplug_pynccl.interface import address_for, bind_to
from kvplug_pynccl.nccl.library import load
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe.contact import PyncclContact
from kvplug_pynccl.pipe.join import PURPOSE, join
from kvplug_pynccl.pipe.pipe import PyncclPipeSettings


class PyncclEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket, or on TCP where other hosts are to connect.

    NCCL listens beside it, on ports of its own.
    """

    CONTACT = PyncclContact
    PURPOSE = PURPOSE
    JOIN_TIMEOUT_S = 60.0  # NCCL starts slowly

    def __init__(self, context: PipeEndpoint.Context, device: Device | None = None) -> None:
        """``device``: another one than the GPU that the context names, for tests.

        Raises:
            ConfigError: the device is not a GPU of this machine; no interface has the host's address.
            NcclLibraryError: no NCCL can be used.
        """
        super().__init__(context)
        options: PyncclPipeOptions = context.options if context.options is not None else PyncclPipeOptions()
        device = CudaDevice(context.device) if device is None else device
        device.stages_cpu_tensors = options.stage_cpu_tensors
        bind_to(context.host)
        self._settings = PyncclPipeSettings.of(
            context,
            nccl=load(options.library),
            device=device,
            max_in_flight_bytes=options.max_in_flight_bytes,
            copy_bytes=options.copy_bytes,
        )

    def _addresses(self) -> tuple[str, ...]:
        return (address_for(self._context.host),)

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        return join(connection, self._settings, deadline, accepted=accepted)
