"""What collectives and messages between ranks give (law COMM-1), compared with a slow model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import pytest

from kvplug import UnsupportedError
from kvplug.kit import MOVED, SUMMED
from kvplug_testing.comparison import brief
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, joined, tensor_of, total

Cases: TypeAlias = Iterator[tuple[list[list[Any]], Sequence[Any]]]
"""Each rank's arguments, and each rank's result."""

_SHAPES: list[tuple[int, ...]] = [(3,), (2, 3), (1, 1), (3, 6, 2), (0, 3), (4, 0)]
_DIMS = (0, 1, -1)
_IN_PLACE = ("all_reduce", "broadcast")


def _sized(dim: int, size: int) -> list[int]:
    """A shape with this size along this dimension."""
    shape = [2, 2]
    shape[dim] = size
    return shape


def _all_reduce(dtype: str) -> Cases:
    for shape in [(), *_SHAPES]:
        given = each_rank(dtype, shape)
        yield [[each] for each in given], [total(given)] * WORLD


def _broadcast(dtype: str) -> Cases:
    for shape, src in itertools.product([(), *_SHAPES], range(WORLD)):
        given = each_rank(dtype, shape)
        yield [[each, src] for each in given], [given[src]] * WORLD


def _all_gather(dtype: str) -> Cases:
    for shape in _SHAPES:
        given = each_rank(dtype, shape)
        for dim in range(-len(shape), len(shape)):
            yield [[each, dim] for each in given], [joined(given, dim)] * WORLD


def _gather(dtype: str) -> Cases:
    for shape, dim, dst in itertools.product(((2, 3), (0, 2)), (0, -1), range(WORLD)):
        given = each_rank(dtype, shape)
        wanted = [joined(given, dim) if rank == dst else None for rank in range(WORLD)]
        yield [[each, dst, dim] for each in given], wanted


def _all_gatherv(dtype: str) -> Cases:
    # One part is large: all ranks gather in the same way.
    for sizes, dim in itertools.product(([1, 2, 3], [0, 4, 1], [0, 0, 0], [3, 3 << 17, 0]), _DIMS):
        given = [tensor_of(dtype, _sized(dim, size), rank) for rank, size in enumerate(sizes)]
        wanted = joined(given, dim)
        yield [[each, dim, sizes] for each in given], [wanted] * WORLD
        yield [[[each, each.long()], dim, sizes] for each in given], [[wanted, wanted.long()]] * WORLD


def _reduce_scatter(dtype: str) -> Cases:
    for dim in _DIMS:
        given = each_rank(dtype, _sized(dim, 6))
        yield [[each, dim] for each in given], total(given).split(2, dim)


def _reduce_scatterv(dtype: str) -> Cases:
    for sizes, dim in itertools.product(([1, 2, 3], [0, 4, 2], [6, 0, 0]), _DIMS):
        given = each_rank(dtype, _sized(dim, 6))
        yield [[each, dim, sizes] for each in given], total(given).split(sizes, dim)


_COLLECTIVES: dict[str, tuple[Callable[[str], Cases], list[str]]] = {
    "all_reduce": (_all_reduce, sorted({*SUMMED, *MOVED, "complex64"})),
    "broadcast": (_broadcast, ["float32"]),
    "all_gather": (_all_gather, sorted(MOVED)),
    "all_gatherv": (_all_gatherv, ["float32"]),
    "gather": (_gather, ["float32"]),
    "reduce_scatter": (_reduce_scatter, ["float32", "int64"]),
    "reduce_scatterv": (_reduce_scatterv, ["float32", "int64"]),
}
"""The cases of each collective, and the dtypes that are tried."""


def _by_default(given: Sequence[Any]) -> dict[str, list[Any]]:
    """The result of each rank with default arguments."""
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


def _gives(ranks: Ranks, method: str, args: list[list[Any]], wanted: Sequence[Any], form: str = "") -> None:
    """Every rank gets its result, and inputs stay, but for those of calls in place, which return them."""
    values, firsts, are_same = zip(*ranks.results(method, args, form), strict=True)
    what = f"{method} of {form} {brief(args)}"
    check(values, wanted, what)
    inputs = [first for first, *_ in args]
    if method in _IN_PLACE:
        inputs = [*wanted]
        assert all(are_same), f"{what} did not return its input"
    if not isinstance(inputs[0], list):
        check(firsts, inputs, f"the input after {what}")


class Collectives(CommunicatorSuite):
    """The values that collectives return, and tensors that go from rank to rank."""

    @law("COMM-1", "COMM-3")
    @pytest.mark.parametrize(
        ("method", "dtype"),
        [(method, dtype) for method, (_, dtypes) in _COLLECTIVES.items() for dtype in dtypes],
    )
    def test_a_collective_gives_every_rank_what_it_states(self, method: str, dtype: str) -> None:
        ranks = self.ranks()
        summing = method in ("all_reduce", "reduce_scatter", "reduce_scatterv")
        if not ranks.call(0, "supports", self.device, dtype, summing=summing):
            ranks.raised(method, [[each] for each in each_rank(dtype, (3,))], UnsupportedError)
            return
        for args, wanted in _COLLECTIVES[method][0](dtype):
            _gives(ranks, method, args, wanted)

    @law("COMM-1")
    @pytest.mark.parametrize(("world", "form"), [(WORLD, ""), (WORLD, "strided"), (1, "")])
    def test_large_tensors_and_default_arguments_give_the_same(self, world: int, form: str) -> None:
        import torch

        ranks = self.ranks(world)
        seeds = [torch.Generator().manual_seed(rank) for rank in range(world)]
        given = [torch.randint(0, 2**40, (100, 999), generator=seed) for seed in seeds]
        for method, wanted in _by_default(given).items():
            _gives(ranks, method, [[each] for each in given], wanted, form)

    @law("COMM-1")
    def test_a_sum_that_is_rounded_has_the_same_bits_at_every_rank(self) -> None:
        import torch

        chance = torch.Generator().manual_seed(5)
        given = [torch.randn(1000, generator=chance) * 10.0 ** (3 * rank) for rank in range(WORLD)]
        found = self.ranks().values("all_reduce", [[each] for each in given])
        check(found, [found[0]] * WORLD, "a sum that is rounded, compared with rank 0's")

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
        _gives(ranks, "all_reduce", [[each] for each in given], [total(given)] * 2)

    # -- from rank to rank ---------------------------------------------------------------------

    @law("COMM-1")
    def test_tensors_go_from_any_rank_to_any_other_or_the_next_in_order(self) -> None:
        ranks = self.ranks()
        for rank in range(WORLD):
            _passes(ranks, tensor_of("int64", (3,), rank), rank, (rank + 1) % WORLD, is_named=False)
        for src, dst in itertools.permutations(range(WORLD), 2):
            for shape in ((), (2, 3), (0, 2)):
                _passes(ranks, tensor_of("float32", shape, src), src, dst)

    @law("COMM-1")
    @pytest.mark.parametrize("to", [{0: 1, 1: 2, 2: 0}, {0: 1, 1: 0}], ids=["circle", "without-one"])
    def test_a_batch_carries_many_tensors_of_each_dtype_in_order(self, to: dict[int, int]) -> None:
        ranks = self.ranks()
        dtypes = ("float32", "int64", "bfloat16", "bool", "float8_e4m3fn")
        taken = [dtype for dtype in dtypes if ranks.call(0, "supports", self.device, dtype)]
        shapes = ((), (0, 2), (4, 3), (300, 1000))

        def of(rank: int) -> list[Any]:
            return [tensor_of(*each, rank) for each in itertools.product(taken, shapes)]

        src = {dst: rank for rank, dst in to.items()}
        args = {
            rank: [[[each, dst] for each in of(rank)], [[each, src[rank]] for each in of(9)]]
            for rank, dst in to.items()
        }
        for rank, (found, *_) in zip(to, ranks.results("batch", args, "strided"), strict=True):
            check(found, of(src[rank]), f"a batch at rank {rank}")


def _passes(ranks: Ranks, sent: Any, src: int, dst: int, *, is_named: bool = True) -> None:
    """That tensor goes from one rank to another."""
    to, of = ([dst], [src]) if is_named else ([], [])
    sending = ranks.begin("send", {src: [sent, *to]})
    got = ranks.call(dst, "recv", tuple(sent.shape), sent.dtype, *of)
    sending[src].result()
    check([got], [sent], f"from rank {src} to rank {dst}")
