"""Participation (law COMM-2): ranks that do not call, or leave. The general laws judge groups of two."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import pytest

from kvplug import KvplugError, PeerGoneError, TimeoutError, TransportError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import WORLD, tensor_of
from kvplug_testing.contract.ends import Outcome, RemoteHandle

DEADLINE_S: Final = 0.4
METHODS: Final = ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter")
"""Collectives in which every rank waits for every other one, whether they compare their calls or not."""


def _names(outcome: Outcome, rank: int) -> None:
    assert re.search(rf"\brank {rank}\b", outcome.text), (
        f"rank {rank} is missing, and it is not named: {outcome}"
    )


def _without(missing: int) -> Mapping[int, list[Any]]:
    """The arguments of a collective at all other ranks."""
    return {rank: [tensor_of("float32", (3,), rank)] for rank in range(WORLD) if rank != missing}


class Missing(CommunicatorSuite):
    """Ranks that a call needs and that do not take part."""

    @law("COMM-2", "ALL-4")
    @pytest.mark.parametrize(("method", "missing"), [*((each, 1) for each in METHODS), ("all_reduce", 0)])
    def test_a_rank_that_does_not_come_is_named_at_all_others(self, method: str, missing: int) -> None:
        for outcome in self.ranks().raised(method, _without(missing), TimeoutError, timeout=DEADLINE_S):
            _names(outcome, missing)

    @law("COMM-2")
    def test_after_a_rank_was_waited_for_in_vain_everybody_is_told_and_nobody_waits(self) -> None:
        ranks = self.ranks()
        ranks.raised("all_reduce", _without(1), TimeoutError, timeout=DEADLINE_S)
        ranks.raised("all_reduce", _without(1), TransportError, timeout=None)
        ranks.raised("all_reduce", {1: [tensor_of("float32", (3,), 1)]}, KvplugError, timeout=2.0)

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
