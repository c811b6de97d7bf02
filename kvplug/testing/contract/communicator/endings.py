"""Who takes part (law COMM-2), deadlines, ranks that leave or die, and ends."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvplug.errors import BusyError, ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.testing import peers
from kvplug.testing.contract import base
from kvplug.testing.contract.base import Call, law, until
from kvplug.testing.contract.communicator.collectives import check, tensor_of, total
from kvplug.testing.contract.communicator.suite import WORLD, CommunicatorSuite, Outcome, check_raised
from kvplug.testing.contract.recipes import judged_by

DEADLINE_S = 0.4
METHODS = ["all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "gather", "broadcast"]


def names(outcome: Outcome, rank: int) -> None:
    said = f"rank {rank} is missing, and it is not named: {outcome}"
    assert re.search(rf"\brank {rank}\b", outcome.text), said


class Endings(CommunicatorSuite):
    """Ranks that do not come, and ends."""

    @law("COMM-2", "ALL-4")
    @pytest.mark.parametrize("method", METHODS)
    def test_a_rank_that_does_not_come_is_named_at_all_others(self, method: str) -> None:
        ranks = self.ranks()
        for missing in (1,):
            pending = [
                ranks[rank].begin(method, tensor_of("float32", (3,), rank), timeout=DEADLINE_S)
                for rank in range(WORLD)
                if rank != missing
            ]
            found = [each.outcome() for each in pending]
            for outcome in found:
                check_raised(outcome, TimeoutError)
                names(outcome, missing)
            longest = max(outcome.took_s for outcome in found)
            assert longest > DEADLINE_S * 0.9, f"a deadline of {DEADLINE_S} s, and it took {longest:.3f} s"

    @law("COMM-2", "ALL-4")
    def test_rank_0_may_be_the_one_that_does_not_come(self) -> None:
        ranks = self.ranks()
        pending = [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=DEADLINE_S)
            for rank in (1, 2)
        ]
        for each in pending:
            check_raised(each.outcome(), TimeoutError)
            names(each.outcome(), 0)

    @law("ALL-4", "COMM-2")
    def test_send_and_recv_end_at_their_deadlines_and_name_the_other_rank(self) -> None:
        import torch

        ranks = self.ranks(2)
        sending = ranks[0].begin("send", tensor_of("float32", (2,), 0), 1, timeout=DEADLINE_S).outcome()
        check_raised(sending, TimeoutError)
        names(sending, 1)
        others = self.ranks(2)
        receiving = others[1].begin("recv", (2,), torch.float32, 0, timeout=DEADLINE_S).outcome()
        check_raised(receiving, TimeoutError)
        names(receiving, 0)

    @law("ALL-4")
    def test_where_nothing_is_said_the_contexts_time_applies(self) -> None:
        ranks = self.ranks(2, timeout_s=DEADLINE_S)
        check_raised(ranks[0].begin("all_reduce", tensor_of("float32", (2,), 0)).outcome(), TimeoutError)

    @law("ALL-4")
    def test_without_a_deadline_a_rank_waits_for_the_others(self) -> None:
        ranks = self.ranks(2, timeout_s=0.2)
        given = [tensor_of("int64", (2,), rank) for rank in range(2)]
        first = ranks[0].begin("all_reduce", given[0], timeout=None)
        assert first.is_blocked(), str(first.outcome())
        second = ranks[1].begin("all_reduce", given[1], timeout=base.patience_s)
        found = [first.outcome().value, second.outcome().value]
        check(found, [total(given)] * 2, "all_reduce with a rank that came late")

    @law("COMM-2")
    def test_after_a_rank_was_waited_for_in_vain_everybody_is_told_and_nobody_waits(self) -> None:
        ranks = self.ranks()
        for pending in [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=DEADLINE_S)
            for rank in (0, 2)
        ]:
            check_raised(pending.outcome(), TimeoutError)
        for rank in (0, 2):
            later = ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=None).outcome()
            check_raised(later, TransportError)
        late = ranks[1].begin("all_reduce", tensor_of("float32", (3,), 1), timeout=2.0).outcome()
        assert late.error, f"the late rank was given {late.value}, though the others had given up"
        check_raised(late, KvplugError)

    @law("COMM-2", "ALL-2")
    @pytest.mark.parametrize("method", METHODS)
    def test_a_rank_that_is_gone_is_named_at_all_others(self, method: str) -> None:
        ranks = self.ranks()
        gone = 2  # not the one that keeps a group's store
        pending = [
            ranks[rank].begin(method, tensor_of("float32", (3,), rank), timeout=base.patience_s)
            for rank in (0, 1)
        ]
        assert all(each.is_blocked() for each in pending), f"it went on without rank {gone}"
        ranks[gone].leave()
        for each in pending:
            check_raised(each.outcome(), PeerGoneError)
            names(each.outcome(), gone)

    @law("COMM-2", "ALL-2")
    def test_a_rank_that_left_before_is_not_waited_for(self) -> None:
        ranks = self.ranks()
        ranks[2].leave()
        for each in [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=base.patience_s)
            for rank in (0, 1)
        ]:
            check_raised(each.outcome(), PeerGoneError, TransportError)
            names(each.outcome(), 2)

    @law("ALL-2")
    def test_a_receiver_hears_that_the_sender_is_gone(self) -> None:
        import torch

        ranks = self.ranks()
        pending = ranks[0].begin("recv", (2,), torch.float32, 2, timeout=base.patience_s)
        assert pending.is_blocked()
        ranks[2].leave()
        check_raised(pending.outcome(), PeerGoneError)

    @law("ALL-2", "ALL-5", needs="far_processes")
    def test_when_the_first_rank_is_killed_all_others_hear_it(self) -> None:
        ranks = self.ranks()
        pending = [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=base.patience_s)
            for rank in (1, 2)
        ]
        assert all(each.is_blocked() for each in pending)
        ranks[0].leave()
        for each in pending:
            check_raised(each.outcome(), PeerGoneError)

    @law("ALL-3", "COMM-2", needs="far_processes")
    def test_a_rank_that_is_stopped_is_alive_and_named(self) -> None:
        ranks = self.ranks()
        stopped: Any = ranks[2]
        stopped.child.stop()
        for each in [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=DEADLINE_S)
            for rank in (0, 1)
        ]:
            check_raised(each.outcome(), TimeoutError)
            names(each.outcome(), 2)
        stopped.child.cont()

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
        for method in (*METHODS, "reduce_scatterv", "send"):
            check_raised(rank.begin(method, given, timeout=1.0).outcome(), ClosedError)
        check_raised(rank.begin("recv", (2,), torch.float32, timeout=1.0).outcome(), ClosedError)

    @law("ALL-1")
    def test_a_call_that_is_blocked_is_woken_when_its_rank_is_destroyed(self) -> None:
        ranks = self.ranks(2)
        pending = ranks[1].begin("all_reduce", tensor_of("float32", (2,), 1), timeout=None)
        assert pending.is_blocked()
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
        first = ranks[0].begin("all_reduce", given[0], timeout=base.patience_s)
        assert first.is_blocked()
        check_raised(ranks[0].begin("all_reduce", given[0], timeout=1.0).outcome(), BusyError)
        second = ranks[1].begin("all_reduce", given[1], timeout=base.patience_s)
        check(
            [first.outcome().value, second.outcome().value],
            [total(given)] * 2,
            "the first thread's all_reduce",
        )

    @law("ALL-6", needs="forked_processes", timeout_s=120)
    def test_in_a_forked_child_it_is_destroyed(self) -> None:
        child = self.start_forked(f"{__name__}:_forks", self.recipe(), timeout_s=90)
        assert child.result(timeout=90) == ["ClosedError"]

    @law("ALL-7")
    def test_groups_that_have_ended_leave_nothing(self) -> None:
        with self.scope():
            self.ranks(2)  # what is made once and kept is made by this one
        before = peers.Belongings.of()
        for _ in range(5):
            with self.scope():
                ranks = self.ranks(2)
                ranks.values("all_reduce", lambda rank: [tensor_of("float32", (1000,), rank)])
        until(
            lambda: not peers.Belongings.of().beyond(before),
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


def _forks(parent: peers.Parent, recipe: dict[str, Any]) -> list[str]:
    """In a process of its own: make the only rank of a group, fork, and use it in the fork's child."""
    import os
    import warnings

    from kvplug.group.group import StatelessGroup

    suite = judged_by(recipe)
    with StatelessGroup.create("unix:", rank=0, world_size=1) as group, suite.made(group) as made:
        seen, told = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # that there are threads is the point
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
