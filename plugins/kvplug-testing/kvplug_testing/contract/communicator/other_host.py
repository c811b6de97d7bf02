"""The ranks are on two hosts (capability ``cross_host``). See :mod:`kvplug_testing.hosts`."""

from __future__ import annotations

from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, joined, total


class OtherHost(CommunicatorSuite):
    """Three ranks in processes of their own, rank 1 on another host."""

    @law("COMM-1", needs="another_host")
    def test_collectives_of_ranks_on_two_hosts_give_every_rank_the_result(self) -> None:
        ranks = self.ranks_at([0, 1, 0])
        for shape in ((3,), (300, 1000)):
            given = each_rank("float32", shape)
            what = f"of float32 {list(shape)} on two hosts"
            found = ranks.values("all_reduce", [[each] for each in given])
            check(found, [total(given)] * WORLD, f"all_reduce {what}")
            found = ranks.values("all_gather", [[each, 0] for each in given])
            check(found, [joined(given, 0)] * WORLD, f"all_gather {what}")
