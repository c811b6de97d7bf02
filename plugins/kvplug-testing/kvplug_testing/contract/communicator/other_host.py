"""The ranks are on two hosts (capability ``cross_host``). See :mod:`kvplug_testing.hosts`."""

from __future__ import annotations

from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import check, joined, tensor_of, total

FAR = 1
"""The rank on host 1; the others are on host 0."""
WORLD = 3


class OtherHost(CommunicatorSuite):
    """Three ranks in processes of their own, one of them on another host."""

    @law("COMM-1", needs="another_host")
    def test_collectives_of_ranks_on_two_hosts_give_every_rank_the_result(self) -> None:
        ranks = self._ranks()
        for shape in ((3,), (300, 1000)):
            given = [tensor_of("float32", shape, rank) for rank in range(WORLD)]
            what = f"of float32 {list(shape)} on two hosts"
            found = ranks.values("all_reduce", lambda rank: [given[rank]])  # noqa: B023
            check(found, [total(given)] * WORLD, f"all_reduce {what}")
            found = ranks.values("all_gather", lambda rank: [given[rank], 0])  # noqa: B023
            check(found, [joined(given, 0)] * WORLD, f"all_gather {what}")

    def _ranks(self) -> Ranks:
        return self.ranks_at([FAR if rank == FAR else 0 for rank in range(WORLD)])
