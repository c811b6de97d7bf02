"""One rank sends and another receives (law COMM-1), one tensor or many at once."""

from __future__ import annotations

import itertools
from typing import Any

from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks
from kvplug_testing.contract.communicator.tensors import WORLD, check, each_rank, tensor_of


def _passes(ranks: Ranks, sent: Any, src: int, dst: int, *, is_named: bool = True) -> None:
    """That tensor goes from one rank to another."""
    to, of = ([dst], [src]) if is_named else ([], [])
    sending = ranks.begin("send", {src: [sent, *to]})
    got = ranks.ask(dst, "recv", tuple(sent.shape), sent.dtype, *of)
    sending[src].result()
    check([got], [sent], f"from rank {src} to rank {dst}")


class PointToPoint(CommunicatorSuite):
    """``send``, ``recv`` and ``batch_isend_irecv``."""

    @law("COMM-1")
    def test_tensors_go_from_any_rank_to_any_other_or_the_next_in_order(self) -> None:
        ranks = self.ranks()
        for rank in range(WORLD):
            _passes(ranks, tensor_of("int64", (3,), rank), rank, (rank + 1) % WORLD, is_named=False)
        for src, dst in itertools.permutations(range(WORLD), 2):
            for shape in ((), (2, 3), (0, 2)):
                _passes(ranks, tensor_of("float32", shape, src), src, dst)
        for number in range(20):
            _passes(ranks, tensor_of("int64", (2,), number), 0, 1)

    @law("COMM-1")
    def test_a_batch_may_send_in_a_circle(self) -> None:
        ranks = self.ranks()
        for shape in ((), (0, 2), (300, 1000)):
            given, into = each_rank("float32", shape), tensor_of("float32", shape, 9)
            args = [
                [[[given[rank], (rank + 1) % WORLD]], [[into, (rank - 1) % WORLD]]] for rank in range(WORLD)
            ]
            found = [into for (into,) in ranks.values("batch", args)]
            check(found, [given[-1], *given[:-1]], f"a circle of {list(shape)}")

    @law("COMM-1")
    def test_a_batch_carries_every_dtype_and_more_than_one_tensor_to_a_rank_in_order(self) -> None:
        ranks = self.ranks()
        dtypes = [
            dtype
            for dtype in ("int64", "bfloat16", "bool", "float8_e4m3fn")
            if ranks.ask(0, "supports", self.device, dtype)
        ]

        def of(src: int, dst: int) -> list[Any]:
            return [tensor_of(dtype, (4, src + 1), at + 3 * dst) for at, dtype in enumerate(dtypes)]

        pairs = {0: (1,), 1: (0,), 2: ()}  # a rank that is not named takes no part
        args = {
            rank: [
                [[each, other] for other in others for each in of(rank, other)],
                [[each, other] for other in others for each in of(other, 9)],
            ]
            for rank, others in pairs.items()
        }
        found = ranks.results("batch", args, "strided")
        for rank, others in pairs.items():
            wanted = [each for other in others for each in of(other, rank)]
            check(found[rank][0], wanted, f"a batch at rank {rank}")
