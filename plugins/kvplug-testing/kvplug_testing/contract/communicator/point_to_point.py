"""One rank sends and another receives (law COMM-1), one tensor or many at once."""

from __future__ import annotations

import itertools
from typing import Any

from kvplug import ConfigError, UnsupportedError
from kvplug.transport import RecvOp, SendOp, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import Strided
from kvplug_testing.contract.communicator.refusals import still_works
from kvplug_testing.contract.communicator.suite import CommunicatorSuite, Ranks, check_raised
from kvplug_testing.contract.communicator.tensors import WORLD, differs, each_rank, tensor_of


def _passes(ranks: Ranks, sent: Any, src: int, dst: int, *, is_named: bool = True) -> None:
    """That tensor goes from one rank to another."""
    to, of = ([dst], [src]) if is_named else ([], [])
    sending = ranks[src].begin("send", sent, *to, timeout=waits.patience_s)
    got = ranks[dst].call("recv", tuple(sent.shape), sent.dtype, *of, timeout=waits.patience_s)
    assert not sending.outcome().error, str(sending.outcome())
    fault = differs(got.value, sent)
    assert not fault, f"from rank {src} to rank {dst}, {fault}; {got}"


def _check_batch(ranks: Ranks, ops: dict[int, list[Any]], wanted: dict[int, list[Any]], what: str) -> None:
    for outcome in ranks.outcomes("batch_isend_irecv", {rank: [each] for rank, each in ops.items()}):
        assert not outcome.error, str(outcome)
        for at, (got, right) in enumerate(zip(outcome.first, wanted[outcome.rank], strict=True)):
            fault = differs(got, right)
            assert not fault, f"{what}: at rank {outcome.rank}, tensor {at}, {fault}"


class PointToPoint(CommunicatorSuite):
    """``send``, ``recv`` and ``batch_isend_irecv``."""

    @law("COMM-1")
    def test_tensors_go_from_any_rank_to_any_other_in_order(self) -> None:
        ranks = self.ranks()
        for src, dst in itertools.permutations(range(WORLD), 2):
            for shape in ((), (2, 3), (0, 2)):
                _passes(ranks, tensor_of("float32", shape, src), src, dst)
        for number in range(20):
            _passes(ranks, tensor_of("int64", (2,), number), 0, 1)

    @law("COMM-1")
    def test_send_goes_to_the_next_rank_and_recv_takes_from_the_previous(self) -> None:
        ranks = self.ranks()
        for rank in range(WORLD):
            _passes(ranks, tensor_of("int64", (3,), rank), rank, (rank + 1) % WORLD, is_named=False)

    # -- many at once ------------------------------------------------------------------------------

    @law("COMM-1")
    def test_a_batch_may_send_in_a_circle(self) -> None:
        ranks = self.ranks()
        for shape in ((), (2, 3), (0, 2), (300, 1000)):
            given, into = each_rank("float32", shape), tensor_of("float32", shape, 9)
            before = {rank: (rank - 1) % WORLD for rank in range(WORLD)}
            ops = {r: [SendOp(given[r], (r + 1) % WORLD), RecvOp(into, before[r])] for r in before}
            wanted = {rank: [given[other]] for rank, other in before.items()}
            _check_batch(ranks, ops, wanted, f"a circle of {list(shape)}")

    @law("COMM-1")
    def test_a_batch_carries_every_dtype_and_more_than_one_tensor_to_a_rank_in_order(self) -> None:
        ranks = self.ranks()
        dtypes = ["int64", "bfloat16", "bool", "float8_e4m3fn"]
        dtypes = [dtype for dtype in dtypes if self.takes(ranks[0], dtype)]
        others = {rank: [peer for peer in range(WORLD) if peer != rank] for rank in range(WORLD)}

        def sent(src: int, dst: int, dtype: str) -> Any:
            return tensor_of(dtype, (4, src + 1), dtypes.index(dtype) + 3 * dst)

        def ops(rank: int) -> list[Any]:
            sends = [SendOp(sent(rank, peer, dtype), peer) for dtype in dtypes for peer in others[rank]]
            recvs = [
                RecvOp(Strided(tensor_of(dtype, (4, peer + 1), 9)), peer)
                for peer in others[rank]
                for dtype in dtypes
            ]
            return sends + recvs

        wanted = {
            rank: [sent(peer, rank, dtype) for peer in peers for dtype in dtypes]
            for rank, peers in others.items()
        }
        _check_batch(ranks, {rank: ops(rank) for rank in others}, wanted, "a batch of many")

    @law("COMM-1")
    def test_a_batch_is_between_the_ranks_it_names(self) -> None:
        ranks = self.ranks()
        given = tensor_of("int64", (3,), 0)
        ops: dict[int, list[Any]] = {0: [SendOp(given, 2)], 2: [RecvOp(tensor_of("int64", (3,), 2), 0)]}
        _check_batch(ranks, ops, {0: [], 2: [given]}, "a batch of two ranks of three")
        assert not ranks[1].call("batch_isend_irecv", []).error
        still_works(ranks)

    @law("COMM-3", needs="compared_calls")
    def test_a_batch_that_does_not_fit_the_other_ranks_is_refused_at_both(self) -> None:
        ranks = self.ranks(2)
        right = tensor_of("float32", (2,), 0)
        for wrong in (
            [RecvOp(tensor_of("float32", (3,), 1), 0)],
            [RecvOp(tensor_of("int64", (2,), 1), 0)],
            [RecvOp(right, 0), RecvOp(right, 0)],
            [SendOp(right, 0)],
        ):
            ranks.raised("batch_isend_irecv", [[[SendOp(right, 1)]], [wrong]], TensorMismatchError)
        still_works(ranks)

    @law("COMM-3")
    def test_a_batch_of_something_else_or_with_itself_is_refused(self) -> None:
        ranks = self.ranks(2)
        given = tensor_of("float32", (2,), 0)
        for ops, kind in (
            ([SendOp(given, 0)], ConfigError),
            ([RecvOp(given, 2)], ConfigError),
            (["a word"], UnsupportedError),
        ):
            check_raised(ranks[0].call("batch_isend_irecv", ops), kind)
        still_works(ranks)
