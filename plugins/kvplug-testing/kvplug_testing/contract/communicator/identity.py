"""A rank's identity, its group, and the calls for experts: the rest of the ABC (law COMM-1)."""

from __future__ import annotations

from typing import Any

import pytest

from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import WORLD, CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import check, tensor_of

SERVES_EXPERTS = {
    "ep": True,
    "ep:0": True,
    "ep_1": True,
    "dp-ep": True,
    "group ep 3": True,
    "": False,
    "tp:0": False,
    "step": False,
    "deep": False,
    "epoch": False,
    "prep:0": False,
}


class Identity(CommunicatorSuite):
    """Attributes, and the calls around experts."""

    @law("COMM-1")
    def test_a_rank_knows_its_place_in_the_group_and_among_all(self) -> None:
        ranks = self.ranks(ranks=[4, 1, 6], global_world_size=8, unique_name="tp:0")
        for number, globally in enumerate((4, 1, 6)):
            wanted = {
                "rank": number,
                "rank_in_group": number,
                "world_size": WORLD,
                "ranks": (4, 1, 6),
                "global_rank": globally,
                "global_world_size": 8,
                "unique_name": "tp:0",
                "device": self.device,
            }
            found = {name: ranks[number].begin(name).outcome().value for name in wanted}
            assert found == wanted

    @law("COMM-1")
    def test_a_group_of_all_needs_to_be_told_nothing(self) -> None:
        ranks = self.ranks(2)
        for number in range(2):
            names = ("rank", "global_rank", "ranks", "global_world_size", "is_ep_communicator", "use_all2all")
            found = [ranks[number].begin(name).outcome().value for name in names]
            assert found == [number, number, (0, 1), 2, False, False]

    @law("COMM-1")
    @pytest.mark.parametrize("name", list(SERVES_EXPERTS))
    def test_it_serves_experts_if_its_name_has_ep_as_a_word(self, name: str) -> None:
        ranks = self.ranks(1, unique_name=name, data_parallel_size=2, all2all_backend="naive")
        found = ranks[0].begin("is_ep_communicator").outcome().value
        assert found is SERVES_EXPERTS[name], f"{name!r} {'serves' if found else 'does not serve'} experts"
        assert ranks[0].begin("use_all2all").outcome().value is SERVES_EXPERTS[name]
        assert ranks[0].begin("all2all_backend").outcome().value == "naive"

    @law("COMM-1")
    def test_experts_without_data_parallelism_need_no_all_to_all(self) -> None:
        ranks = self.ranks(1, unique_name="ep:0", data_parallel_size=1)
        assert ranks[0].begin("use_all2all").outcome().value is False

    @law("COMM-1")
    def test_without_an_all_to_all_manager_dispatch_and_combine_change_nothing(self) -> None:
        ranks = self.ranks(2, unique_name="ep:0")
        if ranks[0].begin("use_all2all").outcome().value:
            pytest.skip(f"{self.called} has an all-to-all manager with one data-parallel rank")
        three = [
            tensor_of("float32", (4, 2), 0),
            tensor_of("float32", (4, 1), 1),
            tensor_of("int64", (4, 1), 2),
        ]
        extra = [tensor_of("float32", (4,), 3)]
        for rank in ranks.every:
            check(rank.begin("dispatch", *three).outcome().value, three, "dispatch")
            *same, more = rank.begin("dispatch", *three, True, extra).outcome().value
            check([*same, *more], [*three, *extra], "dispatch with extra tensors")
            check(
                rank.begin("dispatch_router_logits", *three[:2]).outcome().value,
                three[:2],
                "of router logits",
            )
            *same, more = (
                rank.begin("dispatch_router_logits", *three[:2], extra_tensors=extra).outcome().value
            )
            check([*same, *more], [*three[:2], *extra], "dispatch of router logits with extra tensors")
            check([rank.begin("combine", three[0]).outcome().value], [three[0]], "combine")

    @law("COMM-1")
    def test_modules_that_want_to_prepare_are_called_where_it_serves_experts(self) -> None:
        for name, wanted in (("ep:0", 2), ("tp:0", 0)):
            ranks: Any = self.ranks(1, unique_name=name)
            if self.ends_are_processes:
                pytest.skip("a model cannot be sent to another process")
            model = FakeModel()
            ranks[0].made.prepare_communication_buffer_for_model(model)
            assert [each for module in model.found for each in module.seen] == [ranks[0].made] * wanted


class FakeExperts:
    """A module with ``prepare_communication_buffer``."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def prepare_communication_buffer(self, communicator: Any) -> None:
        self.seen.append(communicator)


class FakeModel:
    """A stand-in for a torch module: it lists its modules, including itself."""

    def __init__(self) -> None:
        self.found = [FakeExperts(), FakeExperts()]

    def modules(self) -> list[Any]:
        return [self, object(), *self.found]
