"""The contact of this pipe: an abstract Unix socket, and which processes can share device memory there."""

from __future__ import annotations

from kvplug.transport import DuplexEndpoint
from kvplug_cuda_ipc.probe import domain


class CudaIpcContact(DuplexEndpoint.Contact):
    """``cuda-ipc1 <domain> <address>``."""

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
