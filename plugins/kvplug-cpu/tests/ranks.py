"""What the ranks of the tests of the communicator "cpu" do, each in a process of its own."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from kvplug import KvplugError, StatelessGroup
from kvplug.transport import CommunicatorContext, Credentials, RecvOp, SendOp
from kvplug_cpu import communicator
from kvplug_cpu.communicator import CpuCommunicator
from kvplug_cpu.gloo import Gloo
from kvplug_testing.peers import Parent

LARGE = 1 << 24


def context(group: StatelessGroup, **given: Any) -> CommunicatorContext:
    return CommunicatorContext(
        **{"options": None, "credentials": Credentials(), "group": group, "timeout_s": 30.0, **given}
    )


def met(parent: Parent, rank: int, world_size: int) -> StatelessGroup:
    """The group, through contacts that the parent carries."""
    if rank == 0:
        listener = StatelessGroup.listen("unix:")
        parent.send(listener.contact)
        return StatelessGroup.create(listener, rank=0, world_size=world_size, timeout=30.0)
    return StatelessGroup.create(parent.recv(), rank=rank, world_size=world_size, timeout=30.0)


def call(made: CpuCommunicator, method: str, timeout: float | None) -> None:
    large = torch.ones(LARGE)
    after, before = (made.rank + 1) % made.world_size, (made.rank - 1) % made.world_size
    if method == "batch_isend_irecv":
        made.batch_isend_irecv([SendOp(large, after), RecvOp(torch.empty(LARGE), before)], timeout=timeout)
    else:
        getattr(made, method)(large, timeout=timeout)


def fails_in(made: Any, method: str, fault: int) -> None:
    """This rank is stopped or killed when all ranks have agreed on the call, in the middle of it."""
    if method == "batch_isend_irecv":
        made._batch = lambda *_: os.kill(os.getpid(), fault)
        return

    def struck(self: Gloo, *_: Any) -> bool:
        os.kill(os.getpid(), fault)
        time.sleep(60)
        return False

    Gloo._ended = struck  # type: ignore[method-assign]


def survivor(
    parent: Parent, rank: int, world_size: int, method: str, timeout: float | None, fault: int
) -> Any:
    """Calls ``method``; the last rank has the fault. Then the others meet again, and it works."""
    group = met(parent, rank, world_size)
    made = CpuCommunicator(context(group))
    if fault and rank == world_size - 1:
        fails_in(made, method, fault)
    parent.send("ready")
    parent.recv()
    try:
        call(made, method, timeout)
        raise AssertionError("it worked without the last rank")
    except KvplugError as e:
        parent.send((type(e).__name__, str(e)))
    made.destroy()
    group.abort()
    with met(parent, rank, world_size - 1) as again, CpuCommunicator(context(again)) as other:
        total = other.all_reduce(torch.full((3,), rank + 1))
        again.barrier()
    return total.tolist()


def joiner(
    parent: Parent, rank: int, world_size: int, timeout_s: float, fault: int, when: str, who: int
) -> Any:
    """Makes its end; rank ``who`` is struck when the ranks begin to make the pipes, or then to meet through
    gloo, or when they have met.
    """
    group = met(parent, rank, world_size)
    if rank == who:

        def struck(*_: Any, **__: Any) -> None:
            parent.send("struck")
            os.kill(os.getpid(), fault)

        match when:
            case "pipes":
                communicator.connect_ranks = struck  # type: ignore[assignment]
            case "gloo":
                Gloo.meet = struck  # type: ignore[method-assign, assignment]
            case "ready":
                CpuCommunicator._compare = struck  # type: ignore[method-assign, assignment]
    try:
        CpuCommunicator(context(group, timeout_s=timeout_s))
        raise AssertionError(f"it met without rank {who}")
    except KvplugError as e:
        parent.send((type(e).__name__, str(e)))
    parent.recv()  # other ranks still wait for this one: do not end yet


def over_torch(parent: Parent, rank: int, world_size: int) -> Any:
    """torch's own front door meets through our store, and its group is the communicator's."""
    import torch.distributed as dist

    from kvplug import group_from_process_group
    from kvplug.transport import Deadline
    from kvplug_cpu.store import GroupStore

    with met(parent, rank, world_size) as group:
        store = GroupStore(group, "torch/", Deadline.after(30.0))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        given = dist.group.WORLD
        with (
            group_from_process_group(given) as beside,
            CpuCommunicator(context(beside, device_group=given)) as made,
        ):
            assert made.device_group is given
            total = made.all_reduce(torch.full((2,), rank + 1))
            part = made.reduce_scatterv(torch.arange(world_size * 2) * (rank + 1), 0, [2] * world_size)
            beside.barrier()
        after = torch.ones(1)
        dist.all_reduce(after)  # it is its maker's, and lives on
        group.barrier()
        dist.destroy_process_group()
    return total.tolist(), part.tolist(), after.tolist()
