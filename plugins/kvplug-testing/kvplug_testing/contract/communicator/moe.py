"""Tokens go to their experts and back (law COMM-4), compared with a mixture of experts on one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvplug.transport import TensorMismatchError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.refusals import still_works
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import HIDDEN, NUM_EXPERTS, check, joined, tensor_of, tokens


def layer(given: Sequence[Any], experts: Sequence[int] = range(NUM_EXPERTS)) -> Any:
    """The result of ``experts`` for these tokens; with all experts, the layer's result."""
    import torch

    hidden, weights, ids = given
    found = torch.zeros_like(hidden)
    for expert in experts:
        chance = torch.Generator().manual_seed(expert)
        matrix = torch.randint(-2, 3, (HIDDEN, HIDDEN), generator=chance).float()
        found += (weights * (ids == expert)).sum(1, keepdim=True) * (hidden @ matrix)
    return found


def check_layer(ranks: Ranks, given: Sequence[list[Any]], owners: Sequence[int], *, parallel: bool) -> None:
    """Each rank gets the layer's result; the tokens of ``owners`` come once, and so do extra tensors."""
    import torch

    world = len(given)
    extras = [torch.arange(len(each[0])) + 100 * rank for rank, each in enumerate(given)]
    plain = ranks.values("dispatch", [[*each, parallel] for each in given])
    args = [[*each, parallel, [extra]] for each, extra in zip(given, extras, strict=True)]
    *brought, more = zip(*ranks.values("dispatch", args), strict=True)
    for at, found in enumerate(brought):
        check(found, [joined([given[rank][at] for rank in owners], 0)] * world, f"dispatch, tensor {at}")
        check([each[at] for each in plain], found, f"dispatch without extra tensors, tensor {at}")
    check([extra for (extra,) in more], [joined([extras[rank] for rank in owners], 0)] * world, "the extra")
    made = [layer(each, range(rank, NUM_EXPERTS, world)) for rank, each in enumerate(plain)]
    combined = ranks.values("combine", [[each, parallel] for each in made])
    check(combined, [layer(each) for each in given], f"experts of {world} ranks")


class ExpertLayers(CommunicatorSuite):
    """``dispatch``, ``dispatch_router_logits`` and ``combine``, with an all-to-all manager."""

    @law("COMM-4")
    @pytest.mark.parametrize("backend", ["naive", "allgather_reducescatter"])
    @pytest.mark.parametrize("counts", [[3], [5, 0], [1, 4, 0, 2], [0, 0]], ids=str)
    def test_a_layer_of_experts_gives_what_it_gives_alone(self, backend: str, counts: list[int]) -> None:
        world = len(counts)
        size = max(2, world)
        ranks = self.ranks(world, unique_name="ep:0", data_parallel_size=size, all2all_backend=backend)
        for seed in range(2):
            given = [tokens(count, 10 * seed + rank) for rank, count in enumerate(counts)]
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

    @law("COMM-4")
    def test_router_logits_go_with_their_tokens(self) -> None:
        ranks = self.ranks(2, unique_name="ep:0", data_parallel_size=2)
        hidden = [tensor_of("bfloat16", (3 - rank, 2), rank) for rank in range(2)]
        logits = [tensor_of("float32", (3 - rank, 4), rank + 1) for rank in range(2)]
        args = [[*each, False, [each[1][:, :1]]] for each in zip(hidden, logits, strict=True)]
        for got, scores, (extra,) in ranks.values("dispatch_router_logits", args):
            wanted = joined(logits, 0)
            check([got, scores, extra], [joined(hidden, 0), wanted, wanted[:, :1]], "router logits")

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
    def test_without_an_all_to_all_manager_dispatch_and_combine_change_nothing(self) -> None:
        ranks = self.ranks(2, unique_name="ep:0")
        if ranks.ask(0, "use_all2all"):
            pytest.skip(f"{self.called} has an all-to-all manager with one data-parallel rank")
        given = tokens(4, 0)
        check(ranks.ask(0, "dispatch", *given, extra_tensors=[given[1]])[:3], given, "dispatch")
        check(ranks.ask(0, "dispatch_router_logits", *given[:2]), given[:2], "dispatch_router_logits")
        check([ranks.ask(0, "combine", given[0])], [given[0]], "combine")
