"""Sleep (law COMM-5) and the end of a communicator."""

from __future__ import annotations

from kvplug import ClosedError, TransportError
from kvplug.transport import BusyError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.missing import METHODS
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, check_raised
from kvplug_testing.contract.communicator.tensors import check, tensor_of, total


class Endings(CommunicatorSuite):
    """How a communicator sleeps and ends."""

    # -- sleep -----------------------------------------------------------------------------------------

    @law("COMM-5")
    def test_between_suspend_and_resume_nothing_is_done_and_afterwards_everything(self) -> None:
        ranks = self.ranks(2)
        given = [tensor_of("float32", (3,), rank) for rank in range(2)]
        for _ in range(2):
            for rank in (*ranks.every, *ranks.every):
                assert not rank.begin("suspend").outcome().error
            assert ranks[0].begin("suspended").outcome().value is True
            for method in METHODS:
                for each in ranks.begin(method, lambda rank: [given[rank]], timeout=1.0):
                    check_raised(each.outcome(), TransportError)
            check_raised(ranks[0].begin("send", given[0], timeout=1.0).outcome(), TransportError)
            resuming = [rank.begin("resume") for rank in ranks.every]
            assert not [str(each.outcome()) for each in resuming if each.outcome().error]
            assert not ranks[0].begin("resume").outcome().error
            assert ranks[0].begin("suspended").outcome().value is False
            check(ranks.values("all_reduce", lambda rank: [given[rank]]), [total(given)] * 2, "all_reduce")
            assert not [str(each) for each in ranks.outcomes("synchronize", lambda _: []) if each.error]

    @law("COMM-5", "ALL-1")
    def test_what_sleeps_can_be_destroyed(self) -> None:
        ranks = self.ranks(2)
        for rank in ranks.every:
            assert not rank.begin("suspend").outcome().error
            assert not rank.begin("destroy").outcome().error
            for method in ("suspend", "resume"):
                check_raised(rank.begin(method).outcome(), ClosedError)

    # -- ends ------------------------------------------------------------------------------------------

    @law("ALL-1")
    def test_one_rank_alone_is_destroyed_like_any_other(self) -> None:
        ranks = self.ranks(1)
        assert not ranks[0].begin("destroy").outcome().error
        check_raised(ranks[0].begin("all_reduce", tensor_of("float32", (2,), 0)).outcome(), ClosedError)

    @law("ALL-4")
    def test_a_second_thread_is_refused(self) -> None:
        ranks = self.ranks(2)
        given = [tensor_of("int64", (2,), rank) for rank in range(2)]
        first = ranks[0].begin("all_reduce", given[0], timeout=waits.patience_s)
        first.check_blocked()
        check_raised(ranks[0].begin("all_reduce", given[0], timeout=1.0).outcome(), BusyError)
        second = ranks[1].begin("all_reduce", given[1], timeout=waits.patience_s)
        check(
            [first.outcome().value, second.outcome().value],
            [total(given)] * 2,
            "the first thread's all_reduce",
        )
