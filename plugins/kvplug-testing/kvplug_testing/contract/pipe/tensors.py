"""Messages, tensors and blocks, arrive unchanged (law PIPE-1), also in memory of the caller (law PIPE-5)."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from kvplug import CapacityError, KvplugError, TimeoutError, UnsupportedError
from kvplug.engine import BlockViews, KVLayout
from kvplug.kit import MAX_DIMS
from kvplug.transport import Pipe, TensorMismatchError
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same, difference
from kvplug_testing.contract.base import law
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.contract.pipe.suite import MIB, PipeSuite, passes, received, sent
from kvplug_testing.resources import kernel_bytes
from kvplug_testing.waits import Call, raises

SHAPES: Final = [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 4)]
SIZES: Final = [1, 15, 4095, 4096, 4097, 65_535, 65_536, 65_537, MIB - 1, MIB, MIB + 1, 32 * MIB + 3]
"""Bytes, around typical sizes of buffers and pages, and more than any buffer holds."""
SPARSE_BYTES: Final = (4 << 30) + 12_345
_PEAK: Final = Path("/proc/self/clear_refs")
_MISFITS: Final[list[tuple[tuple[str, tuple[int, ...]] | None, tuple[str, tuple[int, ...]]]]] = [
    # message, out: (dtype, shape)
    (("float32", (6, 4)), ("float32", (4, 6))),
    (("float32", (6, 4)), ("int32", (6, 4))),
    (("int16", (8,)), ("uint8", (16,))),
    (("int64", (1,)), ("int64", ())),
    (("float32", (0, 3)), ("float32", (3, 0))),
    (("uint8", (8 * MIB + 1,)), ("uint8", (8 * MIB,))),
    (None, ("float32", (0,))),
]
_CACHES: Final = {"BKTHD": "bfloat16", "KBTHD": "float32", "BHTKD": "bool"}
"""Layouts that engines have, each with a dtype."""
_MANY: Final = 400
"""Blocks of the large caches."""
_LAYERS: Final = 100
"""Of the large caches: 15 MB, more than any buffer holds."""


def _out(dtype: str, shape: tuple[int, ...]) -> Any:
    """Memory filled with a pattern that no message contains."""
    return tensor_of(dtype, shape, seed=99)


class Tensors(PipeSuite):
    """One message at a time: tensors, and blocks of a paged cache."""

    @law("PIPE-1", "PIPE-5")
    def test_a_tensor_of_each_dtype_arrives_with_its_bits(self) -> None:
        one, other = self.pair()
        for dtype, shape in itertools.product(dtypes(), SHAPES):
            before, around = (_out(dtype, (2, *shape[::-1], 2)) for _ in range(2))
            turned = around[1, ..., 0].permute([*reversed(range(len(shape)))])
            for out in (None, _out(dtype, shape), turned):
                passes(one, other, tensor_of(dtype, shape), out)
            beside = [around[0], around[..., 1]]
            assert_same([before[0], before[..., 1]], beside, "memory beside out was written")

    @law("PIPE-1")
    def test_a_tensor_arrives_as_it_reads_however_it_lies_in_memory(self) -> None:
        import torch

        pair = self.pair()
        matrix, numbers = tensor_of("float32", (40, 30)), tensor_of("complex64", (4, 9))
        for message in (
            matrix.t(),
            matrix[::2, 1::3],
            matrix[3:7],
            matrix[0].expand(50, 30),
            tensor_of("bfloat16", (2, 3, 4, 5)).permute(3, 1, 0, 2),
            tensor_of("float8_e4m3fn", (6, 7)).t(),
            numbers.conj(),
            numbers.conj().t(),
            numbers.conj().imag,
            torch.nn.Parameter(matrix),
            tensor_of("int16", (*[1] * (self.max_dims - 2), 3, 2)),
            *(tensor_of("uint8", (size,), seed=size) for size in SIZES),
        ):
            passes(*pair, message)
            passes(*pair[::-1], message)
        for out in (numbers.clone().conj(), numbers.clone().conj().imag):
            passes(*pair, torch.arange(36).view(4, 9).to(out.dtype), out)

    @property
    def max_dims(self) -> int:
        """The limit that the transport claims, or that of the wire format."""
        claimed = None if self.spec is None else self.spec.capabilities.max_dims
        return MAX_DIMS if claimed is None else min(MAX_DIMS, claimed)

    @law("PIPE-1", "PIPE-2")
    def test_what_is_not_carried_is_refused_and_nothing_is_queued(self) -> None:
        import torch

        one, other = self.pair()
        dims = [1] * (self.max_dims + 1)
        for refused in (torch.zeros(dims), torch.eye(3).to_sparse(), torch.empty(3, device="meta"), b"bytes"):
            raises(UnsupportedError, partial(one.send_tensor, refused, timeout=waits.patience_s))
            passes(one, other, tensor_of("int32", (2,)))

    @law("PIPE-1", level="long", timeout_s=900.0)
    def test_more_than_four_gibibytes_arrive_from_one_mapped_file_in_another(self, tmp_path: Path) -> None:
        import torch

        free = min(shutil.disk_usage(tmp_path).free, kernel_bytes("meminfo", "MemAvailable"))
        if free < 3 * SPARSE_BYTES:
            pytest.skip(f"{free >> 20} MiB are free, and {3 * SPARSE_BYTES >> 20} may be needed")
        one, other = self.pair()
        source, target = (
            torch.from_file(str(tmp_path / name), shared=True, size=SPARSE_BYTES, dtype=torch.uint8)
            for name in ("source", "target")
        )
        marks = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, SPARSE_BYTES - 1]  # counters overflow here
        source[marks] = torch.arange(1, len(marks) + 1, dtype=torch.uint8)
        sending = Call(lambda: one.send_tensor(source))
        assert Call(lambda: other.recv_tensor(target, timeout=800)).result(810) is target
        sending.result(60).wait(60)
        assert torch.equal(source, target), "other bytes came"

    # -- memory of the caller ------------------------------------------------------------------

    @law("PIPE-5")
    def test_a_large_message_is_received_into_out_without_another_tensor(self) -> None:
        import torch

        if self.spec is None or not self.spec.capabilities.receive_into:
            pytest.skip(f"{self.called} does not claim receive_into")
        if not _PEAK.exists():
            pytest.skip("this needs Linux's /proc")
        one, other = self.pair()
        message, out = torch.ones(64 * MIB, dtype=torch.uint8), torch.zeros(64 * MIB, dtype=torch.uint8)
        transfer = sent(one, message)
        _PEAK.write_text("5")  # reset the peak
        before = kernel_bytes("self/status", "VmRSS")
        received(other, out)
        more = kernel_bytes("self/status", "VmHWM") - before
        assert_same(message, out)
        transfer.wait(waits.patience_s)
        assert more < message.nbytes // 2, f"{more >> 20} MiB more were used for a message of 64 MiB"

    @law("PIPE-5")
    def test_a_message_that_does_not_fit_out_is_refused_and_stays(self) -> None:
        one, other = self.pair()
        for offered, wanted in _MISFITS:
            message, misfit = None if offered is None else tensor_of(*offered), _out(*wanted)
            for out in (None, None if offered is None else _out(*offered)):
                sending = Call(partial(one.send_tensor, message))
                for _ in range(2):
                    raises(TensorMismatchError, partial(other.recv_tensor, misfit))
                    assert_same(_out(*wanted), misfit, "memory was written although the message was refused")
                assert_same(message, received(other, out), "the refused message did not stay as it was")
                sending.result().wait(waits.patience_s)
                passes(one, other, tensor_of("int32", (5,)))

    @law("ALL-10")
    def test_a_message_beyond_the_limit_is_refused_before_memory_is_taken_and_stays(self) -> None:
        one, other = self.pair(max_message_bytes=1000)
        large, small = tensor_of("uint8", (1001,)), tensor_of("uint8", (1000,))
        for message in (large, large, small):
            sent(one, message)
        for _ in range(2):
            for _ in range(2):
                raises(CapacityError, lambda: other.recv_tensor(timeout=waits.patience_s))
            got = received(other, _out("uint8", (1001,)))
            assert_same(large, got, "it was not received into memory of the caller's")
        assert_same(small, received(other))

    # -- blocks of a paged cache ---------------------------------------------------------------

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
                receive = partial(other.recv_blocks, views, block_ids, on_layer=_not_reported)
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
                # The call that receives the rest also compares it, layer by layer.
                outcome = Call(partial(receive, next(kinds), timeout)).outcome(timeout + waits.patience_s)
                if not isinstance(outcome, TimeoutError):
                    break
            if isinstance(outcome, KvplugError):  # the pipe is broken, and every later call raises
                again = raises(KvplugError, lambda: other.recv_tensor(timeout=waits.patience_s))
                assert not isinstance(again, TimeoutError), f"it was broken ({outcome!r}), and then waited"
                return
            assert_same(message, outcome, "received with many short deadlines")
        for transfer in sending.result():
            transfer.wait(waits.patience_s)
        raises(TimeoutError, lambda: other.recv_tensor(timeout=0.05))


def layers_of(
    axes: str, num_layers: int, num_blocks: int, seed: int = 1, *, dtype: str = "float16"
) -> BlockViews:
    """Views of a cache in one of the layouts that engines have."""
    layout = KVLayout(axes, {"B": num_blocks, "T": 4, "H": 3, "D": 8})
    return layout.page_views(
        [tensor_of(dtype, layout.shape, seed=seed + layer) for layer in range(num_layers)]
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


def _not_reported(layer: int) -> None:
    raise AssertionError(f"layer {layer} was reported")


def _fills(pipe: Pipe, target: BlockViews, block_ids: Sequence[int], message: Any, **given: Any) -> None:
    """Receive the message into these blocks, and into no others."""
    others = [block_id for block_id in range(len(target[0][0])) if block_id not in block_ids]
    before = message_of(target, others)
    Call(partial(pipe.recv_blocks, target, block_ids, timeout=waits.patience_s, **given)).result()
    assert_same(message, message_of(target, block_ids))
    assert_same(before, message_of(target, others), "blocks that were not named were written")
