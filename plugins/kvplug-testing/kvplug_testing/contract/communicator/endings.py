"""Sleep (law COMM-5), the end of a communicator that is alone or asleep, and a second thread."""

from __future__ import annotations

from kvplug import ClosedError, TransportError
from kvplug.transport import BusyError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.missing import METHODS
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, check_raised
from kvplug_testing.contract.communicator.tensors import check, each_rank, total


class Endings(CommunicatorSuite):
    """How a communicator sleeps and ends."""

    @law("COMM-5")
    def test_between_suspend_and_resume_nothing_is_done_and_afterwards_everything(self) -> None:
        ranks = self.ranks(2)
        given = each_rank("float32", (3,), 2)
        args = [[each] for each in given]
        for _ in range(2):
            for rank in (*ranks.every, *ranks.every):
                assert not rank.call("suspend").error
            assert ranks[0].call("suspended").value is True
            for method in METHODS:
                ranks.raised(method, args, TransportError, timeout=1.0)
            check_raised(ranks[0].call("send", given[0], timeout=1.0), TransportError)
            resuming = [rank.begin("resume") for rank in ranks.every]
            assert not [str(each.outcome()) for each in resuming if each.outcome().error]
            assert not ranks[0].call("resume").error
            assert ranks[0].call("suspended").value is False
            check(ranks.values("all_reduce", args), [total(given)] * 2, "all_reduce")
            ranks.values("synchronize", [[], []])

    @law("COMM-5", "ALL-1")
    def test_what_sleeps_can_be_destroyed_and_so_can_one_rank_alone(self) -> None:
        ranks = self.ranks(2)
        for rank in ranks.every:
            assert not rank.call("suspend").error
            assert not rank.call("destroy").error
            for method in ("suspend", "resume"):
                check_raised(rank.call(method), ClosedError)
        alone = self.ranks(1)[0]
        assert not alone.call("destroy").error
        check_raised(alone.call("all_reduce", *each_rank("float32", (2,), 1)), ClosedError)

    @law("ALL-4")
    def test_a_second_thread_is_refused(self) -> None:
        ranks = self.ranks(2)
        given = each_rank("int64", (2,), 2)
        first = ranks[0].begin("all_reduce", given[0], timeout=waits.patience_s)
        first.check_blocked()
        check_raised(ranks[0].call("all_reduce", given[0], timeout=1.0), BusyError)
        second = ranks[1].call("all_reduce", given[1], timeout=waits.patience_s)
        check([first.outcome().value, second.value], [total(given)] * 2, "the first thread's all_reduce")
