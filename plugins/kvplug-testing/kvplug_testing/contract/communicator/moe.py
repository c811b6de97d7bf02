"""Tokens go to their experts and back (law COMM-4), and what a rank is (COMM-1)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from kvplug.transport import TensorMismatchError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.refusals import still_works
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import (
    HIDDEN,
    WORLD,
    check,
    each_rank,
    joined,
    tensor_of,
    tokens,
    total,
)
from kvplug_testing.contract.ends import LocalHandle

_SERVE_EXPERTS = ("ep", "ep:0", "ep_1", "dp-ep", "group ep 3")
_DO_NOT = ("", "tp:0", "step", "epoch", "prep:0")


def check_layer(ranks: Ranks, given: Sequence[list[Any]], owners: Sequence[int], *, parallel: bool) -> None:
    """The tokens of ``owners`` come once, and so do extra tensors. What all ranks make of them is added, and
    each rank gets its own rows.
    """
    import torch

    world, counts = len(given), [len(given[rank][0]) for rank in owners]
    extras = [torch.arange(len(each[0])) + 100 * rank for rank, each in enumerate(given)]
    plain = ranks.values("dispatch", [[*each, parallel] for each in given])
    args = [[*each, parallel, [extra]] for each, extra in zip(given, extras, strict=True)]
    *brought, more = zip(*ranks.values("dispatch", args), strict=True)
    for at, found in enumerate(brought):
        check(found, [joined([given[rank][at] for rank in owners], 0)] * world, f"dispatch, tensor {at}")
        check([each[at] for each in plain], found, f"dispatch without extra tensors, tensor {at}")
    check([extra for (extra,) in more], [joined([extras[rank] for rank in owners], 0)] * world, "the extra")
    args = [[*each[:2], parallel] for each in given]
    for at, found in enumerate(zip(*ranks.values("dispatch_router_logits", args), strict=True)):
        check(found, brought[at], f"dispatch_router_logits, tensor {at}")
    made = each_rank("float32", (sum(counts), HIDDEN), world)
    rows = total(made).split(counts)
    wanted = [rows[rank * len(owners) // world] for rank in range(world)]
    check(ranks.values("combine", [[each, parallel] for each in made]), wanted, f"combine of {world} ranks")


class ExpertLayers(CommunicatorSuite):
    """``dispatch``, ``dispatch_router_logits`` and ``combine``, in a group that exchanges experts' tokens."""

    @law("COMM-4")
    @pytest.mark.parametrize("counts", [[3], [5, 0], [1, 4, 0, 2], [0, 0]], ids=str)
    def test_tokens_of_all_ranks_come_and_their_sums_go_back(self, counts: list[int]) -> None:
        world = len(counts)
        size = max(2, world)
        ranks = self.ranks(world, unique_name="ep:0", data_parallel_size=size)
        for seed in range(2):
            given = [tokens(count, seed + rank) for rank, count in enumerate(counts)]
            check_layer(ranks, given, range(world), parallel=bool(seed))

    @law("COMM-4")
    def test_ranks_that_share_their_tokens_get_the_whole_sum_and_tokens_are_brought_once(self) -> None:
        ranks = self.ranks(4, unique_name="ep:0", data_parallel_size=2)
        for counts in ([3, 1], [0, 2]):
            shared = [tokens(counts[rank // 2], rank // 2) for rank in range(4)]
            check_layer(ranks, shared, (0, 2), parallel=False)
            parts = [tokens(counts[rank // 2] + rank % 2, rank) for rank in range(4)]
            check_layer(ranks, parts, range(4), parallel=True)
        for outcome in ranks.raised("dispatch", parts, TensorMismatchError):
            assert "is_sequence_parallel" in outcome.text, str(outcome)

    @law("COMM-4", "COMM-3")
    def test_tokens_that_do_not_fit_are_refused_at_every_rank(self) -> None:
        ranks = self.ranks(2, unique_name="ep:0", data_parallel_size=2)
        right = tokens(3, 0)
        for args in (
            [right, [right[0], right[1][:2], right[2]]],  # missing rows at one rank
            [right, [tensor_of("float32", (3, HIDDEN + 1), 0), *right[1:]]],
            [[*right, False], [*right, True]],
            [[*right, False, []], [*right, False, [right[0]]]],
        ):
            ranks.raised("dispatch", args, TensorMismatchError)
        ranks.raised("combine", [[right[0]]] * 2, TensorMismatchError)  # nothing was dispatched
        ranks.values("dispatch", [right] * 2)
        ranks.raised("combine", [[right[0]]] * 2, TensorMismatchError)  # 3 rows of 6
        ranks.values("combine", [[tensor_of("float32", (6, 2), 0)]] * 2)
        still_works(ranks)

    @law("COMM-4")
    def test_in_a_group_that_exchanges_no_tokens_dispatch_and_combine_change_nothing(self) -> None:
        ranks = self.ranks(2, unique_name="ep:0")
        if ranks.call(0, "use_all2all"):
            pytest.skip(f"{self.called} exchanges experts' tokens with one data-parallel rank")
        given = tokens(4, 0)
        check(ranks.call(0, "dispatch", *given, extra_tensors=[given[1]])[:3], given, "dispatch")
        check(ranks.call(0, "dispatch_router_logits", *given[:2]), given[:2], "dispatch_router_logits")
        check([ranks.call(0, "combine", given[0])], [given[0]], "combine")

    # -- what a rank is --------------------------------------------------------------------------

    @law("COMM-1")
    def test_a_rank_has_its_place_in_the_group_and_among_all(self) -> None:
        group: dict[str, Any] = {"ranks": (4, 1, 6), "global_world_size": 8, "unique_name": "tp:0"}
        for context in (group, {}):
            ranks = self.ranks(WORLD, **context)
            found = {"global_world_size": WORLD, "ranks": (0, 1, 2), **context, "world_size": WORLD}
            for rank in range(WORLD):
                place = {"rank": rank, "rank_in_group": rank, "global_rank": found["ranks"][rank]}
                for name, wanted in {**found, **place}.items():
                    assert ranks.call(rank, name) == wanted, f"{name} of rank {rank} is not {wanted}"

    @law("COMM-1")
    @pytest.mark.parametrize("name", [*_SERVE_EXPERTS, *_DO_NOT])
    def test_it_serves_experts_if_its_name_has_ep_as_a_word(self, name: str) -> None:
        serves = name in _SERVE_EXPERTS
        for size in (1, 2):
            ranks = self.ranks(1, unique_name=name, data_parallel_size=size)
            assert ranks.call(0, "is_ep_communicator") is serves, f"{name!r}, which has ep: {serves}"
            assert ranks.call(0, "use_all2all") is (serves and size > 1)
            if isinstance(rank := ranks.every[0], LocalHandle):  # a model is not sent to a process
                prepared: list[Any] = []
                module = SimpleNamespace(prepare_communication_buffer=prepared.append)
                model = SimpleNamespace(modules=partial(list, [module, object()]))
                rank.end.thing.prepare_communication_buffer_for_model(model)
                assert prepared == [rank.end.thing] * serves
