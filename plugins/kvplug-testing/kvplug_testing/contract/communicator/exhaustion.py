"""A resource runs out while a communicator is made, used or closed (law ALL-9)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from kvplug import StatelessGroup
from kvplug.transport import DeviceCommunicator, NamedExhaustion
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract import exhaustion
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.exhaustion import Attempt, let_go, together

_WORLD: Final = 2
_LARGE: Final = 3 << 20
"""Bytes of a tensor that needs more than a little memory."""


class CommunicatorAttempt(Attempt):
    """Two ranks, which are threads of this process. Their groups are made first, and not judged."""

    unlimited = 1

    def __init__(self, suite: CommunicatorSuite) -> None:
        import torch

        self._suite = suite
        self._groups: list[StatelessGroup] = []
        self._ranks: dict[int, DeviceCommunicator] = {}
        self._are_used = False
        self._small = torch.ones(1000, dtype=torch.float32)
        self._large = torch.full((_LARGE,), 7, dtype=torch.uint8)
        # Each rank's own, made here, so that only what the communicator allocates can fail.
        each = range(_WORLD)
        self._summed = [self._small.clone().to(suite.device) for _ in each]
        self._filled = [(self._large * (rank == 0)).to(suite.device) for rank in each]
        self._given = [self._large.clone().to(suite.device) for _ in each]
        self._got: dict[int, list[Any]] = {}

    @property
    def steps(self) -> Sequence[Callable[[], None]]:
        return self._meet, self._make, self._call, self._destroy

    def may_break(self, step: int) -> bool:
        return self.steps[step] == self._call

    def _meet(self) -> None:
        listener = StatelessGroup.listen("unix:")
        addresses = [listener if rank == 0 else listener.contact for rank in range(_WORLD)]
        made: dict[int, StatelessGroup] = {}

        def join(rank: int) -> None:
            made[rank] = StatelessGroup.create(
                addresses[rank],
                rank=rank,
                world_size=_WORLD,
                timeout=self.timeout_s,
                timeout_s=self.timeout_s,
            )

        together(*(partial(join, rank) for rank in range(_WORLD)), within=4 * self.timeout_s)
        self._groups = [made[rank] for rank in range(_WORLD)]

    def _make(self) -> None:
        """A group whose ranks did not all make a communicator is within a call: then make another one."""
        if self._are_used:
            self._end_groups()
            self._meet()
        self._are_used = True

        def make(rank: int) -> None:
            with NamedExhaustion("building a device communicator"):  # as kvplug's own builder does
                self._ranks[rank] = self._suite.made(self._groups[rank], timeout_s=self.timeout_s)

        try:
            together(*(partial(make, rank) for rank in range(_WORLD)), within=4 * self.timeout_s)
        except BaseException:
            let_go(*(made.destroy for made in self._ranks.values()))
            self._ranks.clear()
            raise

    def _call(self) -> None:
        self._got = {rank: [] for rank in self._ranks}
        together(*(partial(self._call_at, rank) for rank in self._ranks), within=4 * self.timeout_s)

    def _call_at(self, rank: int) -> None:
        made, got, timeout = self._ranks[rank], self._got[rank], self.timeout_s
        given = self._given[rank]
        got.append(made.all_reduce(self._summed[rank].fill_(1), timeout=timeout))
        got.append(made.broadcast(self._filled[rank], 0, timeout=timeout))
        got.append(made.all_gather(given, timeout=timeout))
        if rank == 0:
            made.send(given, 1, timeout=timeout)
        else:
            got.append(made.recv(given.shape, given.dtype, 0, timeout=timeout))

    def _destroy(self) -> None:
        together(*(made.destroy for made in self._ranks.values()), within=4 * self.timeout_s)

    def check(self) -> None:
        wanted = [
            self._small * _WORLD,
            self._large,
            self._large.repeat(_WORLD),
            self._large,
        ]
        for rank, got in self._got.items():
            assert len(got) == 3 + (rank == 1), f"rank {rank} has {len(got)} results"
            for number, (given, right) in enumerate(zip(got, wanted, strict=False)):
                assert_same(right, given.cpu(), f"call {number} gave rank {rank} a wrong result")

    def end(self) -> None:
        let_go(*(made.destroy for made in self._ranks.values()))
        self._end_groups()

    def _end_groups(self) -> None:
        let_go(*(group.abort for group in reversed(self._groups)))


class Exhaustion(CommunicatorSuite, exhaustion.Exhaustion):
    """Descriptors, threads, memory and space run out."""

    @property
    def running_out_processes(self) -> str:
        if self.ends_are_processes:
            return f"the ranks of {self.called} are processes here (ends_are_processes)"
        return super().running_out_processes

    def attempt(self) -> Attempt:
        return CommunicatorAttempt(self)
