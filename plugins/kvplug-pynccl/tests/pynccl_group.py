"""Communicators "pynccl" over the fake NCCL for tests: all ranks here as threads, or each in a process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvplug import KvplugError, StatelessGroup
from kvplug.transport import CommunicatorContext, Credentials, RecvOp, SendOp
from kvplug_lab.gpu.fake import Controls
from kvplug_lab.gpu.pynccl import HostCommunicator, HostDevice
from kvplug_pynccl.communicator.communicator import PyncclCommunicator
from kvplug_pynccl.options import PyncclCommunicatorOptions
from kvplug_testing import peers
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.groups import local_groups

PATIENCE_S = 60.0
LARGE = 1 << 20


def context_of(
    group: StatelessGroup, path: str, timeout_s: float = PATIENCE_S, **options: Any
) -> CommunicatorContext:
    return CommunicatorContext(
        options=PyncclCommunicatorOptions(**{"library": path, **options}),
        credentials=Credentials(),
        group=group,
        timeout_s=timeout_s,
    )


def make(group: StatelessGroup, path: str, device: Any = None, **given: Any) -> HostCommunicator:
    return HostCommunicator(context_of(group, path, **given), device or HostDevice(path))


def at_all(things: Any, do: Callable[[Any], Any]) -> list[Any]:
    """What ``do`` returned or raised, called with each at the same time."""

    def run(thing: Any) -> Any:
        try:
            return do(thing)
        except Exception as e:
            return e

    with ThreadPoolExecutor(len(things)) as pool:
        return list(pool.map(run, things))


@pytest.fixture
def groups() -> Iterator[Callable[[int], list[StatelessGroup]]]:
    """Makes a group, all of whose ranks are here."""
    with local_groups(timeout=PATIENCE_S) as make:
        yield make


@pytest.fixture
def local_ranks(fake_path: str, controls: Any, groups: Any) -> Iterator[Callable[..., list[Any]]]:
    """Makes the communicators of a group, or what making one raised. ``each(rank)``: options of a rank."""
    with ExitStack() as stack:

        def start(world_size: int, each: Any = lambda _: {}, **given: Any) -> list[Any]:
            made = at_all(
                groups(world_size), lambda group: make(group, fake_path, **{**given, **each(group.rank)})
            )
            for one in made:
                if isinstance(one, PyncclCommunicator):
                    stack.callback(one.destroy)
            return made

        yield start


@pytest.fixture
def remote_ranks(fake_path: str, fork_server: ForkServer) -> Iterator[Callable[..., list[peers.Peer]]]:
    """Starts a function of this file at each rank, and carries the first rank's contact to the others."""
    with ExitStack() as stack:

        def start(what: str, world_size: int, *args: Any) -> list[peers.Peer]:
            children = [
                stack.enter_context(
                    fork_server.start(
                        f"{__file__}:{what}", fake_path, rank, world_size, *args, timeout_s=2 * PATIENCE_S
                    )
                )
                for rank in range(world_size)
            ]
            carry(children)
            return children

        yield start


def carry(children: list[peers.Peer]) -> None:
    contact = children[0].recv()
    for child in children[1:]:
        child.send(contact)


# -- what a rank does in a process of its own --------------------------------------------------------


def met(parent: peers.Parent, rank: int, world_size: int) -> StatelessGroup:
    """The group, through contacts that the parent carries."""
    if rank == 0:
        listener = StatelessGroup.listen("unix:")
        parent.send(listener.contact)
        return StatelessGroup.create(listener, rank=0, world_size=world_size, timeout=PATIENCE_S)
    return StatelessGroup.create(parent.recv(), rank=rank, world_size=world_size, timeout=PATIENCE_S)


def call(made: Any, method: str, timeout: float | None) -> None:
    """One that takes a while, and needs all ranks."""
    large = torch.ones(LARGE * made.world_size)
    after, before = (made.rank + 1) % made.world_size, (made.rank - 1) % made.world_size
    uneven = [LARGE // 2 * (rank + 1) for rank in range(made.world_size)]
    match method:
        case "batch_isend_irecv":
            into = torch.empty_like(large)
            made.batch_isend_irecv([SendOp(large, after), RecvOp(into, before)], timeout=timeout)
        case "all_gatherv":
            made.all_gatherv(large[: uneven[made.rank]], 0, uneven, timeout=timeout)
        case "reduce_scatterv":
            made.reduce_scatterv(large[: sum(uneven)].clone(), 0, uneven, timeout=timeout)
        case _:
            getattr(made, method)(large, timeout=timeout)


def survivor(
    parent: peers.Parent,
    path: str,
    rank: int,
    world_size: int,
    method: str,
    timeout: float | None,
    struck: dict[str, int],
    options: dict[str, Any],
    peer_result: int,
) -> Any:
    """Calls ``method``; the last rank has these faults of the fake. Then the others meet again."""
    group = met(parent, rank, world_size)
    made = make(group, path, **options)
    controls = Controls(path)
    controls.set(peer_result=peer_result)
    if rank == world_size - 1:
        controls.set(**struck)
    parent.send("ready")
    parent.recv()
    try:
        call(made, method, timeout)
        made.synchronize(timeout=timeout)
        raise AssertionError("it worked without the last rank")
    except KvplugError as e:
        parent.send((type(e).__name__, str(e)))
    made.destroy()
    group.abort()
    if rank == world_size - 1:
        return None
    with met(parent, rank, world_size - 1) as again, make(again, path) as other:
        total = other.all_reduce(torch.full((3,), rank + 1))
        again.barrier()
    return total.tolist()


def bystander(parent: peers.Parent, path: str, rank: int, world_size: int) -> Any:
    """Rank 0 receives from rank 1, which never sends. The last rank takes no part in it."""
    with met(parent, rank, world_size) as group, make(group, path) as made:
        parent.send("ready")
        parent.recv()
        if rank == 0:
            try:
                made.recv((3,), torch.float32, 1, timeout=None)
            except KvplugError as e:
                return type(e).__name__, str(e)
        parent.recv(timeout=None)
    return None


def joiner(
    parent: peers.Parent, path: str, rank: int, world_size: int, timeout_s: float, fault: int, late: bool
) -> Any:
    """Makes its end; the last rank is struck when NCCL starts, or before."""
    group = met(parent, rank, world_size)
    if rank == world_size - 1:
        from kvplug_pynccl.communicator import communicator

        def struck(*_: Any, **__: Any) -> None:
            parent.send("struck")
            os.kill(os.getpid(), fault)

        if late:
            communicator.MonitoredCommunicator = struck  # type: ignore[misc, assignment]
        else:
            communicator.connect_ranks = struck  # type: ignore[assignment]
    try:
        make(group, path, timeout_s=timeout_s)
        raise AssertionError("it started without the last rank")
    except KvplugError as e:
        parent.send((type(e).__name__, str(e)))
    parent.recv()  # a rank that ends now is missed by the ranks that still wait


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate()}


STOP, KILL = int(signal.SIGSTOP), int(signal.SIGKILL)
