"""Participation (law COMM-2): deadlines, and ranks that do not call, leave, die or stop."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import CallOutcome
from kvplug_testing.contract.communicator.suite import WORLD, CommunicatorSuite, check_raised
from kvplug_testing.contract.communicator.tensors import check, tensor_of

DEADLINE_S = 0.4
METHODS = ["all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "gather", "broadcast"]


def names(outcome: CallOutcome, rank: int) -> None:
    said = f"rank {rank} is missing, and it is not named: {outcome}"
    assert re.search(rf"\brank {rank}\b", outcome.text), said


class Missing(CommunicatorSuite):
    """Ranks that a call needs and that do not take part."""

    def who_waits(self, method: str, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that must wait for a missing rank: all, if ranks compare their calls first.
        Otherwise a rank that only sends may return at once, and a broadcast needs only its root.
        """
        if not self.compared_calls or method not in ("gather", "broadcast", "send"):
            return list(ranks)
        return [rank for rank in ranks if method == "gather" and rank == 0]

    @law("COMM-2", "ALL-4")
    @pytest.mark.parametrize("method", METHODS)
    def test_a_rank_that_does_not_come_is_named_at_all_others(self, method: str) -> None:
        ranks = self.ranks()
        pending = {
            rank: ranks[rank].begin(method, tensor_of("float32", (3,), rank), timeout=DEADLINE_S)
            for rank in (0, 2)
        }
        found = {rank: each.outcome() for rank, each in pending.items()}
        waiting = self.who_waits(method, (0, 2))
        for rank in waiting:
            check_raised(found[rank], TimeoutError)
            names(found[rank], 1)
        longest = max((found[rank].took_s for rank in waiting), default=DEADLINE_S)
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
        if self.who_waits("send", [0]) or sending.error:
            check_raised(sending, TimeoutError)
            names(sending, 1)
        others = self.ranks(2)
        receiving = others[1].begin("recv", (2,), torch.float32, 0, timeout=DEADLINE_S).outcome()
        check_raised(receiving, TimeoutError)
        names(receiving, 0)

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
        gone = 2  # not the rank that runs the group's store
        pending = {
            rank: ranks[rank].begin(method, tensor_of("float32", (3,), rank), timeout=waits.patience_s)
            for rank in (0, 1)
        }
        waiting = [pending[rank] for rank in self.who_waits(method, (0, 1))]
        for each in waiting:
            each.check_blocked(f" for rank {gone}")
        ranks[gone].leave()
        for each in waiting:
            check_raised(each.outcome(), PeerGoneError)
            names(each.outcome(), gone)

    @law("COMM-2", "ALL-2")
    def test_a_rank_that_left_before_is_not_waited_for(self) -> None:
        ranks = self.ranks()
        ranks[2].leave()
        for each in [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=waits.patience_s)
            for rank in (0, 1)
        ]:
            check_raised(each.outcome(), PeerGoneError, TransportError)
            names(each.outcome(), 2)

    @law("ALL-2", "ALL-5", needs="remote_processes")
    def test_when_the_first_rank_is_killed_all_others_hear_it(self) -> None:
        ranks = self.ranks()
        pending = [
            ranks[rank].begin("all_reduce", tensor_of("float32", (3,), rank), timeout=waits.patience_s)
            for rank in (1, 2)
        ]
        for each in pending:
            each.check_blocked()
        ranks[0].leave()
        for each in pending:
            check_raised(each.outcome(), PeerGoneError)

    @law("ALL-3", "COMM-2", needs="remote_processes")
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

    @law("ALL-5", "ALL-2", "COMM-2", needs="remote_processes", timeout_s=120)
    @pytest.mark.parametrize("method", ["all_reduce", "all_gather", "reduce_scatter"])
    def test_a_rank_that_is_killed_in_the_middle_is_named_or_was_not_needed(self, method: str) -> None:
        given = [tensor_of("float32", (3 << 17,), rank) for rank in range(WORLD)]
        whole = self.ranks().values(method, lambda rank: [given[rank]])
        for moment in (0.0, 0.001, 0.003, 0.01, 0.03):
            with self.scope():
                ranks = self.ranks()
                pending = ranks.begin(method, lambda rank: [given[rank]])
                time.sleep(moment)
                ranks[2].leave()
                for rank, each in enumerate(pending[:2]):
                    outcome = each.outcome()
                    if outcome.error:
                        check_raised(outcome, PeerGoneError)
                        names(outcome, 2)
                    else:
                        check(
                            [outcome.value], [whole[rank]], f"{method}, {moment} s before a rank was killed"
                        )

    @law("ALL-3", "COMM-2", needs="remote_processes", timeout_s=120)
    @pytest.mark.parametrize("method", ["all_reduce", "all_gather", "reduce_scatter"])
    def test_a_rank_that_is_stopped_in_the_middle_is_named_or_was_not_needed(self, method: str) -> None:
        given = [tensor_of("float32", (3 << 17,), rank) for rank in range(WORLD)]
        whole = self.ranks().values(method, lambda rank: [given[rank]])
        for moment in (0.0, 0.003, 0.01):
            with self.scope():
                ranks = self.ranks()
                pending = ranks.begin(method, lambda rank: [given[rank]], timeout=2.0)
                time.sleep(moment)
                stopped: Any = ranks[2]
                stopped.child.stop()
                for rank, each in enumerate(pending[:2]):
                    outcome = each.outcome()
                    if outcome.error:
                        check_raised(outcome, TimeoutError)
                        names(outcome, 2)
                    else:
                        check(
                            [outcome.value], [whole[rank]], f"{method}, {moment} s before a rank was stopped"
                        )
                stopped.child.cont()
