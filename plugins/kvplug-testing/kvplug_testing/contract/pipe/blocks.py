"""Blocks of a paged cache as one message (laws PIPE-1 and PIPE-5)."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvplug.errors import LayoutError, PeerGoneError, TensorMismatchError
from kvplug.transport.pipe import Blocks, Pipe
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "uint8", "float32", "bool")
_ROW = (4, 3, 8)  # tokens, heads, head size


def cache_of(dtype: str, num_blocks: int, seed: int = 1) -> Any:
    """A cache ``[blocks, 2, tokens, heads, head size]``: keys and values of a block side by side."""
    return tensor_of(dtype, (num_blocks, 2, *_ROW), seed=seed)


def views_of(cache: Any) -> list[Any]:
    """Keys and values, each ``[blocks, tokens, heads, head size]``, neither contiguous."""
    return [cache[:, 0], cache[:, 1]]


def expected(cache: Any, block_ids: Sequence[int]) -> Any:
    """The expected message, computed without :class:`Blocks`."""
    import torch

    message = torch.empty((2, len(block_ids), *_ROW), dtype=cache.dtype)
    for at, block_id in enumerate(block_ids):
        message[0, at], message[1, at] = cache[block_id, 0], cache[block_id, 1]
    return message


def receive_blocks(pipe: Pipe, cache: Any, block_ids: Sequence[int]) -> None:
    """Receive blocks; they must arrive in time."""
    within = waits.patience_s
    Call(lambda: pipe.recv_blocks(views_of(cache), block_ids, timeout=within)).result(within + 1)


def receive_rows(pipe: Pipe, view: Any, block_ids: Sequence[int]) -> None:
    """Receive blocks of one view; they must arrive in time."""
    within = waits.patience_s
    Call(lambda: pipe.recv_blocks([view], block_ids, timeout=within)).result(within + 1)


def send_blocks(pipe: Pipe, cache: Any, block_ids: Sequence[int]) -> Any:
    within = waits.patience_s
    return Call(lambda: pipe.send_blocks(views_of(cache), block_ids, timeout=within)).result(within + 1)


def send_and_wait(parent: Parent, pipe: Pipe, num_blocks: int) -> None:
    """Send blocks of a large cache, in a shuffled order that both ends know."""
    cache = _large(num_blocks)
    pipe.send_blocks([cache], _shuffled(num_blocks), timeout=waits.patience_s).wait(waits.patience_s)
    parent.recv(timeout=waits.patience_s)


def _between_tensors(pipe: Pipe, source: Any, small: Any) -> None:
    pipe.send_tensor(small)
    pipe.send_blocks([source], [3, 1, 4])
    pipe.send_tensor(None)


def _large(num_blocks: int) -> Any:
    return tensor_of("int32", (num_blocks, 1500))


def _shuffled(num_blocks: int) -> list[int]:
    block_ids = list(range(num_blocks))
    random.Random(num_blocks).shuffle(block_ids)
    return block_ids


class BlockMessages(PipeSuite):
    """``send_blocks`` and ``recv_blocks``."""

    @law("PIPE-1")
    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_blocks_are_received_as_a_tensor_of_their_rows_in_order(self, dtype: str) -> None:
        if dtype not in dtypes():
            pytest.skip(f"torch has no {dtype} here")
        one, other = self.pair()
        cache = cache_of(dtype, 9)
        for block_ids in ([4, 0, 8], [7], list(range(9)), [3, 3], []):
            send_blocks(one, cache, block_ids)
            assert_same(expected(cache, block_ids), received(other))

    @law("PIPE-5")
    @pytest.mark.parametrize("dtype", _DTYPES)
    def test_a_tensor_is_received_into_blocks_and_nothing_around_them(self, dtype: str) -> None:
        if dtype not in dtypes():
            pytest.skip(f"torch has no {dtype} here")
        one, other = self.pair()
        for block_ids in ([4, 0, 8], [7], list(range(9)), []):
            message = expected(cache_of(dtype, 9, seed=5), block_ids)
            cache, before = cache_of(dtype, 9, seed=2), cache_of(dtype, 9, seed=2)
            sent(one, message)
            receive_blocks(other, cache, block_ids)
            assert_same(message, expected(cache, block_ids))
            others = [block_id for block_id in range(9) if block_id not in block_ids]
            assert_same(
                expected(before, others), expected(cache, others), "blocks that were not named were written"
            )

    @law("PIPE-1", "PIPE-5")
    def test_blocks_of_one_cache_are_received_into_other_blocks_of_another(self) -> None:
        one, other = self.pair()
        source, target = cache_of("float16", 12), cache_of("float16", 30, seed=2)
        for _ in range(20):
            ids = random.Random(7)
            there, here = ids.sample(range(12), 5), ids.sample(range(30), 5)
            send_blocks(one, source, there)
            receive_blocks(other, target, here)
            assert_same(expected(source, there), expected(target, here))

    @law("PIPE-1", "PIPE-5")
    def test_what_was_sent_may_be_overwritten_once_the_transfer_is_done(self) -> None:
        one, other = self.pair()
        source, target = cache_of("float16", 6), cache_of("float16", 6, seed=2)
        wanted = expected(source, [5, 1])
        transfer = send_blocks(one, source, [5, 1])
        call = Call(lambda: other.recv_blocks(views_of(target), [2, 3], timeout=waits.patience_s))
        transfer.wait(waits.patience_s)
        source.fill_(0)
        call.result(waits.patience_s + 1)
        assert_same(wanted, expected(target, [2, 3]))

    @law("PIPE-1", "PIPE-5")
    def test_blocks_of_many_sizes_arrive_between_tensors(self) -> None:
        import torch

        one, other = self.pair()
        small = tensor_of("int32", (3,))
        for nbytes in (1, 63, 64, 65, 4096, 100_000, 3 * MIB + 5):
            source = tensor_of("uint8", (5, nbytes))
            target = torch.zeros(7, nbytes, dtype=torch.uint8)
            call = Call(functools.partial(_between_tensors, one, source, small))
            assert_same(small, received(other))
            receive_rows(other, target, [6, 0, 2])
            assert received(other) is None
            call.result()
            assert_same(source[[3, 1, 4]], target[[6, 0, 2]], f"rows of {nbytes} bytes came changed")
            assert int(target[[1, 3, 4, 5]].sum()) == 0, "blocks that were not named were written"

    @law("PIPE-5")
    def test_blocks_that_do_not_fit_are_refused_and_the_message_stays(self) -> None:
        one, other = self.pair()
        source = cache_of("float16", 6)
        for message in (expected(source, [1, 2, 3]), None):
            sent(one, message)
            for cache, block_ids in ((source.clone(), [1, 2]), (cache_of("bfloat16", 6), [1, 2, 3])):
                before = cache.clone()
                error = raises(
                    TensorMismatchError,
                    lambda cache=cache, block_ids=block_ids: other.recv_blocks(views_of(cache), block_ids),  # type: ignore[misc]
                )
                assert str(error)
                assert_same(before, cache, "a cache was written although the message was refused")
            assert_same(message, received(other), "the refused message did not stay as it was")

    @law("PIPE-1", "PIPE-5")
    def test_blocks_that_cannot_be_are_refused_and_nothing_is_sent_nor_lost(self) -> None:
        one, other = self.pair()
        cache = cache_of("float16", 6)
        for views, block_ids in (
            ([], [0]),
            (views_of(cache), [6]),
            (views_of(cache), [-1]),
            (views_of(cache), [1.5]),
            ([cache[:, 0], cache], [0]),
            ([cache[:, 0], cache_of("bfloat16", 6)[:, 1]], [0]),
        ):
            raises(LayoutError, lambda views=views, block_ids=block_ids: one.send_blocks(views, block_ids))  # type: ignore[misc]
            raises(LayoutError, lambda views=views, block_ids=block_ids: other.recv_blocks(views, block_ids))  # type: ignore[misc]
        raises(LayoutError, lambda: other.recv_blocks(views_of(cache), [2, 2]))
        send_blocks(one, cache, [2])
        assert_same(expected(cache, [2]), received(other), "something of a refused call was sent")

    @law("PIPE-1", "PIPE-5", needs="other_processes", level="quick")
    def test_blocks_from_another_process_fill_a_cache(self) -> None:
        import torch

        num_blocks = 3_000  # 18 MB: more than any ring or socket holds
        pipe, child = self.remote_pipe(send_and_wait, num_blocks)
        cache = torch.zeros(num_blocks + 5, 1500, dtype=torch.int32)
        here = [num_blocks + 4 - block_id for block_id in range(num_blocks)]
        receive_rows(pipe, cache, here)
        assert_same(_large(num_blocks)[_shuffled(num_blocks)], cache[here])
        assert int(cache[:5].sum()) == 0, "blocks that were not named were written"
        child.send("enough")
        child.result()

    @law("PIPE-1", "ALL-2", needs="other_processes")
    def test_a_peer_that_is_killed_while_it_sends_blocks_is_told_and_no_message_comes(self) -> None:
        import torch

        pipe, child = self.remote_pipe(send_and_wait, 20_000)  # 120 MB, which are not received at first
        child.kill()
        cache = torch.zeros(20_000, 1500, dtype=torch.int32)
        within = waits.patience_s
        end = Call(lambda: pipe.recv_blocks([cache], range(20_000), timeout=within)).end(within + 1)
        assert isinstance(end.error, PeerGoneError), f"PeerGoneError was expected, not {end.error!r}"

    @law("PIPE-1")
    def test_what_blocks_say_of_themselves_is_what_arrives(self) -> None:
        one, other = self.pair()
        cache = cache_of("float32", 4)
        blocks = Blocks(views_of(cache), [3, 0])
        send_blocks(one, cache, [3, 0])
        got = received(other)
        assert (tuple(got.shape), got.nbytes) == (blocks.shape, blocks.nbytes)
