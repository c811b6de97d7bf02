"""A rank's identity, its group, and the calls for experts: the rest of the ABC (law COMM-1)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import WORLD, check, tensor_of

_SERVE_EXPERTS = ("ep", "ep:0", "ep_1", "dp-ep", "group ep 3")
_DO_NOT = ("", "tp:0", "step", "deep", "epoch", "prep:0")


class Identity(CommunicatorSuite):
    """Attributes, and the calls around experts."""

    @law("COMM-1")
    def test_a_rank_knows_its_place_in_the_group_and_among_all(self) -> None:
        usual: dict[str, Any] = {"world_size": WORLD, "device": self.device}
        group: dict[str, Any] = {"ranks": (4, 1, 6), "global_world_size": 8, "unique_name": "tp:0"}
        everybody: dict[str, Any] = {"ranks": (0, 1, 2), "global_world_size": 3, "use_all2all": False}
        for context, known in ((group, group), (dict[str, Any](), everybody)):
            ranks = self.ranks(**context)
            for rank in ranks.every:
                place = {"rank": rank.number, "rank_in_group": rank.number}
                wanted = {**usual, **known, **place, "global_rank": known["ranks"][rank.number]}
                assert {name: rank.call(name).value for name in wanted} == wanted

    @law("COMM-1")
    def test_it_serves_experts_if_its_name_has_ep_as_a_word(self) -> None:
        for name in (*_SERVE_EXPERTS, *_DO_NOT):
            for data_parallel_size in (1, 2):
                rank, *_ = self.ranks(
                    1, unique_name=name, data_parallel_size=data_parallel_size, all2all_backend="naive"
                ).every
                serves = name in _SERVE_EXPERTS
                assert rank.call("is_ep_communicator").value is serves, f"{name!r}, which has ep: {serves}"
                assert rank.call("use_all2all").value is (serves and data_parallel_size > 1)
                assert rank.call("all2all_backend").value == "naive"

    @law("COMM-1")
    def test_without_an_all_to_all_manager_dispatch_and_combine_change_nothing(self) -> None:
        ranks = self.ranks(2, unique_name="ep:0")
        if ranks[0].call("use_all2all").value:
            pytest.skip(f"{self.called} has an all-to-all manager with one data-parallel rank")
        three = [
            tensor_of("float32", (4, 2), 0),
            tensor_of("float32", (4, 1), 1),
            tensor_of("int64", (4, 1), 2),
        ]
        extra = [tensor_of("float32", (4,), 3)]
        for rank in ranks.every:
            for method, given in (("dispatch", three), ("dispatch_router_logits", three[:2])):
                check(rank.call(method, *given).value, given, method)
                *same, more = rank.call(method, *given, extra_tensors=extra).value
                check([*same, *more], [*given, *extra], f"{method} with extra tensors")
            check([rank.call("combine", three[0]).value], [three[0]], "combine")

    @law("COMM-1")
    def test_modules_that_want_to_prepare_are_called_where_it_serves_experts(self) -> None:
        if self.ends_are_processes:
            pytest.skip("a model cannot be sent to another process")
        for name, is_called in (("ep:0", True), ("tp:0", False)):
            made = self.ranks(1, unique_name=name)[0].made
            model = FakeModel()
            made.prepare_communication_buffer_for_model(model)
            assert model.prepared == [made] * is_called


class FakeModel:
    """A stand-in for a torch module, the only one of its modules that wants to prepare."""

    def __init__(self) -> None:
        self.prepared: list[Any] = []

    def modules(self) -> list[Any]:
        return [self, object()]

    def prepare_communication_buffer(self, communicator: Any) -> None:
        self.prepared.append(communicator)
