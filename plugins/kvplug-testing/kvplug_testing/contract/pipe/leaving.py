"""The process at the other end leaves its program while its pipe is at work (law ALL-8)."""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from itertools import cycle
from typing import Any

import pytest

from kvplug import KvplugError
from kvplug.transport import Pipe
from kvplug_testing.contract import leaving
from kvplug_testing.contract.base import law
from kvplug_testing.contract.leaving import OTHER_WAYS, WAYS, check_left
from kvplug_testing.contract.pipe import remote
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call

_SMALL = 30
"""Small messages for each large one: they keep the program's threads in calls, and large ones the pipe's."""
_NBYTES = 1000
"""Of each message to the program."""


def leave_at_work(parent: Parent, pipe: Pipe, way: str, both_ways: bool) -> None:
    """Send and receive in threads of the program, and leave it meanwhile."""
    import torch

    def strided(rows: int) -> Any:
        return torch.arange(rows * 256, dtype=torch.int16).view(rows, 256).t()

    sending = partial(_send_all, pipe, [strided(2)] * _SMALL + [strided(4 * MIB // 512)])
    threading.Thread(target=sending, daemon=True).start()
    if both_ways:
        out = torch.empty(_NBYTES, dtype=torch.uint8)
        threading.Thread(target=_receive_all, args=(pipe, out), daemon=True).start()
    parent.recv()
    leaving.leave(parent, way, abort=pipe.abort, close=pipe.close)


def _receive_all(pipe: Pipe, out: Any = None) -> None:
    with contextlib.suppress(KvplugError):
        while True:
            pipe.recv_tensor(out, timeout=None)


def _send_all(pipe: Pipe, messages: list[Any]) -> None:
    with contextlib.suppress(KvplugError):
        for message in cycle(messages):
            pipe.send_tensor(message, timeout=None)


class Leaving(PipeSuite):
    """Leaving a program with a pipe."""

    @law("ALL-8", needs="other_and_forked_processes", level="quick")
    @pytest.mark.parametrize("way", WAYS)
    def test_a_program_that_leaves_while_its_pipe_is_at_work_ends_with_its_own_code(self, way: str) -> None:
        both_ways = not self.both_ways
        pipe, child = self.remote_pipe(leave_at_work, way, both_ways)
        for _ in range(2 * _SMALL):
            pipe.recv_tensor()
        receiving = Call(partial(_receive_all, pipe))
        messages = [remote.content(1, _NBYTES)]
        sending = Call(partial(_send_all, pipe, messages) if both_ways else lambda: None)
        child.send("leave")
        check_left(child)
        receiving.result()
        sending.result()

    @law("ALL-8", level="full", needs="other_and_forked_processes")
    @pytest.mark.parametrize("way", OTHER_WAYS)
    def test_so_does_one_that_closed_its_pipe_and_a_forked_child(self, way: str) -> None:
        self.test_a_program_that_leaves_while_its_pipe_is_at_work_ends_with_its_own_code(way)
