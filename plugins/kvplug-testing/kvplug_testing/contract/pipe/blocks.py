"""Blocks of a paged cache as one message (laws PIPE-1 and PIPE-5)."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.engine import KVLayout, LayoutError, page_views
from kvplug.transport import Blocks, BlockViews, Pipe, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "uint8", "float32", "bool")
_LAYOUTS = ("BKTHD", "KBTHD", "BHTKD")
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


def layers_of(axes: str, num_layers: int, num_blocks: int, seed: int = 1) -> BlockViews:
    """Views of a cache of float16 in one of the layouts that engines have."""
    layout = KVLayout(axes, {"B": num_blocks, "T": 4, "H": 3, "D": 8})
    return page_views(
        [tensor_of("float16", layout.shape, seed=seed + layer) for layer in range(num_layers)], layout
    )


def blocks_of(views: BlockViews, layer: int, block_ids: Sequence[int]) -> Any:
    """The blocks of one layer as they are sent, computed without :class:`Blocks`."""
    import torch

    return torch.stack([torch.stack([part[block_id] for part in views[layer]]) for block_id in block_ids])


def send_layers(parent: Parent, pipe: Pipe, num_layers: int, num_blocks: int) -> None:
    """Send all blocks of many layers, in a shuffled order that both ends know."""
    views = layers_of("BHTKD", num_layers, num_blocks)
    pipe.send_blocks(views, _shuffled(num_blocks), timeout=waits.patience_s).wait(waits.patience_s)
    parent.recv(timeout=waits.patience_s)


class Reports:
    """What ``on_layer`` was told, and whether each layer was whole when it was told."""

    def __init__(
        self, views: BlockViews, block_ids: Sequence[int], source: BlockViews, of: Sequence[int]
    ) -> None:
        self._views, self._ids, self._source, self._source_ids = views, block_ids, source, of
        self.layers: list[int] = []
        self.not_whole: list[int] = []

    def __call__(self, layer: int) -> None:
        import torch

        wanted, got = (
            blocks_of(self._source, layer, self._source_ids),
            blocks_of(self._views, layer, self._ids),
        )
        self.layers.append(layer)
        if not torch.equal(wanted.view(torch.int16), got.view(torch.int16)):
            self.not_whole.append(layer)

    def check(self, *, complete: bool) -> None:
        num_layers = len(self._views)
        told = f"on_layer was called with {self.layers}, of {num_layers} layers"
        assert self.layers == list(range(num_layers if complete else len(self.layers))), told
        assert complete or len(self.layers) < num_layers, told
        assert not self.not_whole, f"on_layer was called with layers that were not whole: {self.not_whole}"


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
        ids = random.Random(7)
        for _ in range(20):
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

    @law("PIPE-1", "PIPE-5", needs="other_processes", level="long")
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


class LayerMessages(PipeSuite):
    """Blocks of many layers in one call."""

    @law("PIPE-1", "PIPE-5")
    @pytest.mark.parametrize("there", _LAYOUTS)
    @pytest.mark.parametrize("here", _LAYOUTS)
    def test_blocks_of_all_layers_go_from_any_layout_into_any_other(self, there: str, here: str) -> None:
        one, other = self.pair()
        source, target = layers_of(there, 6, 12), layers_of(here, 6, 20, seed=50)
        before = layers_of(here, 6, 20, seed=50)
        ids = random.Random(7)
        for count in (5, 1, 0, 12):
            there_ids, here_ids = ids.sample(range(12), count), ids.sample(range(20), count)
            reports = Reports(target, here_ids, source, there_ids) if count else None
            within = waits.patience_s
            call = Call(lambda: one.send_blocks(source, there_ids, timeout=within))  # noqa: B023
            Call(
                lambda: other.recv_blocks(target, here_ids, on_layer=reports, timeout=within)  # noqa: B023
            ).result(within + 1)
            call.result(within + 1)
            if reports is None:
                continue
            reports.check(complete=True)
            others = [block_id for block_id in range(20) if block_id not in here_ids]
            for layer in range(6):
                assert_same(blocks_of(source, layer, there_ids), blocks_of(target, layer, here_ids))
                assert_same(
                    blocks_of(before, layer, others),
                    blocks_of(target, layer, others),
                    "blocks that were not named were written",
                )
                for view, old in zip(target[layer], before[layer], strict=True):
                    view.copy_(old)

    @law("PIPE-1")
    @pytest.mark.parametrize("axes", _LAYOUTS)
    def test_blocks_of_all_layers_are_received_as_a_tensor_layer_after_layer(self, axes: str) -> None:
        import torch

        one, other = self.pair()
        views = layers_of(axes, 3, 9)
        one.send_blocks(views, [7, 0, 4])
        wanted = torch.stack([blocks_of(views, layer, [7, 0, 4]) for layer in range(3)])
        assert_same(wanted, received(other))

    @law("PIPE-5")
    def test_layers_and_blocks_that_do_not_fit_are_refused_by_name_and_the_message_stays(self) -> None:
        import torch

        one, other = self.pair()
        source = layers_of("BHTKD", 4, 9)
        one.send_blocks(source, [1, 8, 2])
        layout = KVLayout("BTHKD", {"B": 9, "T": 4, "H": 4, "D": 8})
        wide = page_views([torch.zeros(layout.shape, dtype=torch.float16) for _ in range(4)], layout)
        told: list[int] = []
        for views, block_ids, shape in (
            (layers_of("BKTHD", 3, 9, seed=50), [1, 2, 3], "3, 3, 2, 4, 3, 8"),
            (layers_of("BKTHD", 4, 9, seed=50), [1, 2], "4, 2, 2, 4, 3, 8"),
            (BlockViews([layer[:1] for layer in source]), [1, 2, 3], "4, 3, 4, 3, 8"),
            (wide, [1, 2, 3], "4, 3, 2, 4, 4, 8"),
        ):
            before = [blocks_of(views, layer, range(9)) for layer in range(len(views))]
            error = raises(
                TensorMismatchError,
                lambda views=views, block_ids=block_ids: other.recv_blocks(  # type: ignore[misc]
                    views, block_ids, on_layer=told.append
                ),
            )
            assert "4, 3, 2, 4, 3, 8" in str(error) and shape in str(error), f"it names no shapes: {error}"
            for layer, old in enumerate(before):
                assert_same(old, blocks_of(views, layer, range(9)), "a refused message was written")
        assert not told, f"on_layer was called with {told} for refused messages"
        target = layers_of("KBTHD", 4, 5, seed=50)
        other.recv_blocks(target, [4, 0, 2], timeout=waits.patience_s)
        for layer in range(4):
            assert_same(blocks_of(source, layer, [1, 8, 2]), blocks_of(target, layer, [4, 0, 2]))

    @law("PIPE-1", "PIPE-5")
    def test_layers_that_are_not_alike_are_refused_by_number_and_nothing_is_sent(self) -> None:
        one, other = self.pair()
        views = layers_of("BKTHD", 3, 9)
        small = layers_of("BKTHD", 1, 5)[0]
        for layers, said in (([*views, small], "layer 3"), ([*views, views[0][:1]], "layer 3")):
            wrong = BlockViews(layers)
            for call in (one.send_blocks, other.recv_blocks):
                error = raises(LayoutError, lambda call=call, wrong=wrong: call(wrong, [0]))  # type: ignore[misc]
                assert said in str(error), f"it does not name the layer: {error}"
        sent(one, None)
        assert received(other) is None, "something of a refused call was sent"

    @law("PIPE-1", "PIPE-5", "ALL-2", needs="other_processes")
    def test_a_peer_that_is_killed_between_two_layers_leaves_an_error_and_whole_layers(self) -> None:
        num_blocks, num_layers = 400, 100  # 15 MB: more than any ring or socket holds
        pipe, child = self.remote_pipe(send_layers, num_layers, num_blocks)
        target, ids = layers_of("BHTKD", num_layers, num_blocks, seed=500), range(num_blocks)
        source = layers_of("BHTKD", num_layers, num_blocks)
        reports = Reports(target, ids, source, _shuffled(num_blocks))

        def on_layer(layer: int) -> None:
            if layer == 0:
                child.kill()
            reports(layer)

        within = waits.patience_s
        call = Call(lambda: pipe.recv_blocks(target, ids, on_layer=on_layer, timeout=within))
        error = call.end(within + 1).error
        assert error is None or isinstance(error, PeerGoneError), f"PeerGoneError was expected, not {error!r}"
        reports.check(complete=error is None)

    @law("PIPE-5", "PIPE-6", needs="other_processes")
    def test_layers_that_are_late_are_not_reported_and_the_next_call_reports_all(self) -> None:
        num_blocks, num_layers = 400, 160  # 24 MB
        pipe, child = self.remote_pipe(send_layers, num_layers, num_blocks)
        target, ids = layers_of("BHTKD", num_layers, num_blocks, seed=500), range(num_blocks)
        source = layers_of("BHTKD", num_layers, num_blocks)
        first, second = (Reports(target, ids, source, _shuffled(num_blocks)) for _ in range(2))
        child.stop()
        call = Call(lambda: pipe.recv_blocks(target, ids, on_layer=first, timeout=1.0))
        error = call.end(waits.patience_s).error
        first.check(complete=error is None)
        for view in (part for layer in target for part in layer):
            view.fill_(0.5)  # the caches are the caller's again
        child.cont()
        if error is None:
            return
        assert isinstance(error, TimeoutError), f"TimeoutError was expected, not {error!r}"
        within = waits.patience_s
        call = Call(lambda: pipe.recv_blocks(target, ids, on_layer=second, timeout=within))
        error = call.end(within + 1).error
        if error is not None:  # it is broken, and says so
            assert isinstance(error, KvplugError) and not isinstance(error, TimeoutError), f"{error!r}"
        second.check(complete=error is None)
