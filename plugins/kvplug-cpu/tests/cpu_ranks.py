"""The communicator "cpu" for tests, and how one of its ranks is struck."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from communicator_ranks import met
from kvplug import StatelessGroup
from kvplug.transport import Credentials, DeviceCommunicator, Mesh
from kvplug_cpu import communicator
from kvplug_cpu.communicator import CpuCommunicator
from kvplug_cpu.gloo import Gloo
from kvplug_testing.peers import Parent


def make(group: StatelessGroup, **given: Any) -> CpuCommunicator:
    usual = {"options": None, "credentials": Credentials(), "group": group, "timeout_s": 30.0}
    return CpuCommunicator(DeviceCommunicator.Context(**{**usual, **given}))


def strike(made: Any, fault: int) -> None:
    """In the middle of a call, when all ranks have agreed on it."""

    def struck(*_: Any) -> bool:
        os.kill(os.getpid(), fault)
        time.sleep(60)
        return False

    Gloo.has_ended = struck  # type: ignore[method-assign]
    Mesh.exchange = struck  # type: ignore[method-assign, assignment]


def strike_start(when: str, struck: Callable[..., Any]) -> None:
    """When the ranks begin to make the pipes, or then to meet through gloo, or when they have met."""
    match when:
        case "pipes":
            communicator.connect_ranks = struck
        case "gloo":
            Gloo.meet = struck  # type: ignore[method-assign]
        case "ready":
            Mesh.compare = struck  # type: ignore[method-assign]


def over_torch(parent: Parent, module: Any, rank: int, world_size: int) -> Any:
    """torch's own front door meets through our store, and its group is the communicator's."""
    import torch.distributed as dist

    from kvplug import StatelessGroup
    from kvplug.transport import Deadline
    from kvplug_cpu.store import GroupStore

    with met(parent, rank, world_size) as group:
        store = GroupStore(group, "torch/", Deadline.after(30.0))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        given = dist.group.WORLD
        with StatelessGroup.from_process_group(given) as beside, make(beside, device_group=given) as made:
            assert made.device_group is given
            total = made.all_reduce(torch.full((2,), rank + 1))
            part = made.reduce_scatterv(torch.arange(world_size * 2) * (rank + 1), 0, [2] * world_size)
            beside.barrier()
        after = torch.ones(1)
        dist.all_reduce(after)  # it is its maker's, and lives on
        group.barrier()
        dist.destroy_process_group()
    return total.tolist(), part.tolist(), after.tolist()
