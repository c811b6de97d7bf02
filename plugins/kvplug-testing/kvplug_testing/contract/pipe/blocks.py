"""Blocks of a paged cache as one message (laws PIPE-1 and PIPE-5)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvplug import KvplugError, TimeoutError
from kvplug.engine import KVLayout, page_views
from kvplug.transport import BlockViews, Pipe, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

_DTYPES = ("bfloat16", "float8_e4m3fn", "float32", "bool")
_LAYOUTS = ("BKTHD", "KBTHD", "BHTKD")
_MANY = 400
"""Blocks of the large caches."""
_LAYERS = 100
"""Of the large caches: 15 MB, more than any buffer holds."""


def layers_of(
    axes: str, num_layers: int, num_blocks: int, seed: int = 1, *, dtype: str = "float16"
) -> BlockViews:
    """Views of a cache in one of the layouts that engines have."""
    layout = KVLayout(axes, {"B": num_blocks, "T": 4, "H": 3, "D": 8})
    return page_views(
        [tensor_of(dtype, layout.shape, seed=seed + layer) for layer in range(num_layers)], layout
    )


def message_of(views: Sequence[Any], block_ids: Sequence[int]) -> Any:
    """The message that sending these blocks makes, computed without :class:`~kvplug.transport.Blocks`."""
    import torch

    parts = [[view[list(block_ids)].view(torch.uint8) for view in layer] for layer in views]
    return torch.stack([torch.stack(layer, 1) for layer in parts]).view(views[0][0].dtype)


def _receive(
    pipe: Pipe, views: Any, block_ids: Sequence[int], timeout: float | None = None, **given: Any
) -> Call:
    """The call, ended, that receives blocks."""
    within = waits.patience_s if timeout is None else timeout
    return Call(lambda: pipe.recv_blocks(views, block_ids, timeout=within, **given)).end(within + 1)


def _shuffled() -> list[int]:
    return random.Random(1).sample(range(_MANY), _MANY)


def reporting(
    whole: list[bool], views: BlockViews, block_ids: Sequence[int], source: BlockViews, of: Sequence[int]
) -> Callable[[int], None]:
    """An ``on_layer``. It notes for each call whether the layer is the next one, and whole."""
    import torch

    def on_layer(layer: int) -> None:
        wanted, got = message_of([source[layer]], of), message_of([views[layer]], block_ids)
        is_same = torch.equal(wanted.view(torch.int16), got.view(torch.int16))
        whole.append(layer == len(whole) and is_same)

    return on_layer


class BlockMessages(PipeSuite):
    """``send_blocks`` and ``recv_blocks``."""

    @law("PIPE-1", "PIPE-5")
    def test_blocks_are_received_as_a_tensor_and_a_tensor_into_blocks_and_nothing_around_them(self) -> None:
        one, other = self.pair()
        small = tensor_of("int32", (3,))
        for dtype in {*_DTYPES} & {*dtypes()}:
            source = layers_of("BKTHD", 2, 9, dtype=dtype)
            for block_ids in ([4, 0, 8], [7], list(range(9)), [3, 3], []):
                message = message_of(source, block_ids)
                transfer = one.send_blocks(source, block_ids)
                sent(one, small)
                assert_same(message, received(other))
                assert_same(small, received(other))
                transfer.wait(waits.patience_s)
                if block_ids != [3, 3]:
                    sent(one, message)
                    self._fills(other, layers_of("BKTHD", 2, 9, seed=5, dtype=dtype), block_ids, message)

    @law("PIPE-1", "PIPE-5")
    @pytest.mark.parametrize("there", _LAYOUTS)
    def test_blocks_of_all_layers_go_from_any_layout_into_any_other(self, there: str) -> None:
        one, other = self.pair()
        source, ids = layers_of(there, 6, 12), random.Random(7)
        for here in _LAYOUTS:
            for count in (5, 1, 12):
                target = layers_of(here, 6, 20, seed=50)
                there_ids, here_ids = ids.sample(range(12), count), ids.sample(range(20), count)
                whole: list[bool] = []
                on_layer = reporting(whole, target, here_ids, source, there_ids)
                one.send_blocks(source, there_ids, timeout=waits.patience_s)
                self._fills(other, target, here_ids, message_of(source, there_ids), on_layer=on_layer)
                assert whole == [True] * 6

    def _fills(
        self, pipe: Pipe, target: BlockViews, block_ids: Sequence[int], message: Any, **given: Any
    ) -> None:
        """Receive into these blocks, and into no others."""
        others = [block_id for block_id in range(len(target[0][0])) if block_id not in block_ids]
        before = message_of(target, others)
        _receive(pipe, target, block_ids, **given).result()
        assert_same(message, message_of(target, block_ids))
        assert_same(before, message_of(target, others), "blocks that were not named were written")

    @law("PIPE-1", "PIPE-5")
    def test_rows_of_any_size_arrive_in_the_named_ones_and_in_no_others(self) -> None:
        import torch

        one, other = self.pair()
        for nbytes in (1, 65, 4096, 3 * MIB + 5):
            source, target = tensor_of("uint8", (5, nbytes)), torch.zeros(7, nbytes, dtype=torch.uint8)
            sending = Call(lambda s=source: one.send_blocks([s], [3, 1, 4]))  # type: ignore[misc]
            _receive(other, [target], [6, 0, 2]).result()
            sending.result().wait(waits.patience_s)
            assert_same(source[[3, 1, 4]], target[[6, 0, 2]])
            assert not target[[1, 3, 4, 5]].any(), "blocks that were not named were written"

    @law("PIPE-5")
    def test_layers_and_blocks_that_do_not_fit_are_refused_by_name_and_the_message_stays(self) -> None:
        one, other = self.pair()
        source = layers_of("BHTKD", 4, 9)
        misfits: list[tuple[BlockViews, list[int], str]] = [
            (layers_of("BKTHD", 3, 9, seed=50), [1, 2, 3], "3, 3, 2, 4, 3, 8"),
            (layers_of("BKTHD", 4, 9, seed=50), [1, 2], "4, 2, 2, 4, 3, 8"),
            (BlockViews([layer[:1] for layer in layers_of("BHTKD", 4, 9)]), [1, 2, 3], "4, 3, 4, 3, 8"),
            (layers_of("BKTHD", 4, 9, dtype="bfloat16"), [1, 2, 3], "bfloat16"),
        ]
        for message in (message_of(source, [1, 8, 2]), None):
            sent(one, message)
            for views, block_ids, given in misfits:
                before = message_of(views, range(9))
                error = raises(
                    TensorMismatchError,
                    lambda: other.recv_blocks(views, block_ids, on_layer=pytest.fail),  # type: ignore[arg-type]  # noqa: B023
                )
                assert message is None or given in str(error), f"it does not name what was given: {error}"
                assert_same(before, message_of(views, range(9)), "a cache was written")
            assert_same(message, received(other))

    @law("PIPE-5", "PIPE-6")
    def test_layers_that_are_late_are_not_reported_and_the_call_that_ends_reports_all(self) -> None:
        one, other = self.pair()
        source = layers_of("BHTKD", _LAYERS, _MANY)
        target = layers_of("BHTKD", _LAYERS, _MANY, seed=500)
        sending = Call(lambda: one.send_blocks(source, _shuffled()))
        for timeout in (0.001 * 1.5**number for number in range(30)):
            whole: list[bool] = []
            on_layer = reporting(whole, target, range(_MANY), source, _shuffled())
            error = _receive(other, target, range(_MANY), timeout, on_layer=on_layer).error
            assert all(whole), f"on_layer was called with layers that were not whole: {whole}"
            assert (len(whole) == _LAYERS) == (error is None), f"{len(whole)} layers were reported: {error!r}"
            if error is None:
                break
            if not isinstance(error, TimeoutError):
                assert isinstance(error, KvplugError), error  # the pipe is broken, and says so
                return
            target[0][0].fill_(0.5)  # the caches are the caller's again
        sending.result().wait(waits.patience_s)
