"""Participation (law COMM-2): deadlines, and ranks that do not call, leave, die or stop."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import RecvOp, SendOp
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import CallOutcome
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, check_raised
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, tensor_of

DEADLINE_S = 0.4
METHODS = ["all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "gather", "broadcast"]
_SMALL = (3,)


def check_names(outcome: CallOutcome, rank: int) -> None:
    said = f"rank {rank} is missing, and it is not named: {outcome}"
    assert re.search(rf"\brank {rank}\b", outcome.text), said


def _without(missing: int) -> Mapping[int, list[Any]]:
    """The arguments of a collective at all other ranks."""
    return {rank: [tensor_of("float32", _SMALL, rank)] for rank in range(WORLD) if rank != missing}


class Missing(CommunicatorSuite):
    """Ranks that a call needs and that do not take part. The general laws judge groups of two."""

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
        for missing in (1, 0) if method == "all_reduce" else (1,):
            found = {
                each.rank: each
                for each in self.ranks().outcomes(method, _without(missing), timeout=DEADLINE_S)
            }
            waiting = self.who_waits(method, [*found])
            for rank in waiting:
                check_raised(found[rank], TimeoutError)
                check_names(found[rank], missing)
            longest = max((found[rank].took_s for rank in waiting), default=DEADLINE_S)
            assert longest > DEADLINE_S * 0.9, f"a deadline of {DEADLINE_S} s, and it took {longest:.3f} s"

    @law("ALL-4", "COMM-2")
    @pytest.mark.parametrize("method", ["send", "recv", "batch_isend_irecv"])
    def test_between_two_ranks_a_call_ends_at_its_deadline_and_names_the_other(self, method: str) -> None:
        given = tensor_of("float32", (2,), 0)
        args: dict[str, list[Any]] = {
            "send": [given, 1],
            "recv": [(2,), given.dtype, 1],
            "batch_isend_irecv": [[SendOp(given, 1), RecvOp(given, 1)]],
        }
        found = self.ranks(2)[0].call(method, *args[method], timeout=DEADLINE_S)
        if self.who_waits(method, [0]) or found.error:
            check_raised(found, TimeoutError)
            check_names(found, 1)

    @law("COMM-2")
    def test_after_a_rank_was_waited_for_in_vain_everybody_is_told_and_nobody_waits(self) -> None:
        ranks = self.ranks()
        ranks.raised("all_reduce", _without(1), TimeoutError, timeout=DEADLINE_S)
        ranks.raised("all_reduce", _without(1), TransportError, timeout=None)
        late = ranks[1].call("all_reduce", tensor_of("float32", _SMALL, 1), timeout=2.0)
        assert late.error, f"the late rank was given {late.value}, though the others had given up"
        check_raised(late, KvplugError)

    @law("COMM-2", "ALL-2")
    @pytest.mark.parametrize("method", METHODS)
    def test_a_rank_that_is_gone_is_named_at_all_others(self, method: str) -> None:
        ranks = self.ranks()
        gone = 2  # not the rank that runs the group's store
        pending = ranks.begin(method, _without(gone))
        waiting = [pending[rank] for rank in self.who_waits(method, (0, 1))]
        for each in waiting:
            each.check_blocked(f" for rank {gone}")
        ranks[gone].leave()
        for each in waiting:
            outcome = each.outcome()
            check_raised(outcome, PeerGoneError)
            check_names(outcome, gone)

    @law("COMM-2", "ALL-2")
    def test_a_rank_that_left_before_is_not_waited_for(self) -> None:
        ranks = self.ranks()
        ranks[2].leave()
        for outcome in ranks.raised("all_reduce", _without(2), PeerGoneError, TransportError):
            check_names(outcome, 2)

    @law("ALL-5", "ALL-2", "ALL-3", "COMM-2", needs="remote_processes", timeout_s=120)
    @pytest.mark.parametrize("method", ["all_reduce", "all_gather", "reduce_scatter"])
    @pytest.mark.parametrize("what", ["killed", "stopped"])
    def test_a_rank_that_is_killed_or_stopped_in_the_middle_is_named_or_was_not_needed(
        self, what: str, method: str
    ) -> None:
        given = [[each] for each in each_rank("float32", (3 << 17,))]
        whole = self.ranks().values(method, given)
        for moment in (0.0, 0.001, 0.003, 0.01, 0.03):
            with self.scope():
                ranks = self.ranks()
                pending = ranks.begin(method, given, timeout=waits.patience_s if what == "killed" else 2.0)
                time.sleep(moment)
                if what == "killed":
                    ranks[2].leave()
                else:
                    ranks[2].child.stop()
                for rank, each in enumerate(pending[:2]):
                    outcome = each.outcome()
                    if outcome.error:
                        check_raised(outcome, PeerGoneError if what == "killed" else TimeoutError)
                        check_names(outcome, 2)
                    else:
                        check(
                            [outcome.value], [whole[rank]], f"{method}, {moment} s before a rank was {what}"
                        )
                if what == "stopped":
                    ranks[2].child.cont()
