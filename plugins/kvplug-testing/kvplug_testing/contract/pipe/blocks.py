"""Blocks of a paged cache as one message (laws PIPE-1 and PIPE-5)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplug import KvplugError, PeerGoneError, TimeoutError
from kvplug.engine import KVLayout, LayoutError, page_views
from kvplug.transport import BlockViews, Pipe, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises

_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "uint8", "float32", "bool")
_LAYOUTS = ("BKTHD", "KBTHD", "BHTKD")
_NUM_BLOCKS = 400
"""Of the large caches."""


def layers_of(
    axes: str, num_layers: int, num_blocks: int, seed: int = 1, *, dtype: str = "float16", heads: int = 3
) -> BlockViews:
    """Views of a cache in one of the layouts that engines have."""
    layout = KVLayout(axes, {"B": num_blocks, "T": 4, "H": heads, "D": 8})
    return page_views(
        [tensor_of(dtype, layout.shape, seed=seed + layer) for layer in range(num_layers)], layout
    )


def blocks_of(views: BlockViews, layer: int, block_ids: Sequence[int]) -> Any:
    """The blocks of one layer as they are sent, computed without :class:`~kvplug.transport.Blocks`."""
    import torch

    part = views[layer][0]
    parts = [view[list(block_ids)].view(torch.uint8) for view in views[layer]]
    return torch.stack(parts, 1).view(part.dtype)


def message_of(views: BlockViews, block_ids: Sequence[int]) -> Any:
    """The message that sending these blocks makes."""
    import torch

    layers = [blocks_of(views, layer, block_ids) for layer in range(len(views))]
    return torch.stack([layer.view(torch.uint8) for layer in layers]).view(layers[0].dtype)


def copy_of(views: BlockViews) -> list[Any]:
    return [blocks_of(views, layer, range(len(views[layer][0]))) for layer in range(len(views))]


def receive(pipe: Pipe, views: Any, block_ids: Sequence[int], **given: Any) -> None:
    """Receive blocks; they must arrive in time."""
    _in_time(lambda within: pipe.recv_blocks(views, block_ids, timeout=within, **given)).result(
        waits.patience_s + 1
    )


def _in_time(call: Callable[[float], Any]) -> Call:
    within = waits.patience_s
    return Call(lambda: call(within))


def send_layers(parent: Parent, pipe: Pipe, num_layers: int) -> None:
    """Send all blocks of many layers, in a shuffled order that both ends know."""
    views = layers_of("BHTKD", num_layers, _NUM_BLOCKS)
    pipe.send_blocks(views, _shuffled(), timeout=waits.patience_s).wait(waits.patience_s)
    parent.recv(timeout=waits.patience_s)


def _shuffled() -> list[int]:
    return random.Random(1).sample(range(_NUM_BLOCKS), _NUM_BLOCKS)


class Reports:
    """The calls of ``on_layer``, and whether each layer was whole when it was reported."""

    def __init__(
        self, views: BlockViews, block_ids: Sequence[int], source: BlockViews, of: Sequence[int]
    ) -> None:
        self._views, self._ids, self._source, self._source_ids = views, block_ids, source, of
        self.layers: list[int] = []
        self.not_whole: list[int] = []

    def __call__(self, layer: int) -> None:
        import torch

        wanted = blocks_of(self._source, layer, self._source_ids)
        got = blocks_of(self._views, layer, self._ids)
        self.layers.append(layer)
        if not torch.equal(wanted.view(torch.int16), got.view(torch.int16)):
            self.not_whole.append(layer)

    def check(self, *, complete: bool) -> None:
        num_layers = len(self._views)
        called = f"on_layer was called with {self.layers}, of {num_layers} layers"
        assert self.layers == list(range(num_layers if complete else len(self.layers))), called
        assert complete or len(self.layers) < num_layers, called
        assert not self.not_whole, f"on_layer was called with layers that were not whole: {self.not_whole}"


class BlockMessages(PipeSuite):
    """``send_blocks`` and ``recv_blocks``."""

    @law("PIPE-1", "PIPE-5")
    def test_blocks_are_received_as_a_tensor_and_a_tensor_into_blocks_and_nothing_around_them(self) -> None:
        one, other = self.pair()
        for dtype in {*_DTYPES} & {*dtypes()}:
            source = layers_of("BKTHD", 2, 9, dtype=dtype)
            for block_ids in ([4, 0, 8], [7], list(range(9)), [3, 3], []):
                message = message_of(source, block_ids)
                _in_time(lambda s: one.send_blocks(source, block_ids, timeout=s)).result()  # noqa: B023
                assert_same(message, received(other))
                if block_ids == [3, 3]:
                    continue
                target, before = (layers_of("BKTHD", 2, 9, seed=5, dtype=dtype) for _ in range(2))
                sent(one, message)
                receive(other, target, block_ids)
                assert_same(message, message_of(target, block_ids))
                others = [block_id for block_id in range(9) if block_id not in block_ids]
                assert_same(
                    message_of(before, others),
                    message_of(target, others),
                    "blocks that were not named were written",
                )

    @law("PIPE-1", "PIPE-5")
    @pytest.mark.parametrize("there", _LAYOUTS)
    def test_blocks_of_all_layers_go_from_any_layout_into_any_other(self, there: str) -> None:
        one, other = self.pair()
        source = layers_of(there, 6, 12)
        ids = random.Random(7)
        for here in _LAYOUTS:
            for count in (5, 1, 0, 12):
                target, before = (layers_of(here, 6, 20, seed=50) for _ in range(2))
                there_ids, here_ids = ids.sample(range(12), count), ids.sample(range(20), count)
                reports = Reports(target, here_ids, source, there_ids) if count else None
                sending = _in_time(lambda s: one.send_blocks(source, there_ids, timeout=s))  # noqa: B023
                receive(other, target, here_ids, on_layer=reports)
                sending.result()
                if reports is None:
                    continue
                reports.check(complete=True)
                assert_same(message_of(source, there_ids), message_of(target, here_ids))
                others = [block_id for block_id in range(20) if block_id not in here_ids]
                assert_same(
                    message_of(before, others),
                    message_of(target, others),
                    "blocks that were not named were written",
                )

    @law("PIPE-1", "PIPE-4")
    def test_blocks_may_be_overwritten_once_the_transfer_is_done(self) -> None:
        one, other = self.pair()
        source, target = layers_of("BKTHD", 1, 6), layers_of("BKTHD", 1, 6, seed=2)
        wanted = message_of(source, [5, 1])
        transfer = one.send_blocks(source, [5, 1], timeout=waits.patience_s)
        receiving = _in_time(lambda s: other.recv_blocks(target, [2, 3], timeout=s))
        transfer.wait(waits.patience_s)
        for view in source[0]:
            view.fill_(0)
        receiving.result(waits.patience_s + 1)
        assert_same(wanted, message_of(target, [2, 3]))

    @law("PIPE-1", "PIPE-5")
    def test_blocks_of_many_sizes_arrive_between_tensors(self) -> None:
        import torch

        one, other = self.pair()
        small = tensor_of("int32", (3,))

        def send(source: Any) -> None:
            one.send_tensor(small)
            one.send_blocks([source], [3, 1, 4])
            one.send_tensor(None)

        for nbytes in (1, 63, 64, 65, 4096, 100_000, 3 * MIB + 5):
            source = tensor_of("uint8", (5, nbytes))
            target = torch.zeros(7, nbytes, dtype=torch.uint8)
            sending = Call(lambda: send(source))  # noqa: B023
            assert_same(small, received(other))
            receive(other, [target], [6, 0, 2])
            assert received(other) is None
            sending.result()
            assert_same(source[[3, 1, 4]], target[[6, 0, 2]], f"rows of {nbytes} bytes came changed")
            assert int(target[[1, 3, 4, 5]].sum()) == 0, "blocks that were not named were written"

    @law("PIPE-5")
    def test_layers_and_blocks_that_do_not_fit_are_refused_by_name_and_the_message_stays(self) -> None:
        one, other = self.pair()
        source = layers_of("BHTKD", 4, 9)
        reported: list[int] = []
        misfits: tuple[tuple[BlockViews, list[int], str], ...] = (
            (layers_of("BKTHD", 3, 9, seed=50), [1, 2, 3], "3, 3, 2, 4, 3, 8"),
            (layers_of("BKTHD", 4, 9, seed=50), [1, 2], "4, 2, 2, 4, 3, 8"),
            (BlockViews([layer[:1] for layer in layers_of("BHTKD", 4, 9)]), [1, 2, 3], "4, 3, 4, 3, 8"),
            (layers_of("BTHKD", 4, 9, heads=4), [1, 2, 3], "4, 3, 2, 4, 4, 8"),
            (layers_of("BKTHD", 4, 9, dtype="bfloat16"), [1, 2, 3], "bfloat16"),
        )
        for message in (message_of(source, [1, 8, 2]), None):
            sent(one, message)
            for views, block_ids, given in misfits:
                before = copy_of(views)
                error = raises(
                    TensorMismatchError,
                    lambda: other.recv_blocks(views, block_ids, on_layer=reported.append),  # noqa: B023
                )
                if message is not None:
                    wrong = f"it does not name what was given and wanted: {error}"
                    assert "4, 3, 2, 4, 3, 8" in str(error) and given in str(error), wrong
                for old, new in zip(before, copy_of(views), strict=True):
                    assert_same(old, new, "a cache was written although the message was refused")
            assert not reported, f"on_layer was called with {reported} for refused messages"
            if message is None:
                assert received(other) is None
            else:
                target = layers_of("KBTHD", 4, 5, seed=50)
                receive(other, target, [4, 0, 2])
                assert_same(message, message_of(target, [4, 0, 2]))

    @law("PIPE-1", "PIPE-5")
    def test_blocks_that_cannot_be_are_refused_by_layer_and_nothing_is_sent_nor_lost(self) -> None:
        one, other = self.pair()
        views = layers_of("BKTHD", 3, 9)
        small, bf16 = layers_of("BKTHD", 1, 5)[0], layers_of("BKTHD", 1, 9, dtype="bfloat16")[0]
        wrong: list[tuple[Any, list[Any], str]] = [
            ([], [0], ""),
            *((views, [block_id], "") for block_id in (9, -1, 1.5)),
            *((BlockViews([*views, layer]), [0], "layer 3") for layer in (small, views[0][:1], bf16)),
        ]
        for given, block_ids, named in wrong:
            for call in (one.send_blocks, other.recv_blocks):
                error = raises(LayoutError, lambda: call(given, block_ids))  # noqa: B023
                assert named in str(error), f"it does not name the layer: {error}"
        raises(LayoutError, lambda: other.recv_blocks(views, [2, 2]))
        one.send_blocks(views, [2], timeout=waits.patience_s)
        assert_same(message_of(views, [2]), received(other), "something of a refused call was sent")

    # -- from another process ------------------------------------------------------------------

    def _from_another_process(self, num_layers: int) -> tuple[Any, Any, BlockViews, Callable[[], Reports]]:
        """A pipe, the process that sends all of a cache, a cache to receive it into, and its reports."""
        pipe, child = self.remote_pipe(send_layers, num_layers)
        source = layers_of("BHTKD", num_layers, _NUM_BLOCKS)
        target = layers_of("BHTKD", num_layers, _NUM_BLOCKS, seed=500)
        return pipe, child, target, lambda: Reports(target, range(_NUM_BLOCKS), source, _shuffled())

    @law("PIPE-1", "PIPE-5", "ALL-2", needs="other_processes")
    def test_a_peer_that_is_killed_between_two_layers_leaves_an_error_and_whole_layers(self) -> None:
        pipe, child, target, reports_of = self._from_another_process(100)  # 15 MB: more than any buffer
        reports = reports_of()

        def on_layer(layer: int) -> None:
            if layer == 0:
                child.kill()
            reports(layer)

        call = _in_time(lambda s: pipe.recv_blocks(target, range(_NUM_BLOCKS), on_layer=on_layer, timeout=s))
        error = call.end(waits.patience_s + 1).error
        assert error is None or isinstance(error, PeerGoneError), f"PeerGoneError was expected, not {error!r}"
        reports.check(complete=error is None)

    @law("PIPE-1", "PIPE-5", "PIPE-6", needs="other_processes")
    def test_layers_that_are_late_are_not_reported_and_the_next_call_reports_all(self) -> None:
        pipe, child, target, reports_of = self._from_another_process(160)  # 24 MB
        first, second = reports_of(), reports_of()
        child.stop()
        call = Call(lambda: pipe.recv_blocks(target, range(_NUM_BLOCKS), on_layer=first, timeout=1.0))
        error = call.end(waits.patience_s).error
        first.check(complete=error is None)
        for view in (part for layer in target for part in layer):
            view.fill_(0.5)  # the caches are the caller's again
        child.cont()
        if error is None:
            return
        assert isinstance(error, TimeoutError), f"TimeoutError was expected, not {error!r}"
        call = _in_time(lambda s: pipe.recv_blocks(target, range(_NUM_BLOCKS), on_layer=second, timeout=s))
        error = call.end(waits.patience_s + 1).error
        if error is not None:  # the pipe is broken, and says so
            assert isinstance(error, KvplugError) and not isinstance(error, TimeoutError), f"{error!r}"
        second.check(complete=error is None)
