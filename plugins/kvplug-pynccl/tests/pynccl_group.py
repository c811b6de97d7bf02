"""Communicators "pynccl" over the fake NCCL for tests: all ranks here as threads, or each in a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from communicator_ranks import at_all, groups, ranks
from kvplug import StatelessGroup
from kvplug.transport import Credentials, DeviceCommunicator
from kvplug_lab.gpu.fake import Controls
from kvplug_lab.gpu.pynccl import HostCommunicator, HostDevice
from kvplug_pynccl.communicator import communicator
from kvplug_pynccl.communicator.communicator import PyncclCommunicator
from kvplug_pynccl.options import PyncclCommunicatorOptions

__all__ = ["at_all", "groups", "local_ranks", "ranks"]
PATIENCE_S = 60.0


def context_of(
    group: StatelessGroup, path: str, timeout_s: float = PATIENCE_S, **options: Any
) -> DeviceCommunicator.Context:
    return DeviceCommunicator.Context(
        options=PyncclCommunicatorOptions(**{"library": path, **options}),
        credentials=Credentials(),
        group=group,
        timeout_s=timeout_s,
    )


def make(
    group: StatelessGroup, path: str, device: Any = None, faults: Any = None, **given: Any
) -> HostCommunicator:
    """``faults``: of the fake, once it has started."""
    made = HostCommunicator(context_of(group, path, **given), device or HostDevice(path))
    if faults:
        Controls(path).set(**faults)
    return made


def sums(made: list[Any]) -> list[Any]:
    return at_all(
        made, lambda one: one.all_reduce(torch.full((2,), one.rank + 1), timeout=PATIENCE_S).tolist()
    )


def adds(one: Any, timeout: float | None = PATIENCE_S) -> Any:
    return one.all_reduce(torch.ones(4), timeout=timeout)


@pytest.fixture
def local_ranks(fake_path: str, controls: Any, groups: Any) -> Iterator[Callable[..., list[Any]]]:
    """Makes the communicators of a group, or what making one raised. ``each(rank)``: what a rank is given."""
    with ExitStack() as stack:

        def start(world_size: int, each: Any = lambda _: {}, **given: Any) -> list[Any]:
            usual = {"path": fake_path, **given}
            made = at_all(groups(world_size), lambda group: make(group, **{**usual, **each(group.rank)}))
            for one in made:
                if isinstance(one, PyncclCommunicator):
                    stack.callback(one.destroy)
            return made

        yield start


# -- a rank in a process of its own --------------------------------------------------------------------


def strike(made: Any, fault: list[Any]) -> None:
    """``fault``: the path of the fake, and its faults."""
    path, faults = fault
    Controls(path).set(**faults)


def strike_start(when: str, struck: Callable[..., Any]) -> None:
    """When NCCL starts, or before."""
    setattr(communicator, {"nccl": "MonitoredCommunicator", "pipes": "connect_ranks"}[when], struck)
