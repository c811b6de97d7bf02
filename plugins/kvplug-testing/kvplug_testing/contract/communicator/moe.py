"""Tokens go to their experts and back (law COMM-4), compared with a mixture of experts on one rank."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from kvplug.transport import TensorMismatchError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.refusals import still_works
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import check, joined, tensor_of

BACKENDS = ("naive", "allgather_reducescatter")
NUM_EXPERTS = 5
HIDDEN = 6
TOP_K = 2


@attrs.frozen
class Tokens:
    """One rank's tokens. Whole numbers and powers of two, so that the order of additions does not matter."""

    hidden: Any
    weights: Any
    ids: Any

    @classmethod
    def of(cls, count: int, seed: int) -> Tokens:
        import torch

        made = torch.Generator().manual_seed(seed)
        hidden = torch.randint(-4, 5, (count, HIDDEN), generator=made).float()
        weights = 0.5 ** torch.randint(1, 4, (count, TOP_K), generator=made)
        ids = torch.randint(0, NUM_EXPERTS, (count, TOP_K), generator=made)
        return cls(hidden, weights, ids)

    @property
    def all(self) -> list[Any]:
        return [self.hidden, self.weights, self.ids]


def layer(hidden: Any, weights: Any, ids: Any, experts: Sequence[int] = range(NUM_EXPERTS)) -> Any:
    """The result of ``experts`` for these tokens; with all experts, the layer's result."""
    import torch

    found = torch.zeros_like(hidden)
    for expert in experts:
        matrix = torch.randint(
            -2, 3, (HIDDEN, HIDDEN), generator=torch.Generator().manual_seed(expert)
        ).float()
        found += (weights * (ids == expert)).sum(1, keepdim=True) * (hidden @ matrix)
    return found


def through_experts(
    ranks: Ranks, given: Sequence[Tokens], *, is_sequence_parallel: bool, extra: bool
) -> tuple[list[Any], list[Any]]:
    """Each rank's result, and the dispatched extra tensors (which hold each token's position)."""
    import torch

    more = [[torch.arange(len(each.hidden)) + 100 * rank] for rank, each in enumerate(given)]
    args = [[*each.all, is_sequence_parallel] for each in given]
    brought = ranks.values(
        "dispatch", [[*each, its_own] if extra else each for each, its_own in zip(args, more, strict=True)]
    )
    extras = [each[3][0] for each in brought] if extra else []
    assert all(len(each) == 3 + extra for each in brought), f"dispatch returned {brought[0]}"
    local = [range(rank, NUM_EXPERTS, len(ranks)) for rank in range(len(ranks))]
    made = [layer(each[0], each[1], each[2], mine) for each, mine in zip(brought, local, strict=True)]
    return ranks.values("combine", [[each, is_sequence_parallel] for each in made]), extras


