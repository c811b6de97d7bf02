"""A resource runs out while a communicator is made, used or closed (law ALL-9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

from kvplug import StatelessGroup
from kvplug.transport import DeviceCommunicator, NamedExhaustion
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.exhaustion import Attempt, let_go, together
from kvplug_testing.groups import local_groups

_RANKS: Final = (0, 1)
_NUMBERS: Final = 3 << 18
"""Elements of a tensor that needs more than a little memory: 3 MiB."""


class CommunicatorAttempt(Attempt):
    """Two ranks, which are threads of this process. Their groups are made first, and not judged."""

    unlimited = 1

    def __init__(self, suite: CommunicatorSuite) -> None:
        import torch

        self._suite = suite
        self._groups: list[StatelessGroup] = []
        self._stack = ExitStack()
        self._ranks: dict[int, DeviceCommunicator] = {}
        self._are_used = False
        # Made here, so that only what the communicator allocates can fail.
        self._given = [torch.ones(_NUMBERS, dtype=torch.float32).to(suite.device) for _ in _RANKS]
        self._got: dict[int, list[Any]] = {}

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        return self._meet, self._make, self._call, self._destroy

    def may_break(self, step: int) -> bool:
        return self.steps[step] == self._call

    def _together(self, call: Callable[[int], None]) -> None:
        together(*(partial(call, rank) for rank in _RANKS), within=4 * self.timeout_s)

    def _meet(self) -> None:
        self._groups = self._stack.enter_context(local_groups(self.timeout_s))(2)

    def _make(self) -> None:
        """A group whose ranks did not all make a communicator is within a call: then make another one."""
        if self._are_used:
            self._stack.close()
            self._meet()
        self._are_used = True

        def make(rank: int) -> None:
            with NamedExhaustion("building a device communicator"):  # as kvplug's own builder does
                self._ranks[rank] = self._suite.made(self._groups[rank], timeout_s=self.timeout_s)

        try:
            self._together(make)
        except BaseException:
            let_go(*(made.destroy for made in self._ranks.values()))
            self._ranks.clear()
            raise

    def _call(self) -> None:
        self._together(self._call_at)

    def _call_at(self, rank: int) -> None:
        made, timeout = self._ranks[rank], self.timeout_s
        mine = made.all_reduce(self._given[rank].fill_(1), timeout=timeout)
        got = [mine, made.all_gather(mine, timeout=timeout)]
        if rank == 0:
            made.send(mine, 1, timeout=timeout)
        else:
            got.append(made.recv(mine.shape, mine.dtype, 0, timeout=timeout))
        self._got[rank] = got

    def _destroy(self) -> None:
        self._together(lambda rank: self._ranks[rank].destroy())

    def check(self) -> None:
        import torch

        two = torch.full((_NUMBERS,), 2.0)
        for rank in _RANKS:
            for got, right in zip(self._got[rank], (two, two.repeat(2), two), strict=False):
                assert_same(right, got.cpu(), f"rank {rank} has a wrong result")

    def end(self) -> None:
        let_go(*(made.destroy for made in self._ranks.values()))
        let_go(self._stack.close)


class Exhaustion(CommunicatorSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    @property
    def running_out_processes(self) -> str:
        return self.ends_here or super().running_out_processes

    def attempt(self) -> CommunicatorAttempt:
        return CommunicatorAttempt(self)
