"""The factory of the pipe "cuda-ipc"."""

from __future__ import annotations

from kvplug.transport import Connection, Deadline, DuplexEndpoint, Pipe, PipeEndpoint
from kvplug_cuda_ipc.device import CudaDevice, Device
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_cuda_ipc.pipe import join
from kvplug_cuda_ipc.pipe.pipe import CudaIpcPipeSettings
from kvplug_cuda_ipc.probe import domain


class CudaIpcContact(DuplexEndpoint.Contact):
    """``cuda-ipc1 <domain> <address>``: an abstract Unix socket, and which processes can share device memory
    there."""

    TRANSPORT = "cuda-ipc"
    ONLY_UNIX = True
    UNREACHABLE = (
        "the peer is on another host, or in other namespaces (network, IPC, PID), and shares no"
        " device memory with this process; use a pipe for several hosts, such as 'pynccl'"
    )

    @classmethod
    def local_domain(cls) -> str:
        """The network's domain is not enough: device memory needs the IPC and PID namespaces as well."""
        return domain()


class CudaIpcEndpoint(DuplexEndpoint):
    """Listens on an abstract Unix socket. Peers are processes of this host that share its namespaces."""

    CONTACT = CudaIpcContact
    PURPOSE = join.PURPOSE
    JOIN_TIMEOUT_S = 20.0  # CUDA starts slowly

    def __init__(self, context: PipeEndpoint.Context, device: Device | None = None) -> None:
        """``device``: for tests, instead of the GPU that the context names.

        Raises:
            ConfigError: the device is not a GPU, or not one of this host.
            CudaLibraryError: no CUDA runtime can be used.
        """
        super().__init__(context)
        options: CudaIpcPipeOptions = context.options if context.options is not None else CudaIpcPipeOptions()
        self._settings = CudaIpcPipeSettings.of(
            context,
            device=CudaDevice(context.device, options.library) if device is None else device,
            staging_bytes=options.staging_bytes,
            piece_bytes=options.piece_bytes,
            max_in_flight_bytes=options.max_in_flight_bytes,
        )

    def _join(self, connection: Connection, deadline: Deadline, *, accepted: bool) -> Pipe:
        return join.make_pipe(connection, self._settings, deadline, accepted=accepted)
