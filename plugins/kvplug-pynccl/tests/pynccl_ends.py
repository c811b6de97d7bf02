"""Pipes "pynccl" over the fake NCCL for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from typing import Any

import device_pipes
from kvplug.transport import Credentials, PipeEndpoint
from kvplug.transport.pipe import content as content
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint

PATIENCE_S = device_pipes.PATIENCE_S
LARGE = 3 << 20
FAKE = fake.NCCL


def endpoint(
    path: str, *, heartbeat_timeout_s: float = 10.0, device: Any = None, **options: Any
) -> PyncclEndpoint:
    return PyncclEndpoint(
        PipeEndpoint.Context(
            options=PyncclPipeOptions(library=path, **options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
        ),
        device or HostDevice(path),
    )


FIXTURES = device_pipes.fixtures_of(__file__, endpoint, HostDevice, "communicators")
