"""Rows of tensors as one message: bits, shapes, ranges, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplug.engine import BlockViews, KVLayout, LayoutError
from kvplug.net.wire.tensors import dtype_of
from kvplug.transport import Blocks

DTYPES = [
    *("uint8", "bool", "float8_e4m3fn", "float16", "bfloat16"),
    *("float32", "int64", "complex64", "complex128"),
]
ROWS = [(), (1,), (3,), (8,), (16,), (5, 4), (16, 3, 64)]


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 1) -> Any:
    """Any bits: numbers that are none among them."""
    generator = torch.Generator().manual_seed(seed)
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    flat = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    if dtype is torch.bool:
        flat &= 1
    return flat.view(dtype).view(shape)


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def views_of(kind: str, dtype: torch.dtype, row: tuple[int, ...]) -> list[Any]:
    """Two views of nine blocks."""
    cache = filled((9, 2, *row), dtype)
    if kind == "side by side":
        return [cache[:, 0], cache[:, 1]]
    if kind == "apart":
        return [cache[:, 0].clone(), cache[:, 1].clone()]
    if kind == "not aligned":
        flat = filled((9 * 2 * torch.Size(row).numel() + 1,), dtype)[1:]
        return [flat.view(9, 2, *row)[:, 0], flat.view(9, 2, *row)[:, 1]]
    return [cache[:, 0].transpose(1, -1), cache[:, 1].transpose(1, -1)]  # rows that are not contiguous


def naive(views: list[Any], block_ids: list[int]) -> Any:
    return torch.cat([bits(view[block_id]) for view in views for block_id in block_ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["side by side", "apart", "not aligned", "turned"])
def test_rows_are_gathered_and_scattered_with_their_bits(kind: str, dtype: str) -> None:
    of_torch = dtype_of(dtype)
    there, here = [7, 0, 3, 8], [1, 2, 8, 5]
    for row in ROWS if kind != "turned" else [(16, 3, 64), (5, 4)]:
        source = views_of(kind, of_torch, row)
        message = Blocks(source, there).gathered()
        assert tuple(message.shape) == (2, 4, *source[0].shape[1:])
        assert torch.equal(bits(message), naive(source, there))
        target = [torch.zeros_like(view) for view in source]
        target = target if kind == "apart" else [view.copy_(0) for view in views_of(kind, of_torch, row)]
        Blocks(target, here).scatter(0, message.view(8, *source[0].shape[1:]))
        assert torch.equal(naive(target, here), naive(source, there))
        assert not bool(naive(target, [0, 3, 4, 6, 7]).any()), "rows that were not named were written"


@pytest.mark.parametrize(
    ("views", "block_ids", "message"),
    [
        ([], [0], "at least one view"),
        ([torch.zeros(())], [0], "the same shape"),
        ([torch.zeros(4, 2), torch.zeros(4, 3)], [0], r"\[4, 2\] and \[4, 3\]"),
        ([torch.zeros(4, 2), torch.zeros(4, 2, dtype=torch.int32)], [0], "float32 .*int32"),
        ([torch.zeros(4, 2)], [4], "block 4 is out of range: the cache has 4 blocks"),
        ([torch.zeros(4, 2)], [-1], "block -1"),
        ([torch.zeros(4, 2)], [0.5], "64-bit integers"),
        ([torch.zeros(4, 2)], [2**70], "64-bit integers"),
        ([torch.ones(4, 3, dtype=torch.complex64).conj()], [0], "resolve"),
        ([torch.ones(4, 3, dtype=torch.complex64).conj().imag], [0], "resolve"),
        (BlockViews([[torch.zeros(4)] * 2, [torch.zeros(4)]]), [0], "layer 0 has 2 parts, but layer 1 has 1"),
        (BlockViews([[torch.zeros(4, 3)], [torch.zeros(4, 2)]]), [0], r"\[4, 2\] \(layer 1, part 0\)"),
    ],
)
def test_blocks_that_cannot_be_are_refused(views: Any, block_ids: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Blocks(views, block_ids)


def test_blocks_that_lie_over_each_other_or_nowhere_are_at_no_address() -> None:
    plain = torch.zeros(4, 3)
    memory = Blocks([plain], [1]).memory
    assert memory is not None
    assert (list(memory.bases), list(memory.block_strides)) == ([plain.data_ptr()], [12])
    assert (memory.num_parts, memory.run_bytes, memory.counts) == (1, 12, ())
    assert Blocks([plain], []).memory is None
    assert Blocks([plain[:1].expand(4, 3)], [1, 2]).memory is None
    assert Blocks([torch.zeros(4, 1).expand(4, 3)], [1]).memory is None
    assert Blocks([plain, torch.zeros(3, 4).t()], [1]).memory is None  # of other strides
    assert Blocks([plain.to("meta")], [1]).memory is None
    assert Blocks([plain.as_subclass(type("Ours", (torch.Tensor,), {}))], [1]).memory is None


def test_views_whose_blocks_overlap_have_addresses_for_blocks_that_do_not() -> None:
    """A block may begin at each byte of a buffer, as pages of any length do."""
    buffer = torch.arange(20, dtype=torch.uint8)
    view = buffer.as_strided((18, 3), (1, 1))
    memory = Blocks([view], [9, 0, 4]).memory
    assert memory is not None and list(memory.block_strides) == [1]
    assert Blocks([view], [9, 0, 2]).memory is None
    rows = torch.zeros(3, 3, dtype=torch.uint8)
    Blocks([view], [9, 0, 2]).gather(0, rows)
    assert rows.tolist() == [[9, 10, 11], [0, 1, 2], [2, 3, 4]]


@pytest.mark.parametrize("nbytes", [3, 20_000])
def test_blocks_of_views_that_overlap_are_gathered_and_scattered(nbytes: int) -> None:
    source, target = filled((4 * nbytes,), torch.uint8), torch.zeros(4 * nbytes, dtype=torch.uint8)

    def blocks(buffer: torch.Tensor) -> Blocks:
        views = [buffer.as_strided((2 * nbytes, nbytes), (1, 1), at) for at in (0, nbytes)]
        return Blocks(views, [nbytes + 1, 0])

    message = blocks(source).gathered().view(4, nbytes)
    begins = [nbytes + 1, 0, 2 * nbytes + 1, nbytes]
    assert torch.equal(message, torch.stack([source[at : at + nbytes] for at in begins]))
    blocks(target).scatter(1, message[1:3])
    expected = torch.zeros_like(source)
    for at in begins[1:3]:
        expected[at : at + nbytes] = source[at : at + nbytes]
    assert torch.equal(target, expected)


@pytest.mark.parametrize(
    ("axes", "runs"),
    [
        # parts, bytes of a run, and the axes outside: of 3 heads of 8 numbers of 2 bytes, 4 tokens a block
        ("BKTHD", (1, 2 * 4 * 3 * 16, (), ())),
        ("KBTHD", (1, 4 * 3 * 16, (2,), (9 * 4 * 3 * 16,))),
        ("BHTKD", (1, 16, (2, 4, 3), (16, 32, 4 * 32))),
        ("BTHKD", (1, 16, (2, 12), (16, 32))),
    ],
)
def test_where_blocks_lie_has_as_few_runs_as_the_layout_allows(axes: str, runs: Any) -> None:
    layout = KVLayout(axes, {"B": 9, "T": 4, "H": 3, "D": 8})
    caches = [filled(layout.shape, torch.float16, seed) for seed in range(3)]
    memory = Blocks(layout.page_views(caches), [1]).memory
    assert memory is not None
    assert (memory.num_parts, memory.run_bytes, memory.counts, memory.strides) == runs
    assert list(memory.bases) == [cache.data_ptr() for cache in caches]


def test_parts_that_are_not_equally_far_apart_are_places_of_their_own() -> None:
    views = [[filled((4, 3), torch.int8, seed) for seed in range(2)] for _ in range(9)]
    memory = Blocks(BlockViews(views), [1]).memory
    assert memory is not None
    assert memory.num_parts in (1, 2)  # 1: the allocator has put all pairs equally far apart
    apart = torch.zeros(100, dtype=torch.int8)
    views = [[apart[:12].view(4, 3), apart[start : start + 12].view(4, 3)] for start in (20, 50)]
    memory = Blocks(BlockViews(views), [1]).memory
    assert memory is not None
    assert (memory.num_parts, len(memory.bases)) == (2, 4)


def test_layers_are_reported_in_order_once_and_an_error_of_the_callback_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reported = []

    def on_layer(layer: int) -> None:
        reported.append(layer)
        if layer == 1:
            raise ValueError("no use for it")

    blocks = Blocks([torch.zeros(4, 3)] * 4, [1, 2], on_layer=on_layer)
    assert (blocks.awaited_bytes, blocks.nbytes) == (24, 96)
    blocks.arrived(23)
    assert reported == []
    blocks.arrived(71)
    assert (reported, blocks.awaited_bytes) == ([0, 1], 72)
    for _ in range(2):
        blocks.arrived(96)
    assert (reported, blocks.awaited_bytes) == ([0, 1, 2, 3], 96)
    assert "no use for it" in caplog.text
    reported.clear()
    Blocks([torch.zeros(4, 3)] * 2, [], on_layer=reported.append).arrived(0)
    assert reported == [0, 1]


def test_blocks_that_follow_one_another_are_one_piece_of_each_view() -> None:
    cache = filled((2, 9, 3, 4), torch.float16)
    found = Blocks(list(cache), [2, 3, 4]).runs()
    assert found is not None
    assert [each.data_ptr() for each in found] == [cache[0, 2].data_ptr(), cache[1, 2].data_ptr()]
    assert torch.equal(bits(torch.stack(found)), bits(cache[:, 2:5]))
    for block_ids in ([], [2, 4], [3, 2], [1, 2, 2]):
        assert Blocks(list(cache), block_ids).runs() is None
    assert Blocks([filled((9, 2, 3), torch.int8)[:, 0]], [2, 3]).runs() is None


def test_blocks_of_one_view_that_follow_one_another_are_the_message_itself() -> None:
    cache = filled((9, 3, 4), torch.float16)
    found = Blocks([cache], [2, 3, 4])
    message = found.in_place()
    assert message is not None and message.shape == found.shape
    assert message.data_ptr() == cache[2].data_ptr()
    assert torch.equal(bits(message), bits(found.gathered()))
    for views, block_ids in (([cache], [2, 4]), ([cache, cache], [2]), ([cache.transpose(1, 2)], [2])):
        assert Blocks(views, block_ids).in_place() is None
