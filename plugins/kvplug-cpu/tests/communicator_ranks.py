"""Ranks of a communicator for tests, in threads or in processes. A process can be killed or stopped.

A plugin's module has ``make(group, **given)``, ``strike(made, fault)`` for a rank in a call, and
``strike_start(when, struck)`` for one that starts.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from kvplug import KvplugError, StatelessGroup
from kvplug.transport import DeviceCommunicator
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.groups import local_groups
from kvplug_testing.peers import Parent, Peer

PATIENCE_S = 60.0
LARGE = 1 << 20


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
    """Makes a group with all ranks in this process."""
    with local_groups(timeout=PATIENCE_S) as make:
        yield make


@pytest.fixture
def ranks(fork_server: ForkServer) -> Iterator[Callable[..., list[Peer]]]:
    """Starts a function of this file, or of the one at ``ends``, at each rank."""
    with ExitStack() as stack:

        def start(what: str, ends: str, world_size: int, *args: Any) -> list[Peer]:
            children = [
                stack.enter_context(
                    fork_server.start(
                        f"{__file__}:rank_of", what, ends, rank, world_size, *args, timeout_s=2 * PATIENCE_S
                    )
                )
                for rank in range(world_size)
            ]
            carry(children)
            return children

        yield start


def carry(children: list[Peer]) -> None:
    """The first rank's contact to the others."""
    contact = children[0].recv()
    for child in children[1:]:
        child.send(contact)


def go(children: list[Peer]) -> None:
    for child in children:
        assert child.recv() == "ready"
    for child in children:
        child.send("go")


def check_survivors(
    children: list[Peer], kind: str, strike: Callable[[], Any] = lambda: None, *, named: bool = True
) -> None:
    """The last rank is struck in the call; the others say so, by its number, and go on without it."""
    go(children)
    strike()
    for child in children[:-1]:
        name, text = child.recv(timeout=PATIENCE_S)
        assert name == kind, text
        assert f"rank {len(children) - 1}" in text or not named, text
    carry(children[:-1])
    for child in children[:-1]:
        assert child.result(timeout=PATIENCE_S) == [sum(range(1, len(children)))] * 3
    children[-1].kill()


def check_joiners(children: list[Peer], who: int, kinds: list[str], within: float = PATIENCE_S) -> None:
    """That rank is struck while all start; the others say so, by its number if it is not the first."""
    struck = children.pop(who)
    assert struck.recv() == "struck"
    for child in children:
        name, text = child.recv(timeout=within)
        assert name in kinds, text
        assert who == 0 or f"rank {who}" in text
    struck.kill()


# -- what a rank does in a process of its own --------------------------------------------------------


def rank_of(parent: Parent, what: str, ends: str, rank: int, world_size: int, *args: Any) -> Any:
    folder, name = os.path.split(ends)
    sys.path.append(folder)  # a child imports only from the folder of the function that it runs
    module = importlib.import_module(name.removesuffix(".py"))
    function = getattr(module, what, None) or {"survivor": survivor, "joiner": joiner}[what]
    return function(parent, module, rank, world_size, *args)


def met(parent: Parent, rank: int, world_size: int) -> StatelessGroup:
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
            made.batch_isend_irecv(
                [DeviceCommunicator.SendOp(large, after), DeviceCommunicator.RecvOp(into, before)],
                timeout=timeout,
            )
        case "all_gatherv":
            made.all_gatherv(large[: uneven[made.rank]], 0, uneven, timeout=timeout)
        case "reduce_scatterv":
            made.reduce_scatterv(large[: sum(uneven)].clone(), 0, uneven, timeout=timeout)
        case _:
            getattr(made, method)(large, timeout=timeout)


def survivor(
    parent: Parent,
    module: Any,
    rank: int,
    world_size: int,
    given: dict[str, Any],
    method: str,
    timeout: float | None,
    fault: Any,
) -> Any:
    """Calls ``method``; the last rank has the fault. Then the others meet again, and it works."""
    group = met(parent, rank, world_size)
    made = module.make(group, **given)
    if rank == world_size - 1:
        module.strike(made, fault)
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
    with met(parent, rank, world_size - 1) as again, module.make(again, **given) as other:
        total = other.all_reduce(torch.full((3,), rank + 1))
        other.synchronize()
        again.barrier()
    return total.tolist()


def joiner(
    parent: Parent,
    module: Any,
    rank: int,
    world_size: int,
    given: dict[str, Any],
    fault: int,
    when: str,
    who: int,
) -> Any:
    """Makes its end; rank ``who`` is struck at a moment of the start."""
    group = met(parent, rank, world_size)
    if rank == who:

        def struck(*_: Any, **__: Any) -> None:
            parent.send("struck")
            os.kill(os.getpid(), fault)

        module.strike_start(when, struck)
    try:
        module.make(group, **given)
        raise AssertionError(f"it started without rank {who}")
    except KvplugError as e:
        parent.send((type(e).__name__, str(e)))
    parent.recv()  # a rank that ends now is missed by the ranks that still wait
