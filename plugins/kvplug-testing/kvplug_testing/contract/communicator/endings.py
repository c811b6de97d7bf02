"""Sleep (law COMM-5) and the end of a communicator."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug import ClosedError, TransportError
from kvplug.transport import BusyError
from kvplug_testing import peers, waits
from kvplug_testing.contract import leaving
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.collectives import check, tensor_of, total
from kvplug_testing.contract.communicator.missing import METHODS
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, RemoteRank, check_raised
from kvplug_testing.contract.suite_ref import suite_from_ref
from kvplug_testing.waits import Call, until


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
    def test_destroying_twice_is_destroying_once_and_afterwards_every_call_says_so(self) -> None:
        import torch

        ranks = self.ranks(2)
        rank = ranks[0]
        for _ in range(2):
            assert not rank.begin("destroy").outcome().error
        assert rank.begin("destroyed").outcome().value is True
        given = tensor_of("float32", (2,), 0)
        for method in (*METHODS, "reduce_scatterv", "send", "combine"):
            check_raised(rank.begin(method, given, timeout=1.0).outcome(), ClosedError)
        check_raised(rank.begin("dispatch", given, given, given, timeout=1.0).outcome(), ClosedError)
        check_raised(rank.begin("batch_isend_irecv", [], timeout=1.0).outcome(), ClosedError)
        check_raised(rank.begin("synchronize", timeout=1.0).outcome(), ClosedError)
        check_raised(rank.begin("recv", (2,), torch.float32, timeout=1.0).outcome(), ClosedError)

    @law("ALL-1")
    def test_a_call_that_is_blocked_is_woken_when_its_rank_is_destroyed(self) -> None:
        ranks = self.ranks(2)
        pending = ranks[1].begin("all_reduce", tensor_of("float32", (2,), 1), timeout=None)
        pending.check_blocked()
        assert not ranks[1].begin("destroy").outcome().error
        check_raised(pending.outcome(), ClosedError)

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

    @law("ALL-6", needs="forked_processes", timeout_s=120)
    def test_in_a_forked_child_it_is_destroyed(self) -> None:
        child = self.start_forked(f"{__name__}:_forks", self.suite_ref(), timeout_s=90)
        assert child.result(timeout=90) == ["ClosedError"]

    @law("ALL-8", needs="remote_and_forked_processes", timeout_s=120, level="quick")
    @pytest.mark.parametrize("way", leaving.WAYS)
    def test_a_program_that_leaves_during_a_collective_ends_with_its_own_code(self, way: str) -> None:
        ranks = self.ranks(2)
        ranks.values("all_reduce", lambda rank: [tensor_of("float32", (1000,), rank)])
        pending = ranks[0].begin("all_reduce", tensor_of("float32", (1000,), 0), timeout=waits.patience_s)
        pending.check_blocked()
        leaves = ranks[0]
        assert isinstance(leaves, RemoteRank)
        leaves.leave_program(way)

    @law("ALL-8", level="full", needs="remote_and_forked_processes", timeout_s=120)
    def test_so_does_a_forked_child(self) -> None:
        self.test_a_program_that_leaves_during_a_collective_ends_with_its_own_code("forked child")

    @law("ALL-7")
    def test_groups_that_have_ended_leave_nothing(self) -> None:
        with self.scope():
            self.ranks(2)  # creates everything that is created once and kept
        before = peers.Resources.of()
        for _ in range(5):
            with self.scope():
                ranks = self.ranks(2)
                ranks.values("all_reduce", lambda rank: [tensor_of("float32", (1000,), rank)])
        until(
            lambda: not peers.Resources.of().beyond(before),
            what="the end of everything that five groups had opened",
        )

    @law("ALL-7", level="full", timeout_s=300)
    def test_a_thousand_collectives_of_a_group_take_no_more_memory_than_ten(self) -> None:
        ranks = self.ranks(2)
        given = [tensor_of("float32", (100, 100), rank) for rank in range(2)]
        for _ in range(10):
            ranks.values("all_reduce", lambda rank: [given[rank]])
        pids = {rank.pid for rank in ranks.every}
        before = sum(map(_resident_kib, pids))
        for _ in range(1_000):
            ranks.values("all_reduce", lambda rank: [given[rank]])
        grown = sum(map(_resident_kib, pids)) - before
        assert grown < 20_000, f"1,000 collectives of 40 KB, and {grown:,} KiB of memory stayed"


def _forks(parent: peers.Parent, suite_ref: dict[str, Any]) -> list[str]:
    """In a separate process: make the only rank of a group, fork, and use it in the forked child."""
    import os
    import warnings

    from kvplug import StatelessGroup

    suite = suite_from_ref(suite_ref)
    with StatelessGroup.create("unix:", rank=0, world_size=1) as group, suite.made(group) as made:
        seen, told = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what this tests
            pid = os.fork()
        if pid == 0:
            word = "it died"
            try:
                made.all_reduce(tensor_of("float32", (2,), 0))
                word = "it worked"
            except Exception as e:
                word = type(e).__name__
            finally:
                os.write(told, word.encode())
                os._exit(0)
        os.close(told)
        with open(seen, encoding="utf-8") as answer:
            words = [answer.read()]
        os.waitpid(pid, 0)
        Call(lambda: made.all_reduce(tensor_of("float32", (2,), 0))).result()
        return words


def _resident_kib(pid: int) -> int:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
