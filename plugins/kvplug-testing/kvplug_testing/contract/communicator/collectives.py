"""The results of collectives (law COMM-1), against a slow model, whatever the order in which ranks call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvplug.kit import MOVED, SUMMED
from kvplug_testing import waits
from kvplug_testing.comparison import difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import Strided
from kvplug_testing.contract.communicator.suite import CommunicatorSuite
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, joined, tensor_of, total

SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (1, 1), (3, 6, 2), (0, 3), (4, 0)]


class Collectives(CommunicatorSuite):
    """The values that collectives return."""

    @law("COMM-1")
    @pytest.mark.parametrize("dtype", sorted(SUMMED))
    def test_all_reduce_is_the_sum_in_place_and_returns_its_input(self, dtype: str) -> None:
        ranks = self.ranks()
        if not self.takes(ranks[0], dtype, summing=True):
            pytest.skip(f"{self.called} does not sum {dtype}")
        for shape in [(), *SHAPES]:
            given = each_rank(dtype, shape)
            found = ranks.outcomes("all_reduce", [[each] for each in given])
            what = f"all_reduce of {dtype} {list(shape)}"
            assert not [str(each) for each in found if each.error], f"{what}: {found[0]}"
            check([each.value for each in found], [total(given)] * WORLD, what)
            check([each.first for each in found], [total(given)] * WORLD, f"{what}, in place")
            assert all(each.same for each in found), f"{what} did not return its input"

    @law("COMM-1")
    def test_a_sum_that_is_rounded_has_the_same_bits_at_every_rank(self) -> None:
        import torch

        chance = torch.Generator().manual_seed(5)
        given = [torch.randn(1000, generator=chance) * 10.0 ** (3 * rank) for rank in range(WORLD)]
        first, *others = self.ranks().values("all_reduce", [[each] for each in given])
        for rank, other in enumerate(others, 1):
            fault = difference(first.cpu(), other.cpu())
            assert not fault, f"ranks add in different orders: at rank {rank}, compared with rank 0, {fault}"

    @law("COMM-1")
    @pytest.mark.parametrize("dtype", sorted(MOVED))
    def test_all_gather_concatenates_in_the_order_of_ranks(self, dtype: str) -> None:
        ranks = self.ranks()
        if not self.takes(ranks[0], dtype):
            pytest.skip(f"{self.called} does not move {dtype}")
        for shape in SHAPES:
            given = each_rank(dtype, shape)
            for dim in range(-len(shape), len(shape)):
                found = ranks.values("all_gather", [[each, dim] for each in given])
                check(found, [joined(given, dim)] * WORLD, f"all_gather of {dtype} {list(shape)} along {dim}")

    @law("COMM-1")
    def test_where_nothing_is_said_dimension_and_sizes_have_their_defaults(self) -> None:
        ranks = self.ranks()
        given = each_rank("int64", (3, 3))
        args = [[each] for each in given]
        check(ranks.values("all_gather", args), [joined(given, -1)] * WORLD, "all_gather")
        check(ranks.values("all_gatherv", args), [joined(given, 0)] * WORLD, "all_gatherv")
        check(ranks.values("reduce_scatterv", args), total(given).split(1, -1), "reduce_scatterv")

    @law("COMM-1")
    def test_all_gatherv_takes_as_many_from_each_rank_as_sizes_say(self) -> None:
        ranks = self.ranks()
        for sizes, dim in itertools.product(([1, 2, 3], [0, 4, 1], [2, 0, 0], [0, 0, 0]), (0, 1, -1)):
            shapes = [[2, 5] for _ in sizes]
            for shape, size in zip(shapes, sizes, strict=True):
                shape[dim] = size
            given = [tensor_of("float32", shape, rank) for rank, shape in enumerate(shapes)]
            found = ranks.values("all_gatherv", [[each, dim, sizes] for each in given])
            check(found, [joined(given, dim)] * WORLD, f"all_gatherv along {dim} of {sizes}")

    @law("COMM-1")
    def test_a_small_part_and_a_large_one_are_gathered_in_one_call(self) -> None:
        sizes = [3, 3 << 17, 0]
        given = [tensor_of("float32", (size,), rank) for rank, size in enumerate(sizes)]
        found = self.ranks().values("all_gatherv", [[each, 0, sizes] for each in given])
        check(found, [joined(given, 0)] * WORLD, f"all_gatherv of {sizes}")

    @law("COMM-1")
    def test_all_gatherv_of_a_list_gives_a_list(self) -> None:
        sizes = [2, 0, 3]
        given = [
            [tensor_of("float32", (size, 2), rank), tensor_of("int64", (size,), rank)]
            for rank, size in enumerate(sizes)
        ]
        found = self.ranks().values("all_gatherv", [[each, 0, sizes] for each in given])
        assert all(type(each) is list and len(each) == 2 for each in found), f"a list of two gave {found[0]}"
        for at in range(2):
            wanted = joined([each[at] for each in given], 0)
            check([each[at] for each in found], [wanted] * WORLD, f"all_gatherv, tensor {at} of a list")

    @law("COMM-1")
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
    def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(self, dtype: str) -> None:
        ranks = self.ranks()
        if not self.takes(ranks[0], dtype, summing=True):
            pytest.skip(f"{self.called} does not sum {dtype}")
        shapes: dict[tuple[int, ...], Sequence[int]] = {
            (6,): (0, -1),
            (3, 2): (0,),
            (2, 6, 2): (1,),
            (2, 3): (-1,),
            (0, 2): (0,),
            (3, 0): (0,),
        }
        for shape, dim in [(shape, dim) for shape, dims in shapes.items() for dim in dims]:
            given = each_rank(dtype, shape)
            wanted = [piece.contiguous() for piece in total(given).split([shape[dim] // WORLD] * WORLD, dim)]
            found = ranks.values("reduce_scatter", [[each, dim] for each in given])
            check(found, wanted, f"reduce_scatter of {dtype} {list(shape)} along {dim}")

    @law("COMM-1")
    def test_reduce_scatterv_gives_each_rank_as_much_as_sizes_say(self) -> None:
        ranks = self.ranks()
        for sizes, dim in itertools.product(([1, 2, 3], [0, 4, 2], [6, 0, 0]), (0, 1, -1)):
            shape = [2, 2]
            shape[dim] = 6
            given = each_rank("float32", shape)
            found = ranks.values("reduce_scatterv", [[each, dim, sizes] for each in given])
            check(found, total(given).split(sizes, dim), f"reduce_scatterv along {dim} of {sizes}")

    @law("COMM-1")
    def test_gather_gives_all_to_one_rank_and_nothing_to_others(self) -> None:
        ranks = self.ranks()
        for shape, dim in (((2, 3), 0), ((2, 3), -1), ((0, 2), 0), ((4,), 0)):
            given = each_rank("float32", shape)
            for dst in range(WORLD):
                wanted: list[Any] = [None] * WORLD
                wanted[dst] = joined(given, dim)
                found = ranks.values("gather", [[each, dst, dim] for each in given])
                check(found, wanted, f"gather to rank {dst} of {list(shape)} along {dim}")

    @law("COMM-1")
    def test_broadcast_fills_every_ranks_tensor(self) -> None:
        ranks = self.ranks()
        for shape, src in itertools.product([(), *SHAPES], range(WORLD)):
            given = each_rank("float32", shape)
            found = ranks.outcomes("broadcast", [[each, src] for each in given])
            what = f"broadcast from rank {src} of {list(shape)}"
            check([each.first for each in found], [given[src]] * WORLD, what)
            assert all(each.same for each in found), f"{what} did not return its input"

    @law("COMM-1")
    def test_a_tensor_that_is_not_contiguous_gives_the_same(self) -> None:
        ranks = self.ranks()
        given = each_rank("float32", (3, 6))
        for method in ("all_reduce", "all_gather", "reduce_scatter", "gather", "broadcast"):
            plain = ranks.values(method, [[each] for each in given])
            found = ranks.outcomes(method, [[Strided(each)] for each in given])
            check([each.value for each in found], plain, f"{method} of a tensor that is not contiguous")
            if method in ("all_reduce", "broadcast"):
                check([each.first for each in found], plain, f"{method} in place of one not contiguous")

    @law("COMM-1")
    def test_inputs_are_left_as_they_were(self) -> None:
        ranks = self.ranks()
        given = each_rank("float32", (3, 6))
        for method in ("all_gather", "all_gatherv", "reduce_scatter", "reduce_scatterv", "gather"):
            found = ranks.outcomes(method, [[each] for each in given])
            check([each.first for each in found], given, f"the input of {method} after it")

    @law("COMM-1")
    def test_large_tensors_give_the_same(self) -> None:
        import torch

        ranks = self.ranks()
        seeds = [torch.Generator().manual_seed(rank) for rank in range(WORLD)]
        given = [torch.randint(0, 2**40, (100, 1000), generator=seed) for seed in seeds]
        args = [[each] for each in given]
        sizes = [0, 1, 999]
        check(ranks.values("all_reduce", args), [total(given)] * WORLD, "all_reduce")
        check(ranks.values("all_gather", args), [torch.cat(given, -1)] * WORLD, "all_gather")
        found = ranks.values("reduce_scatterv", [[each, -1, sizes] for each in given])
        check(found, total(given).split(sizes, -1), "reduce_scatterv")

    @law("COMM-1")
    def test_ranks_may_come_in_any_order(self) -> None:
        ranks = self.ranks()
        given = each_rank("int64", (3,))
        for method, wanted in (("all_reduce", total(given)), ("all_gather", joined(given, 0))):
            for order in itertools.permutations(range(WORLD)):
                pending = {}
                for rank in order:
                    pending[rank] = ranks[rank].begin(method, given[rank], timeout=waits.patience_s)
                    time.sleep(0.02)
                found = [pending[rank].outcome().value for rank in range(WORLD)]
                check(found, [wanted] * WORLD, f"{method} with ranks in the order {order}")

    @law("COMM-1")
    def test_many_collectives_one_after_the_other_do_not_get_mixed(self) -> None:
        import torch

        ranks = self.ranks(2)
        for number in range(100):
            given = [tensor_of("int64", (4,), rank + number) for rank in range(2)]
            method, wanted = ("all_reduce", total) if number % 2 else ("all_gather", torch.cat)
            found = ranks.values(method, [[each] for each in given])
            check(found, [wanted(given)] * 2, f"{method}, call {number}")

    @law("COMM-1")
    def test_with_one_rank_everything_is_its_own_input(self) -> None:
        ranks = self.ranks(1)
        given = tensor_of("float32", (2, 3), 1)
        for method in ("all_reduce", "all_gather", "all_gatherv", "reduce_scatter", "gather", "broadcast"):
            check(ranks.values(method, [[given]]), [given], f"{method} with one rank")
        check(ranks.values("reduce_scatterv", [[given, 0, [2]]]), [given], "reduce_scatterv with one rank")
