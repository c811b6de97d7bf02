"""One rank sends and another receives (law COMM-1), one tensor or many at once."""

from __future__ import annotations

import itertools
from typing import Any

from kvplug import ConfigError, TimeoutError, UnsupportedError
from kvplug.transport import RecvOp, SendOp, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.communicator.calls import Strided
from kvplug_testing.contract.communicator.refusals import still_works
from kvplug_testing.contract.communicator.suite import WORLD, CommunicatorSuite, check_raised
from kvplug_testing.contract.communicator.tensors import check, differs, tensor_of


class PointToPoint(CommunicatorSuite):
    """``send``, ``recv`` and ``batch_isend_irecv``."""

    @law("COMM-1")
    def test_a_tensor_goes_from_any_rank_to_any_other(self) -> None:
        import torch

        ranks = self.ranks()
        for src, dst in itertools.permutations(range(WORLD), 2):
            for shape in ((), (2, 3), (0, 2)):
                sent = tensor_of("float32", shape, src)
                sending = ranks[src].begin("send", sent, dst, timeout=waits.patience_s)
                got = ranks[dst].begin("recv", shape, torch.float32, src, timeout=waits.patience_s).outcome()
                assert not sending.outcome().error, str(sending.outcome())
                fault = differs(got.value, sent)
                assert not fault, f"from rank {src} to rank {dst}, {fault}; {got}"

    @law("COMM-1")
    def test_send_goes_to_the_next_rank_and_recv_takes_from_the_previous(self) -> None:
        import torch

        ranks = self.ranks()
        for rank in range(WORLD):
            after = (rank + 1) % WORLD
            sent = tensor_of("int64", (3,), rank)
            sending = ranks[rank].begin("send", sent, timeout=waits.patience_s)
            got = ranks[after].begin("recv", (3,), torch.int64, timeout=waits.patience_s).outcome()
            assert not sending.outcome().error, str(sending.outcome())
            fault = differs(got.value, sent)
            assert not fault, f"from rank {rank} to the next one, {fault}; {got}"

    @law("COMM-1")
    def test_messages_of_one_pair_keep_their_order(self) -> None:
        import torch

        ranks = self.ranks(2)
        for number in range(20):
            sending = ranks[0].begin("send", torch.full((2,), number), 1, timeout=waits.patience_s)
            got = ranks[1].begin("recv", (2,), torch.int64, 0, timeout=waits.patience_s).outcome()
            assert not sending.outcome().error, str(sending.outcome())
            assert got.value.tolist() == [number] * 2, f"message {number} arrived as {got}"

    # -- many at once ------------------------------------------------------------------------------

    @law("COMM-1")
    def test_a_batch_may_send_in_a_circle(self) -> None:
        ranks = self.ranks()
        for shape in ((), (2, 3), (0, 2), (300, 1000)):
            given = [tensor_of("float32", shape, rank) for rank in range(WORLD)]
            found = ranks.outcomes(
                "batch_isend_irecv",
                lambda rank: [
                    [
                        SendOp(given[rank], (rank + 1) % WORLD),  # noqa: B023
                        RecvOp(tensor_of("float32", shape, 9), (rank - 1) % WORLD),  # noqa: B023
                    ]
                ],
            )
            assert not [str(each) for each in found if each.error], f"{[str(each) for each in found]}"
            wanted = [given[(rank - 1) % WORLD] for rank in range(WORLD)]
            check([each.first[0] for each in found], wanted, f"a circle of {list(shape)}")

    @law("COMM-1")
    def test_a_batch_carries_every_dtype_and_more_than_one_tensor_to_a_rank_in_order(self) -> None:
        ranks = self.ranks()
        dtypes = ["int64", "bfloat16", "bool", "float8_e4m3fn"]
        dtypes = [dtype for dtype in dtypes if self.takes(ranks[0], dtype)]
        others = [[peer for peer in range(WORLD) if peer != rank] for rank in range(WORLD)]

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

        found = ranks.outcomes("batch_isend_irecv", lambda rank: [ops(rank)])
        for rank, outcome in enumerate(found):
            assert not outcome.error, str(outcome)
            wanted = [sent(peer, rank, dtype) for peer in others[rank] for dtype in dtypes]
            check(outcome.first, wanted, "a batch of many")

    @law("COMM-1")
    def test_a_batch_is_between_the_ranks_it_names(self) -> None:
        ranks = self.ranks()
        given = tensor_of("int64", (3,), 0)
        sending = ranks[0].begin("batch_isend_irecv", [SendOp(given, 2)], timeout=waits.patience_s)
        into = RecvOp(tensor_of("int64", (3,), 2), 0)
        got = ranks[2].begin("batch_isend_irecv", [into], timeout=waits.patience_s).outcome()
        assert not sending.outcome().error, str(sending.outcome())
        check(got.first, [given], "a batch of two ranks of three")
        assert not ranks[1].begin("batch_isend_irecv", []).outcome().error
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
            sending = ranks[0].begin("batch_isend_irecv", [SendOp(right, 1)], timeout=waits.patience_s)
            receiving = ranks[1].begin("batch_isend_irecv", wrong, timeout=waits.patience_s)
            for each in (sending, receiving):
                check_raised(each.outcome(), TensorMismatchError)
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
            check_raised(ranks[0].begin("batch_isend_irecv", ops).outcome(), kind)
        still_works(ranks)

    @law("ALL-4", "COMM-2")
    def test_a_batch_whose_other_rank_does_not_come_ends_at_its_deadline(self) -> None:
        ranks = self.ranks(2)
        given = tensor_of("float32", (2,), 0)
        ops = [SendOp(given, 1), RecvOp(tensor_of("float32", (2,), 1), 1)]
        outcome = ranks[0].begin("batch_isend_irecv", ops, timeout=0.4).outcome()
        check_raised(outcome, TimeoutError)
        assert "rank 1" in outcome.text, f"rank 1 is missing, and it is not named: {outcome}"
