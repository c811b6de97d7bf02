"""Blocks of a paged cache as one message (laws PIPE-1 and PIPE-5)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import pytest

from kvplug import KvplugError, TimeoutError
from kvplug.engine import KVLayout, page_views
from kvplug.transport import BlockViews, Pipe, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, received, sent
from kvplug_testing.waits import Call, raises

_CACHES: Final = {"BKTHD": "bfloat16", "KBTHD": "float32", "BHTKD": "bool"}
"""Layouts that engines have, each with a dtype."""
_MANY: Final = 400
"""Blocks of the large caches."""
_LAYERS: Final = 100
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


def _reporting(whole: list[bool], views: BlockViews, block_ids: Sequence[int], wanted: Any) -> Any:
    """An ``on_layer``. It notes for each call whether the layer is the next one, and whole."""

    def on_layer(layer: int) -> None:
        got = message_of([views[layer]], block_ids)
        whole.append(layer == len(whole) and not difference(wanted[layer : layer + 1], got))

    return on_layer


def _fills(pipe: Pipe, target: BlockViews, block_ids: Sequence[int], message: Any, **given: Any) -> None:
    """Receive the message into these blocks, and into no others."""
    others = [block_id for block_id in range(len(target[0][0])) if block_id not in block_ids]
    before = message_of(target, others)
    Call(partial(pipe.recv_blocks, target, block_ids, timeout=waits.patience_s, **given)).result()
    assert_same(message, message_of(target, block_ids))
    assert_same(before, message_of(target, others), "blocks that were not named were written")


class BlockMessages(PipeSuite):
    """``send_blocks`` and ``recv_blocks``."""

    @law("PIPE-1", "PIPE-5")
    @pytest.mark.parametrize("there", _CACHES)
    def test_blocks_of_all_layers_go_from_any_layout_into_any_other_and_from_and_to_tensors(
        self, there: str
    ) -> None:
        one, other = self.pair()
        source, ids = layers_of(there, 6, 12, dtype=_CACHES[there]), random.Random(7)
        for here, count in itertools.product(_CACHES, (5, 1, 12)):
            there_ids, here_ids = ids.sample(range(12), count), ids.sample(range(20), count)
            message, whole = message_of(source, there_ids), list[bool]()
            target = layers_of(here, 6, 20, seed=50, dtype=_CACHES[there])
            one.send_blocks(source, there_ids, timeout=waits.patience_s)
            _fills(other, target, here_ids, message, on_layer=_reporting(whole, target, here_ids, message))
            assert whole == [True] * 6
            sent(one, message)
            _fills(other, layers_of(here, 6, 20, seed=70, dtype=_CACHES[there]), here_ids, message)
        for block_ids in ([4, 0, 8], [3, 3], []):
            transfer = one.send_blocks(source, block_ids)
            assert_same(message_of(source, block_ids), received(other))
            transfer.wait(waits.patience_s)

    @law("PIPE-1", "PIPE-5")
    def test_rows_of_any_size_arrive_in_the_named_ones_and_in_no_others(self) -> None:
        import torch

        one, other = self.pair()
        for nbytes in (1, 65, 4096, 3 * MIB + 5):
            source, target = tensor_of("uint8", (5, nbytes)), torch.zeros(7, nbytes, dtype=torch.uint8)
            sending = Call(partial(one.send_blocks, [source], [3, 1, 4]))
            Call(partial(other.recv_blocks, [target], [6, 0, 2], timeout=waits.patience_s)).result()
            sending.result().wait(waits.patience_s)
            assert_same(source[[3, 1, 4]], target[[6, 0, 2]])
            assert not target[[1, 3, 4, 5]].any(), "blocks that were not named were written"

    @law("PIPE-5")
    def test_layers_and_blocks_that_do_not_fit_are_refused_by_name_and_the_message_stays(self) -> None:
        one, other = self.pair()
        misfits: list[tuple[BlockViews, list[int], str]] = [
            (layers_of("BKTHD", 3, 9, seed=50), [1, 2, 3], "3, 3, 2, 4, 3, 8"),
            (layers_of("BKTHD", 4, 9, seed=50), [1, 2], "4, 2, 2, 4, 3, 8"),
            (BlockViews([layer[:1] for layer in layers_of("BHTKD", 4, 9)]), [1, 2, 3], "4, 3, 4, 3, 8"),
            (layers_of("BKTHD", 4, 9, dtype="bfloat16"), [1, 2, 3], "bfloat16"),
        ]
        for message in (message_of(layers_of("BHTKD", 4, 9), [1, 8, 2]), None):
            sent(one, message)
            for views, block_ids, given in misfits:
                before = message_of(views, range(9))
                receive = partial(other.recv_blocks, views, block_ids, on_layer=pytest.fail)
                error = raises(TensorMismatchError, receive)
                assert message is None or given in str(error), f"it does not name what was given: {error}"
                assert_same(before, message_of(views, range(9)), "a cache was written")
            assert_same(message, received(other))

    @law("PIPE-6", "PIPE-5")
    @pytest.mark.parametrize("into", ["memory", "out", "blocks", "blocks, memory, out"])
    def test_a_receive_that_times_out_within_a_message_goes_on_with_it(self, into: str) -> None:
        """Memory of the caller is the caller's again after each call."""
        import torch

        one, other = self.pair()
        raises(TimeoutError, lambda: other.recv_tensor(timeout=0.01))
        source = layers_of("BHTKD", _LAYERS, _MANY)
        shuffled = random.Random(1).sample(range(_MANY), _MANY)
        message = message_of(source, shuffled)
        target = layers_of("BHTKD", _LAYERS, _MANY, seed=500)
        out = torch.empty_like(message.transpose(0, 1)).transpose(0, 1)

        def receive(kind: str, timeout: float) -> Any:
            if kind == "memory":
                return other.recv_tensor(timeout=timeout)
            if kind == "out":
                return other.recv_tensor(out.fill_(0.5), timeout=timeout)
            whole: list[bool] = []
            on_layer = _reporting(whole, target, range(_MANY), message)
            target[0][0].fill_(0.5)
            try:
                other.recv_blocks(target, range(_MANY), timeout=timeout, on_layer=on_layer)
            finally:
                assert all(whole), f"on_layer was called with layers that were not whole: {whole}"
            assert len(whole) == _LAYERS, f"{len(whole)} layers were reported"
            return message_of(target, range(_MANY))

        kinds = itertools.cycle(into.split(", "))
        sending = Call(lambda: [one.send_blocks(source, shuffled) for _ in range(3)])
        for _ in range(3):
            for number in range(45):
                timeout = 0.0005 * 1.2**number
                outcome = Call(partial(receive, next(kinds), timeout)).outcome(timeout + 1)
                if not isinstance(outcome, TimeoutError):
                    break
            if isinstance(outcome, KvplugError):  # the pipe is broken, and every later call says so
                again = raises(KvplugError, lambda: other.recv_tensor(timeout=waits.patience_s))
                assert not isinstance(again, TimeoutError), f"it was broken ({outcome!r}), and then waited"
                return
            assert_same(message, outcome, "received with many short deadlines")
        for transfer in sending.result():
            transfer.wait(waits.patience_s)
        raises(TimeoutError, lambda: other.recv_tensor(timeout=0.05))
