"""The results of collectives (law COMM-1), against a slow model, whatever the order in which ranks call."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from typing import Any

import pytest

from kvplug import UnsupportedError
from kvplug.kit import MOVED, SUMMED
from kvplug_testing.comparison import difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, joined, tensor_of, total

SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (1, 1), (3, 6, 2), (0, 3), (4, 0)]
_DIMS = (0, 1, -1)


def _by_default(given: Sequence[Any]) -> dict[str, list[Any]]:
    """What collectives give each rank where nothing is said of dimension, sizes and ranks."""
    world = len(given)
    shares = [*total(given).split(given[0].shape[-1] // world, -1)]
    return {
        "all_reduce": [total(given)] * world,
        "broadcast": [given[0]] * world,
        "all_gather": [joined(given, -1)] * world,
        "all_gatherv": [joined(given, 0)] * world,
        "reduce_scatter": shares,
        "reduce_scatterv": shares,
        "gather": [joined(given, -1), *[None] * (world - 1)],
    }


class Collectives(CommunicatorSuite):
    """The values that collectives return."""

    def is_claimed(self, ranks: Ranks, method: str, dtype: str) -> bool:
        """Whether the transport claims that dtype. What it does not claim must be refused."""
        claimed = ranks.ask(0, "supports", self.device, dtype, summing=method == "all_reduce")
        if not claimed:
            ranks.raised(method, [[each] for each in each_rank(dtype, (3,))], UnsupportedError)
        return bool(claimed)

    @law("COMM-1", "COMM-3")
    @pytest.mark.parametrize("dtype", sorted({*SUMMED, *MOVED, "complex64"}))
    def test_all_reduce_is_the_sum_in_place_and_returns_its_input(self, dtype: str) -> None:
        ranks = self.ranks()
        for shape in [(), *SHAPES] if self.is_claimed(ranks, "all_reduce", dtype) else ():
            given = each_rank(dtype, shape)
            self._fills(ranks, "all_reduce", [[each] for each in given], total(given))

    @law("COMM-1")
    def test_broadcast_fills_every_ranks_tensor(self) -> None:
        ranks = self.ranks()
        for shape, src in itertools.product([(), *SHAPES], range(WORLD)):
            given = each_rank("float32", shape)
            self._fills(ranks, "broadcast", [[each, src] for each in given], given[src])

    def _fills(self, ranks: Ranks, method: str, args: list[Any], wanted: Any) -> None:
        values, firsts, are_same = zip(*ranks.results(method, args), strict=True)
        what = f"{method} of {wanted.dtype} {[*wanted.shape]}"
        check(values, [wanted] * WORLD, what)
        check(firsts, [wanted] * WORLD, f"{what}, in place")
        assert all(are_same), f"{what} did not return its input"

    @law("COMM-1")
    def test_a_sum_that_is_rounded_has_the_same_bits_at_every_rank(self) -> None:
        import torch

        chance = torch.Generator().manual_seed(5)
        given = [torch.randn(1000, generator=chance) * 10.0 ** (3 * rank) for rank in range(WORLD)]
        first, *others = self.ranks().values("all_reduce", [[each] for each in given])
        for other in others:
            assert not (fault := difference(first, other)), f"ranks add in different orders: {fault}"

    @law("COMM-1", "COMM-3")
    @pytest.mark.parametrize("dtype", sorted(MOVED))
    def test_all_gather_concatenates_in_the_order_of_ranks(self, dtype: str) -> None:
        ranks = self.ranks()
        for shape in SHAPES if self.is_claimed(ranks, "all_gather", dtype) else ():
            given = each_rank(dtype, shape)
            for dim in range(-len(shape), len(shape)):
                found = ranks.values("all_gather", [[each, dim] for each in given])
                check(found, [joined(given, dim)] * WORLD, f"all_gather of {dtype} {list(shape)} along {dim}")

    @law("COMM-1")
    def test_all_gatherv_takes_as_many_from_each_rank_as_sizes_say(self) -> None:
        ranks = self.ranks()
        # One part is large: all ranks gather in the same way.
        for sizes, dim in itertools.product(([1, 2, 3], [0, 4, 1], [0, 0, 0], [3, 3 << 17, 0]), _DIMS):
            shapes = [[2, 2] for _ in sizes]
            for shape, size in zip(shapes, sizes, strict=True):
                shape[dim] = size
            given = [tensor_of("float32", shape, rank) for rank, shape in enumerate(shapes)]
            found = ranks.values("all_gatherv", [[each, dim, sizes] for each in given])
            check(found, [joined(given, dim)] * WORLD, f"all_gatherv along {dim} of {sizes}")
            lists = ranks.values("all_gatherv", [[[each, each.long()], dim, sizes] for each in given])
            for at, wanted in enumerate((found[0], found[0].long())):
                check([each[at] for each in lists], [wanted] * WORLD, f"all_gatherv, tensor {at} of a list")

    @law("COMM-1")
    @pytest.mark.parametrize("dtype", ["float32", "int64"])
    def test_reduce_scatter_gives_each_rank_its_part_of_the_sum(self, dtype: str) -> None:
        ranks = self.ranks()
        for sizes, dim in itertools.product(([2, 2, 2], [1, 2, 3], [0, 4, 2], [6, 0, 0]), _DIMS):
            shape = [2, 2]
            shape[dim] = 6
            given = each_rank(dtype, shape)
            method, more = ("reduce_scatter", []) if len({*sizes}) == 1 else ("reduce_scatterv", [sizes])
            found = ranks.values(method, [[each, dim, *more] for each in given])
            check(found, total(given).split(sizes, dim), f"{method} along {dim} of {sizes}")

    @law("COMM-1")
    def test_gather_gives_all_to_one_rank_and_nothing_to_others(self) -> None:
        ranks = self.ranks()
        for shape, dim, dst in itertools.product(((2, 3), (0, 2)), (0, -1), range(WORLD)):
            given = each_rank("float32", shape)
            wanted: list[Any] = [None] * WORLD
            wanted[dst] = joined(given, dim)
            found = ranks.values("gather", [[each, dst, dim] for each in given])
            check(found, wanted, f"gather to rank {dst} of {list(shape)} along {dim}")

    @law("COMM-1")
    @pytest.mark.parametrize(("world", "form"), [(WORLD, ""), (WORLD, "strided"), (1, "")])
    def test_where_nothing_is_said_arguments_have_defaults_and_inputs_stay(
        self, world: int, form: str
    ) -> None:
        ranks = self.ranks(world)
        given = each_rank("float32", (3, 3), world)
        for method, wanted in _by_default(given).items():
            values, firsts, _ = zip(*ranks.results(method, [[each] for each in given], form), strict=True)
            check(values, wanted, f"{method} of {form} tensors of {world} ranks")
            in_place = method in ("all_reduce", "broadcast")
            check(firsts, wanted if in_place else given, f"the input of {method} after it")

    @law("COMM-1")
    def test_large_tensors_give_the_same(self) -> None:
        import torch

        ranks = self.ranks()
        seeds = [torch.Generator().manual_seed(rank) for rank in range(WORLD)]
        given = [torch.randint(0, 2**40, (100, 999), generator=seed) for seed in seeds]
        for method, wanted in _by_default(given).items():
            check(ranks.values(method, [[each] for each in given]), wanted, method)

    @law("COMM-1")
    def test_ranks_may_come_in_any_order_and_calls_do_not_get_mixed(self) -> None:
        ranks = self.ranks()
        orders = [*itertools.permutations(range(WORLD))]
        for number in range(60):
            given = each_rank("int64", (number % 7,))
            method, wanted = ("all_reduce", total(given)) if number % 2 else ("all_gather", joined(given, 0))
            pending = {}
            for rank in orders[number % len(orders)]:
                pending.update(ranks.begin(method, {rank: [given[rank]]}))
                if number < len(orders):
                    time.sleep(0.02)
            found = [pending[rank].result()[0] for rank in range(WORLD)]
            check(found, [wanted] * WORLD, f"{method}, call {number}")

    @law("COMM-1", needs="another_host")
    def test_collectives_of_ranks_on_two_hosts_give_every_rank_the_result(self) -> None:
        ranks = Ranks(self.between_hosts())
        given = each_rank("float32", (3,), 2)
        found = ranks.values("all_reduce", [[each] for each in given])
        check(found, [total(given)] * 2, "all_reduce on two hosts")
