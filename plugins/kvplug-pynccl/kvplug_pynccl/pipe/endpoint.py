"""The factory of the pipe "pynccl": where to listen, and how to connect."""

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
from kvplug_pynccl.device import CudaDevice, Device
from kvplug_pynccl.interface import address_for, bind_to
from kvplug_pynccl.nccl.library import load
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe import joining
from kvplug_pynccl.pipe.contact import Contact
from kvplug_pynccl.pipe.listener import PyncclListener
from kvplug_pynccl.pipe.pipe import Tuning


class PyncclEndpoint(PipeEndpoint):
    """Listens on an abstract Unix socket, or on TCP where other hosts are to come. NCCL listens beside it."""

    def __init__(self, context: PipeContext, device: Device | None = None) -> None:
        """``device``: another one than the GPU that the context names, as tests have it.

        Raises:
            ConfigError: the device is no GPU, or none that is here; no interface has the host's address.
            NcclLibraryError: there is no NCCL that can be used.
        """
        options: PyncclPipeOptions = context.options if context.options is not None else PyncclPipeOptions()
        device = CudaDevice(context.device) if device is None else device
        bind_to(context.host)
        self._context = context
        self._tuning = Tuning(
            nccl=load(options.library),
            device=device,
            max_in_flight_bytes=options.max_in_flight_bytes,
            copy_bytes=options.copy_bytes,
            stage_cpu_tensors=options.stage_cpu_tensors,
            check_order=options.check_order,
            timeout_s=context.timeout_s,
            heartbeat_timeout_s=context.heartbeat_timeout_s,
        )

    def listen(self) -> PipeListener:
        listener = Listener.open(address_for(self._context.host), self._context.credentials, joining.PURPOSE)
        try:
            return PyncclListener(listener, self._tuning)
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
