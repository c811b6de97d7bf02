"""Pipes "pynccl" over the fake NCCL for tests: both ends here, or one in a real child process."""

from __future__ import annotations

from typing import Any

import torch

import device_pipes
from kvplug import connect_ranks
from kvplug.transport import Credentials, PipeContext
from kvplug_lab.gpu import fake
from kvplug_lab.gpu.pynccl import HostDevice
from kvplug_pynccl.options import PyncclPipeOptions
from kvplug_pynccl.pipe import content as content
from kvplug_pynccl.pipe.endpoint import PyncclEndpoint
from kvplug_testing import peers
from kvplug_testing.comparison import assert_filled

PATIENCE_S = device_pipes.PATIENCE_S
LARGE = 3 << 20
FAKE = fake.NCCL


def endpoint(
    path: str, *, heartbeat_timeout_s: float = 10.0, device: Any = None, **options: Any
) -> PyncclEndpoint:
    return PyncclEndpoint(
        PipeContext(
            options=PyncclPipeOptions(library=path, **options),
            credentials=Credentials(),
            timeout_s=PATIENCE_S,
            heartbeat_timeout_s=heartbeat_timeout_s,
        ),
        device or HostDevice(path),
    )


FIXTURES = device_pipes.fixtures_of(__file__, endpoint, HostDevice, "communicators")


def in_ring(parent: peers.Parent, path: str, address: str, rank: int, world_size: int) -> list[int]:
    """In a child: what comes around in a ring, to rank + 1 and from rank - 1."""
    from kvplug import StatelessGroup

    following, before = (rank + 1) % world_size, (rank - 1) % world_size
    seen = []
    with StatelessGroup.create(address, rank=rank, world_size=world_size) as group:
        pipes = connect_ranks(group, endpoint(path), {following, before}, timeout=PATIENCE_S)
        message = torch.full((100_000,), rank, dtype=torch.int32)
        for _ in range(world_size):
            transfer = pipes[following].send_tensor(message)
            message = pipes[before].recv_tensor()  # type: ignore[assignment]
            transfer.wait(PATIENCE_S)
            seen.append(int(message[0]))
            assert_filled(seen[-1], message)
        group.barrier()
        for pipe in pipes.values():
            pipe.close()
    return seen
