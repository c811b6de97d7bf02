"""One rank: its identity (law COMM-1), its sleep (COMM-5), and a second thread."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplug import ClosedError, TransportError
from kvplug.transport import BusyError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.missing import METHODS
from kvplug_testing.contract.communicator.refusals import still_works
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, total
from kvplug_testing.contract.ends import LocalHandle

_SERVE_EXPERTS = ("ep", "ep:0", "ep_1", "dp-ep", "group ep 3")
_DO_NOT = ("", "tp:0", "step", "epoch", "prep:0")


class OneRank(CommunicatorSuite):
    """What a rank says of itself, and when it takes part."""

    @law("COMM-1")
    def test_a_rank_knows_its_place_in_the_group_and_among_all(self) -> None:
        group: dict[str, Any] = {"ranks": (4, 1, 6), "global_world_size": 8, "unique_name": "tp:0"}
        for context, ranks_ in ((group, (4, 1, 6)), ({}, (0, 1, 2))):
            ranks = self.ranks(**context)
            for rank in range(WORLD):
                place = {"rank": rank, "rank_in_group": rank, "global_rank": ranks_[rank]}
                wanted = {
                    "global_world_size": WORLD,
                    **context,
                    "world_size": WORLD,
                    "ranks": ranks_,
                    **place,
                }
                assert {name: ranks.ask(rank, name) for name in wanted} == wanted

    @law("COMM-1")
    def test_it_serves_experts_if_its_name_has_ep_as_a_word(self) -> None:
        for name in (*_SERVE_EXPERTS, *_DO_NOT):
            for size in (1, 2):
                ranks = self.ranks(1, unique_name=name, data_parallel_size=size, all2all_backend="naive")
                serves = name in _SERVE_EXPERTS
                assert ranks.ask(0, "is_ep_communicator") is serves, f"{name!r}, which has ep: {serves}"
                assert ranks.ask(0, "use_all2all") is (serves and size > 1)
                assert ranks.ask(0, "all2all_backend") == "naive"

    @law("COMM-1")
    def test_modules_that_want_to_prepare_are_called_where_it_serves_experts(self) -> None:
        for name, is_called in (("ep:0", True), ("tp:0", False)):
            (rank,) = self.ranks(1, unique_name=name).every
            if not isinstance(rank, LocalHandle):
                pytest.skip("a model cannot be sent to another process")
            prepared: list[Any] = []
            module = SimpleNamespace(prepare_communication_buffer=prepared.append)
            model = SimpleNamespace(modules=lambda module=module: [module, object()])
            rank.end.thing.prepare_communication_buffer_for_model(model)
            assert prepared == [rank.end.thing] * is_called

    @law("COMM-5")
    def test_between_suspend_and_resume_nothing_is_done_and_afterwards_everything(self) -> None:
        ranks = self.ranks(2)
        both: list[list[Any]] = [[], []]
        args = [[each] for each in each_rank("float32", (3,), 2)]
        for _ in range(2):
            for _ in range(2):
                ranks.values("suspend", both)
            assert ranks.ask(0, "suspended") is True
            for method in METHODS:
                ranks.raised(method, args, TransportError, timeout=1.0)
            ranks.raised("send", {0: args[0]}, TransportError, timeout=1.0)
            for _ in range(2):
                ranks.values("resume", both)
            assert ranks.ask(0, "suspended") is False
            still_works(ranks)
            ranks.values("synchronize", both)
        ranks.values("suspend", both)
        ranks.values("destroy", both)
        for method in ("suspend", "resume"):
            ranks.raised(method, both, ClosedError)

    @law("ALL-4")
    def test_a_second_thread_is_refused(self) -> None:
        ranks = self.ranks(2)
        given = each_rank("int64", (2,), 2)
        first = ranks.begin("all_reduce", {0: [given[0]]})[0].check_blocked()
        ranks.raised("all_reduce", {0: [given[0]]}, BusyError, timeout=1.0)
        second = ranks.ask(1, "all_reduce", given[1])
        check([first.result()[0], second], [total(given)] * 2, "the first thread's all_reduce")
