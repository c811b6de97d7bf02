"""Pipes "cuda-ipc" over the fake for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from typing import Any

import device_pipes
from kvplug import PeerGoneError
from kvplug.transport import Credentials, PipeEndpoint
from kvplug.transport.pipe import content as content
from kvplug_cuda_ipc.options import CudaIpcPipeOptions
from kvplug_cuda_ipc.pipe.endpoint import CudaIpcEndpoint
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.cuda_ipc import HostDevice
from kvplug_testing import peers
from kvplug_testing.waits import until

PATIENCE_S, MIB = device_pipes.PATIENCE_S, device_pipes.MIB
LARGE = 12 * MIB
"""More than the staging memory of these pipes."""
FAKE = fake.CUDART
COUNTERS = ("allocations", "mappings", "freed_while_mapped")
"""What must be 0 in the end."""


def endpoint(
    path: str, *, heartbeat_timeout_s: float = 10.0, device: Any = None, **options: Any
) -> CudaIpcEndpoint:
    options = {"staging_bytes": 4 * MIB, "piece_bytes": MIB // 2, **options}
    return CudaIpcEndpoint(
        PipeEndpoint.Context(
            options=CudaIpcPipeOptions(library=path, **options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
        ),
        device or HostDevice(path),
    )


FIXTURES = device_pipes.fixtures_of(__file__, endpoint, HostDevice, *COUNTERS)


def counters(parent: peers.Parent, pipe: Any, path: str) -> dict[str, int]:
    """What its fake has counted when the other end has gone, and it has let go of everything."""
    parent.send("here")
    try:
        while True:
            pipe.recv_tensor(timeout=None)
    except PeerGoneError:
        pass
    made = fake.Controls(path)
    until(lambda: not made.get("allocations") and not made.get("mappings"))
    return {name: made.get(name) for name in COUNTERS}