class ExpertLayers(CommunicatorSuite):
    """``dispatch``, ``dispatch_router_logits`` and ``combine``, with an all-to-all manager."""

    @law("COMM-4")
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("counts", [[5, 0], [2, 2], [1, 4, 0, 2], [0, 0, 7], [0, 0]], ids=str)
    def test_a_layer_of_experts_gives_what_it_gives_alone(self, backend: str, counts: list[int]) -> None:
        world = len(counts)
        ranks = self.ranks(world, unique_name="ep:0", data_parallel_size=world, all2all_backend=backend)
        for seed, extra in itertools.product(range(2), (False, True)):
            given = [Tokens.of(count, 10 * seed + rank) for rank, count in enumerate(counts)]
            found, extras = through_experts(ranks, given, is_sequence_parallel=bool(seed), extra=extra)
            check(found, [layer(*each.all) for each in given], f"experts of {world} ranks by {backend}")
            if extra:
                places = [tensor_of("int64", (0,), 0)]
                places += [given[0].ids.new_tensor(range(n)) + 100 * rank for rank, n in enumerate(counts)]
                check(extras, [joined(places, 0)] * world, "the extra tensors")

    @law("COMM-4")
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_ranks_that_share_their_tokens_get_the_whole_sum_and_tokens_are_brought_once(
        self, backend: str
    ) -> None:
        ranks = self.ranks(4, unique_name="ep:0", data_parallel_size=2, all2all_backend=backend)
        for counts in ([3, 1], [0, 2]):
            given = [Tokens.of(counts[rank // 2], rank // 2) for rank in range(4)]
            found, extras = through_experts(ranks, given, is_sequence_parallel=False, extra=True)
            check(found, [layer(*each.all) for each in given], f"shared tokens by {backend}")
            assert [len(each) for each in extras] == [sum(counts)] * 4
            given = [Tokens.of(counts[rank // 2] + rank % 2, rank) for rank in range(4)]
            found, extras = through_experts(ranks, given, is_sequence_parallel=True, extra=True)
            check(found, [layer(*each.all) for each in given], f"tokens in sequence parallel by {backend}")
            assert [len(each) for each in extras] == [2 * sum(counts) + 2] * 4

    @law("COMM-4")
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_router_logits_go_with_their_tokens(self, backend: str) -> None:
        ranks = self.ranks(2, unique_name="ep:0", data_parallel_size=2, all2all_backend=backend)
        hidden = [tensor_of("bfloat16", (3 - rank, 2), rank) for rank in range(2)]
        logits = [tensor_of("float32", (3 - rank, 4), rank + 1) for rank in range(2)]
        found = ranks.values("dispatch_router_logits", list(zip(hidden, logits, strict=True)))
        for at, each in enumerate((hidden, logits)):
            check([two[at] for two in found], [joined(each, 0)] * 2, "dispatch of router logits")
        more = [[logits[rank][:, :1]] for rank in range(2)]
        found = ranks.values(
            "dispatch_router_logits", [[hidden[rank], logits[rank], False, more[rank]] for rank in range(2)]
        )
        wanted = joined([each[0] for each in more], 0)
        check([three[2][0] for three in found], [wanted] * 2, "dispatch of router logits with extra tensors")

    @law("COMM-4")
    def test_with_one_rank_experts_get_its_own_tokens(self) -> None:
        ranks = self.ranks(1, unique_name="ep:0", data_parallel_size=2)
        given = [Tokens.of(3, 1)]
        for extra in (False, True):
            found, _ = through_experts(ranks, given, is_sequence_parallel=False, extra=extra)
            check(found, [layer(*given[0].all)], "experts of one rank")

    @law("COMM-4", "COMM-3")
    @pytest.mark.parametrize("backend", BACKENDS)
    def test_tokens_that_do_not_fit_are_refused_at_every_rank(self, backend: str) -> None:
        ranks = self.ranks(2, unique_name="ep:0", data_parallel_size=2, all2all_backend=backend)
        right = Tokens.of(3, 0).all
        short = [right[0], right[1][:2], right[2]]
        wide = [tensor_of("float32", (3, HIDDEN + 1), 0), *right[1:]]
        for args in (
            [right, short],  # missing rows at one rank
            [right, wide],  # rows of another shape
            [[*right, False], [*right, True]],
            [[*right, False, []], [*right, False, [right[0]]]],
        ):
            ranks.raised("dispatch", args, TensorMismatchError)
        ranks.raised("combine", [[right[0]]] * 2, TensorMismatchError)  # nothing was dispatched
        still_works(ranks)
        ranks.values("dispatch", [right] * 2)
        ranks.raised("combine", [[right[0]]] * 2, TensorMismatchError)  # 3 rows of 6
        check(
            ranks.values("combine", [[tensor_of("float32", (6, 2), 0) * 0]] * 2),
            [right[0][:, :2] * 0] * 2,
            "",
        )

    @law("COMM-4", "COMM-3")
    def test_ranks_that_are_to_share_their_tokens_and_do_not_are_refused(self) -> None:
        ranks = self.ranks(4, unique_name="ep:0", data_parallel_size=2)
        given = [Tokens.of(3 + rank % 2, rank).all for rank in range(4)]
        for outcome in ranks.raised("dispatch", given, TensorMismatchError):
            assert "is_sequence_parallel" in outcome.text, str(outcome)
        ranks.values("dispatch", [[*each, True] for each in given])
        made = tensor_of("float32", (14, 2), 0)
        ranks.raised("combine", [[made, False]] * 4, TensorMismatchError)
        ranks.values("combine", [[made, True]] * 4)
