"""Memory of pages: rows of bytes, and blocks of a paged cache with any strides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, strategies as st

from kvplug.engine import LayoutError
from kvplug.transport.store.cache_blocks import PageBlocks
from kvplug.transport.store.format import PageFormat, Part, opaque_format
from kvplug.transport.store.memory import PageBuffers, PageRows

LAYERS, BLOCKS, HEADS, SIZE = 3, 8, 2, 4


def caches(block_size: int, order: str, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """For each layer keys and values as views [block, token, head, element] of one tensor in that order."""
    sizes = {"K": 2, "B": BLOCKS, "T": block_size, "H": HEADS, "D": SIZE}
    views = []
    for _ in range(LAYERS):
        whole = torch.randint(0, 100, [sizes[axis] for axis in order]).to(dtype)
        whole = whole.permute([order.index(axis) for axis in "KBTHD"])
        views.append([whole[0], whole[1]])
    return views


def form_of(page_tokens: int, dtype: torch.dtype) -> PageFormat:
    name = str(dtype).removeprefix("torch.")
    parts = [Part(name=each, dtype=name, shape=(page_tokens, HEADS, SIZE), head_axis=1) for each in "kv"]
    return PageFormat(page_tokens=page_tokens, num_layers=LAYERS, parts=tuple(parts))


@pytest.mark.parametrize("order", ["KBTHD", "BHTKD", "KBHTD", "BKTHD"])
@given(
    block_size=st.sampled_from([2, 4, 6]),
    page_tokens=st.sampled_from([2, 3, 4, 8]),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn]),
    start=st.integers(0, 2),
    count=st.integers(1, 3),
    gap=st.sampled_from([0, 5]),
    clip=st.booleans(),
    seed=st.integers(0, 99),
)
def test_pages_leave_a_cache_and_come_back_bit_by_bit(
    order, block_size, page_tokens, dtype, start, count, gap, clip, seed
) -> None:
    torch.manual_seed(seed)
    first = start * page_tokens
    blocks = torch.randperm(BLOCKS)[: -(-(first + count * page_tokens) // block_size)].tolist()
    if len(blocks) * block_size < first + count * page_tokens:
        return
    form, source, target = (
        form_of(page_tokens, dtype),
        caches(block_size, order, dtype),
        caches(block_size, order, dtype),
    )
    rows = PageRows(
        memoryview(bytearray(count * (form.nbytes + gap))),
        [index * (form.nbytes + gap) for index in range(count)],
        form.nbytes,
    )
    if gap and count == 3:  # not evenly spaced
        rows = PageRows(rows.buffer, [rows.offsets[2], rows.offsets[0], rows.offsets[1]], form.nbytes)
    PageBlocks(form, source, blocks, first, count).gather(0, rows)
    other = blocks[::-1]
    before = [[part.clone() for part in layer] for layer in target]
    end = first + count * page_tokens
    writable = range(first + 1, end - 1) if clip else range(first, end)
    into = PageBlocks(form, target, other, first, count, writable=writable)
    into.scatter(0, rows.columns(0, form.layer_nbytes), range(1))  # layer by layer
    into.scatter(0, rows.columns(form.layer_nbytes, form.nbytes), range(1, LAYERS))
    for layer in range(LAYERS):
        for part in range(2):
            for token in range(len(blocks) * block_size):
                here = source[layer][part][blocks[token // block_size], token % block_size]
                there = target[layer][part][other[token // block_size], token % block_size]
                moved = token in writable
                expected = (
                    here if moved else before[layer][part][other[token // block_size], token % block_size]
                )
                assert torch.equal(there.view(torch.uint8), expected.view(torch.uint8)), (layer, part, token)
    layout = source[0][0][blocks[first // block_size], first % block_size].contiguous()
    assert bytes(rows.row(0)[: layout.nbytes]) == layout.view(torch.uint8).numpy().tobytes()


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    form, views = form_of(4, torch.float16), caches(4, "KBTHD", torch.float16)
    for blocks, first, count in (
        ([0], 0, 2),
        ([0, 0], 0, 2),
        ([0, BLOCKS], 0, 2),
        ([-1, 0], 0, 2),
        ([0.5, 1], 0, 2),
    ):
        with pytest.raises(LayoutError):
            PageBlocks(form, views, blocks, first, count)
    with pytest.raises(LayoutError):
        PageBlocks(form, views[:2], [0], 0, 1)
    pages = PageBlocks(form, views, [0, 1], 0, 2)
    rows = PageBuffers.empty(form, 2).rows()
    for first, part, layers in (
        (1, rows, None),
        (0, rows.columns(0, 8), None),
        (0, rows, range(1, 4)),
        (0, rows, range(1)),
    ):
        with pytest.raises(LayoutError):
            pages.gather(first, part, layers)
    with pytest.raises(LayoutError):
        PageRows(memoryview(bytearray(8)), [0, 5], 4)
    with pytest.raises(LayoutError):
        PageBuffers(opaque_format(8), PageRows.dense(memoryview(bytearray(8)), 2, 4))


def test_rows_that_are_evenly_spaced_are_one_tensor_over_the_same_memory() -> None:
    rows = PageRows(memoryview(bytearray(range(20))), [2, 7, 12], 4)
    tensor = rows.as_tensor()
    assert tensor.tolist() == [[2, 3, 4, 5], [7, 8, 9, 10], [12, 13, 14, 15]]
    tensor[1, 1] = 99
    assert rows.row(1)[1] == 99
    assert PageRows(rows.buffer, [2, 7, 13], 4).as_tensor() is None
    assert PageRows(rows.buffer, [7, 2], 4).as_tensor() is None
