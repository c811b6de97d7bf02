"""The factory of the pipe "cuda-ipc": it listens on an abstract Unix socket, wherever other pipes do."""

from __future__ import annotations

from kvplug import TimeoutError
from kvplug.transport import (
    DEFAULT_TIMEOUT,
    Deadline,
    Listener,
    Pipe,
    PipeContext,
    PipeEndpoint,
    PipeListener,
    Timeout,
    dial,
)
from kvplug_cuda_ipc.device import CudaDevice, Device
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_cuda_ipc.pipe import joining
from kvplug_cuda_ipc.pipe.contact import Contact
from kvplug_cuda_ipc.pipe.listener import CudaIpcListener
from kvplug_cuda_ipc.pipe.pipe import Tuning


class CudaIpcEndpoint(PipeEndpoint):
    """Peers are processes of this host that share its namespaces."""

    def __init__(self, context: PipeContext, device: Device | None = None) -> None:
        """``device``: another one than the GPU that the context names, as tests have it.

        Raises:
            ConfigError: the device is no GPU, or none that is here.
            CudaLibraryError: there is no CUDA runtime that can be used.
        """
        options: CudaIpcPipeOptions = context.options if context.options is not None else CudaIpcPipeOptions()
        self._context = context
        self._tuning = Tuning(
            device=CudaDevice(context.device, options.library) if device is None else device,
            staging_bytes=options.staging_bytes,
            piece_bytes=options.piece_bytes,
            max_in_flight_bytes=options.max_in_flight_bytes,
            timeout_s=context.timeout_s,
            heartbeat_timeout_s=context.heartbeat_timeout_s,
        )

    def listen(self) -> PipeListener:
        listener = Listener.open("unix:", self._context.credentials, joining.PURPOSE)
        try:
            return CudaIpcListener(listener, self._tuning)
        except BaseException:
            listener.close()
            raise

    def connect(self, contact: str, timeout: Timeout = DEFAULT_TIMEOUT) -> Pipe:
        deadline = Deadline.after(timeout, self._context.timeout_s)
        where = Contact.parse(contact).reachable()
        if deadline.expired:
            raise TimeoutError("no time was left to open the connection of a pipe")
        connection = dial(where, self._context.credentials, joining.PURPOSE, deadline.remaining())
        return joining.connect(connection, self._tuning, deadline)
