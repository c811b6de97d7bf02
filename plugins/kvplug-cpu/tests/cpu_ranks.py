"""The communicator "cpu" for tests, and how one of its ranks is struck."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from kvplug import StatelessGroup
from kvplug.transport import Credentials, DeviceCommunicator
from kvplug_cpu import communicator
from kvplug_cpu.communicator import CpuCommunicator
from kvplug_cpu.pipe import CpuPipe


def make(group: StatelessGroup, **given: Any) -> CpuCommunicator:
    usual = {"options": None, "credentials": Credentials(), "group": group, "timeout_s": 30.0}
    return CpuCommunicator(DeviceCommunicator.Context(**{**usual, **given}))


def strike(made: Any, fault: int) -> None:
    """In the middle of a call: all ranks have agreed on it, and this one's tensors are on their way."""
    receive = CpuPipe.recv_tensor

    def struck(pipe: CpuPipe, out: Any = None, **given: Any) -> Any:
        if out is not None:
            os.kill(os.getpid(), fault)
            time.sleep(60)
        return receive(pipe, out, **given)

    CpuPipe.recv_tensor = struck  # type: ignore[method-assign, assignment]


def strike_start(when: str, struck: Callable[..., Any]) -> None:
    """When the ranks begin to make the pipes."""
    assert when == "pipes"
    communicator.connect_ranks = struck
