"""Ranks that do not come, or leave (law COMM-2), that sleep (COMM-5), and a second thread of one.

The general laws judge groups of two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest

from kvplug import ClosedError, KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.refusals import METHODS, still_works
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import WORLD, each_rank, tensor_of
from kvplug_testing.contract.ends import Outcome, RemoteHandle

DEADLINE_S: Final = 0.4


def _names(outcome: Outcome, rank: int) -> None:
    assert re.search(rf"\brank {rank}\b", outcome.text), f"rank {rank} is missing and not named: {outcome}"


def _without(missing: int) -> Mapping[int, list[Any]]:
    """The arguments of a collective at all other ranks."""
    return {rank: [tensor_of("float32", (3,), rank)] for rank in range(WORLD) if rank != missing}


class TakingPart(CommunicatorSuite):
    """Ranks that a call needs and that do not take part."""

    @law("COMM-2", "ALL-4")
    @pytest.mark.parametrize(("method", "missing"), [*((each, 1) for each in METHODS), ("all_reduce", 0)])
    def test_a_rank_that_does_not_come_is_named_and_later_calls_fail_at_once(
        self, method: str, missing: int
    ) -> None:
        ranks, others = self.ranks(), _without(missing)
        for outcome in ranks.raised(method, others, TimeoutError, timeout=DEADLINE_S):
            _names(outcome, missing)
        ranks.raised(method, others, TransportError, timeout=None)
        late = {missing: [tensor_of("float32", (3,), missing)]}
        ranks.raised(method, late, KvplugError, timeout=2.0)

    @law("COMM-2", "ALL-2", "ALL-5")
    @pytest.mark.parametrize("method", METHODS)
    def test_a_rank_that_is_gone_is_named_at_all_others(self, method: str) -> None:
        ranks = self.ranks()
        pending = ranks.begin(method, _without(2))  # rank 0 runs the group's store
        for each in pending.values():
            each.check_blocked()
        gone = ranks.every[2]
        if isinstance(gone, RemoteHandle):
            gone.child.kill()
        else:
            gone.run("abort")
        for each in pending.values():
            _names(each.raised(PeerGoneError), 2)

    @law("COMM-5")
    def test_between_suspend_and_resume_nothing_is_done_and_afterwards_everything(self) -> None:
        ranks = self.ranks(2)
        both: list[list[Any]] = [[], []]
        args = [[each] for each in each_rank("float32", (3,), 2)]
        for _ in range(2):
            for _ in range(2):
                ranks.values("suspend", both)
            assert ranks.call(0, "suspended") is True
            for method in METHODS:
                ranks.raised(method, args, TransportError, timeout=1.0)
            ranks.raised("send", {0: args[0]}, TransportError, timeout=1.0)
            for _ in range(2):
                ranks.values("resume", both)
            assert ranks.call(0, "suspended") is False
            still_works(ranks)
            ranks.values("synchronize", both)
        ranks.values("suspend", both)
        ranks.values("destroy", both)
        for method in ("suspend", "resume"):
            ranks.raised(method, both, ClosedError)
