"""Pages are copied bit by bit. The compiled copies (pages.c) do what Python does, and find what it finds."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st

from kvplug.transport import (
    BlockViews,
    MissReason,
    PageBlocks,
    PageBuffers,
    PageCopy,
    PageFormat,
    PageMemory,
    PageRows,
    PageSeal,
    Series,
)
from kvplug.transport.store.copy import library
from kvplug.transport.store.format import Part, pieces_format
from kvplug.transport.store.memory import PagePieces

LAYERS, BLOCKS, HEADS, SIZE = 3, 8, 2, 4
SEAL = PageSeal()

compiled = pytest.mark.skipif(library() is None, reason="there are no compiled copies here")


def caches(block_size: int, order: str, dtype: torch.dtype, heads: int = HEADS) -> list[list[torch.Tensor]]:
    """For each layer keys and values as views [block, token, head, element] of one tensor in that order."""
    sizes = {"K": 2, "B": BLOCKS, "T": block_size, "H": heads, "D": SIZE}
    found = []
    for _ in range(LAYERS):
        whole = torch.randint(0, 250, [sizes[axis] for axis in order]).to(dtype)
        whole = whole.permute([order.index(axis) for axis in "KBTHD"])
        found.append([whole[0], whole[1]])
    return found


def some_pages(**more: Any) -> Any:
    """Tests get pages of any format, at any place of caches whose blocks have any size."""
    return given(
        block_size=st.sampled_from([2, 4, 6]),
        page_tokens=st.sampled_from([1, 2, 3, 4, 8]),
        dtype=st.sampled_from([torch.float16, torch.float32, torch.uint8, torch.float8_e4m3fn]),
        start=st.integers(0, 2),
        count=st.integers(1, 3),
        clip=st.booleans(),
        seed=st.integers(0, 99),
        **more,
    )


def shuffled_blocks(block_size: int, end: int, seed: int) -> list[int]:
    """Blocks for that many tokens."""
    torch.manual_seed(seed)
    blocks: list[int] = torch.randperm(BLOCKS)[: -(-end // block_size)].tolist()
    assume(len(blocks) * block_size >= end)
    return blocks


def form_of(page_tokens: int, dtype: torch.dtype, heads: int = HEADS) -> PageFormat:
    name = str(dtype).removeprefix("torch.")
    parts = [Part(name=each, dtype=name, shape=(page_tokens, heads, SIZE), head_axis=1) for each in "kv"]
    return PageFormat(page_tokens=page_tokens, num_layers=LAYERS, parts=tuple(parts))


def saved(memory: PageMemory, count: int, gap: int, *, native: bool) -> tuple[PageRows, list[bytes]]:
    """Rows with the pages of that memory, and their headers."""
    form = memory.format
    step = form.nbytes + gap
    buffer = memoryview(bytearray(count * step))
    rows = PageRows(buffer, [(index + 1) % count * step for index in range(count)], form.nbytes)
    copy, pages = PageCopy(memory, SEAL, native=native), range(count)
    copy.use(0, rows)
    made = copy.save(pages)
    assert copy.hash(pages) == made
    series = Series(form)
    return rows, [SEAL.header(series, b"", rows.row(at), each) for at, each in enumerate(made)]


def loading(rows: PageRows, headers: list[bytes], memory: PageMemory, **given: Any) -> PageCopy:
    copy = PageCopy(memory, SEAL, **given)
    copy.use(0, rows, headers)
    return copy


def checks(
    rows: PageRows, headers: list[bytes], memory: PageMemory, layers: range, *, native: bool = True
) -> list[Any]:
    count = len(rows)
    return loading(rows, headers, memory, native=native).load(range(count), layers) or [None] * count


@compiled
@pytest.mark.parametrize("order", ["KBTHD", "BHTKD", "KBHTD", "BKTHD", "HBTKD"])
@some_pages(heads=st.sampled_from([1, HEADS]), flipped=st.none() | st.integers(0, 10**6))
def test_they_copy_and_check_as_python_does(
    order, block_size, page_tokens, dtype, heads, start, count, clip, flipped, seed
) -> None:
    first = start * page_tokens
    end = first + count * page_tokens
    blocks = shuffled_blocks(block_size, end, seed)
    form, source = form_of(page_tokens, dtype, heads), caches(block_size, order, dtype, heads)
    from_cache = PageBlocks(form, source, blocks, first, count)
    assert from_cache.places() is not None
    rows, headers = saved(from_cache, count, gap=8, native=True)
    expected_rows, expected_headers = saved(from_cache, count, gap=8, native=False)
    assert rows.buffer == expected_rows.buffer
    assert headers == expected_headers
    if flipped is not None:
        rows.row(flipped % count)[flipped % form.nbytes] ^= 1
    ours = caches(block_size, order, dtype, heads)
    theirs = [[part.clone() for part in layer] for layer in ours]
    writable = range(first + 1, end - 1) if clip else None
    for views, is_native in ((ours, True), (theirs, False)):
        into = PageBlocks(form, views, blocks[::-1], first, count, writable=writable)
        found = [
            checks(rows, headers, into, layers, native=is_native) for layers in (range(1), range(1, LAYERS))
        ]
        alone = loading(rows, headers, PageBuffers(form, rows), native=is_native)
        verified = alone.verify(range(count))
        assert verified == [
            MissReason.CORRUPT if MissReason.CORRUPT in part else None for part in zip(*found)
        ]
        wrong = [[part[at] for part in found].count(MissReason.CORRUPT) for at in range(count)]
        assert wrong == [int(flipped is not None and flipped % count == at) for at in range(count)]
    for our_layer, their_layer in zip(ours, theirs, strict=True):
        for one, other in zip(our_layer, their_layer, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@compiled
@some_pages()
def test_layers_with_block_tables_of_their_own_are_copied_as_python_does(
    block_size, page_tokens, dtype, start, count, clip, seed
) -> None:
    first = start * page_tokens
    end = first + count * page_tokens
    blocks = shuffled_blocks(block_size, end, seed)
    form, source = form_of(page_tokens, dtype), caches(block_size, "KBTHD", dtype)

    def memory(views: list[list[torch.Tensor]], window: int) -> PageBlocks:
        """Layer 1 has blocks of its own, and none before the window."""
        missing = window // block_size
        own = [-1] * missing + blocks[::-1][missing:]
        tables = [
            PageBlocks.Group(layers=frozenset({0, 2}), block_ids=blocks),
            PageBlocks.Group(layers=frozenset({1}), block_ids=own, begin=window),
        ]
        writable = range(first + 1, end - 1) if clip else None
        return PageBlocks(form, views, tables, first, count, writable=writable if window else None)

    rows, headers = saved(memory(source, 0), count, gap=8, native=True)
    expected_rows, expected_headers = saved(memory(source, 0), count, gap=8, native=False)
    assert rows.buffer == expected_rows.buffer
    assert headers == expected_headers
    ours = caches(block_size, "KBTHD", dtype)
    theirs = [[part.clone() for part in layer] for layer in ours]
    for views, is_native in ((ours, True), (theirs, False)):
        into = memory(views, first + (end - first) // 2)
        assert into.places() is not None
        assert checks(rows, headers, into, range(LAYERS), native=is_native) == [None] * count
    for our_layer, their_layer in zip(ours, theirs, strict=True):
        for one, other in zip(our_layer, their_layer, strict=True):
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@compiled
def test_caches_that_are_not_alike_in_all_layers_are_left_to_python() -> None:
    views = caches(4, "KBTHD", torch.float16)
    views[1] = caches(4, "BHTKD", torch.float16)[1]
    assert BlockViews(views).places is None
    pages = PageBlocks(form_of(4, torch.float16), views, [0, 1], 0, 2)
    rows, headers = saved(pages, 2, gap=0, native=True)
    assert checks(rows, headers, pages, range(LAYERS)) == [None, None]


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=compiled), False])
@pytest.mark.parametrize("changed", [0, 2])
def test_a_slot_that_holds_another_page_by_the_end_of_the_copy_is_found(
    changed: int, is_native: bool
) -> None:
    form = form_of(4, torch.float16)
    pages = PageBlocks(form, caches(4, "KBTHD", torch.float16), [0, 1, 2], 0, 3)
    rows, headers = saved(pages, 3, gap=8, native=True)
    words = memoryview(bytearray(8 * 6)).cast("Q")
    at, expected = array("Q", [1, 3, 5]), array("Q", [7, 2**63 + 1, 9])
    for word, generation in zip(at, expected, strict=True):
        words[word] = generation
    copy = loading(
        rows, headers, pages, generations=PageCopy.Generations(words, at, expected), native=is_native
    )
    some, layers = range(1, 3), range(1, LAYERS)
    assert not any(copy.load(some, layers) or ())
    rows.row(2)[form.layer_nbytes] ^= 1
    words[at[changed]] += 1
    found = copy.load(some, layers)
    assert found == [None, MissReason.EVICTED if changed == 2 else MissReason.CORRUPT]


# -- of Python alone, against copies token by token ------------------------------------------------------


@pytest.mark.parametrize("order", ["KBTHD", "BHTKD", "KBHTD", "BKTHD"])
@some_pages(gap=st.sampled_from([0, 5]))
def test_pages_leave_a_cache_and_come_back_bit_by_bit(
    order, block_size, page_tokens, dtype, start, count, gap, clip, seed
) -> None:
    first = start * page_tokens
    end = first + count * page_tokens
    blocks = shuffled_blocks(block_size, end, seed)
    form, source = form_of(page_tokens, dtype), caches(block_size, order, dtype)
    target = caches(block_size, order, dtype)
    step = form.nbytes + gap
    offsets = [index * step for index in range(count)]
    if gap and count == 3:  # not evenly spaced
        offsets = [offsets[2], offsets[0], offsets[1]]
    rows = PageRows(memoryview(bytearray(count * step)), offsets, form.nbytes)
    PageBlocks(form, source, blocks, first, count).gather(0, rows)
    other = blocks[::-1]
    before = [[part.clone() for part in layer] for layer in target]
    writable = range(first + 1, end - 1) if clip else range(first, end)
    into = PageBlocks(form, target, other, first, count, writable=writable)
    into.scatter(0, rows.columns(0, form.layer_nbytes), range(1))  # layer by layer
    into.scatter(0, rows.columns(form.layer_nbytes, form.nbytes), range(1, LAYERS))
    for layer, part, token in itertools.product(range(LAYERS), range(2), range(len(blocks) * block_size)):
        here, there = ((at[token // block_size], token % block_size) for at in (blocks, other))
        wanted = source[layer][part][here] if token in writable else before[layer][part][there]
        found = target[layer][part][there]
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), (layer, part, token)
    layout = source[0][0][blocks[first // block_size], first % block_size].contiguous()
    assert bytes(rows.row(0)[: layout.nbytes]) == layout.view(torch.uint8).numpy().tobytes()


# -- pages that lie anywhere in memory, whole or in pieces -----------------------------------------------


@pytest.mark.parametrize("is_native", [pytest.param(True, marks=compiled), False])
@pytest.mark.parametrize("lie", ["evenly spaced", "anywhere", "whole"])
@given(
    sizes=st.lists(st.sampled_from([1, 7, 64, 4097]), min_size=1, max_size=4),
    repeats=st.sampled_from([1, 3, 40]),
    count=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_pages_leave_their_pieces_and_come_back_with_checksums(
    is_native: bool, lie: str, sizes: list[int], repeats: int, count: int, seed: int
) -> None:
    chance = random.Random(seed)
    sizes = sizes[:1] if lie == "whole" else sizes * repeats
    form = pieces_format(sizes)
    series = Series(form, seal=SEAL.id)

    def memory() -> tuple[list[list[memoryview]], PageMemory]:
        """As an engine has it: for each piece a buffer with the pieces of all pages, in or out of order."""
        step, pages = max(sizes), [list[memoryview]() for _ in range(count)]
        for size in sizes:
            buffer = memoryview(bytearray(step * count))
            order = chance.sample(range(count), count) if lie != "evenly spaced" else range(count)
            for page, at in zip(pages, order, strict=True):
                page.append(buffer[at * step :][:size])
        return pages, PagePieces(pages)

    (source, from_memory), (target, into_memory) = memory(), memory()
    for page in source:
        for piece in page:
            piece[:] = chance.randbytes(len(piece))
    rows = PageRows.dense(memoryview(bytearray(count * form.nbytes)), count, form.nbytes)
    copy = PageCopy(from_memory, SEAL, native=is_native)
    copy.use(0, rows)
    checksums = copy.save(range(count))
    assert [bytes(rows.row(index)) for index in range(count)] == [b"".join(page) for page in source]
    copy = PageCopy(into_memory, SEAL, native=is_native)
    for index in range(count):  # one row at a time
        header = SEAL.header(series, b"", rows.row(index), checksums[index])
        copy.use(index, PageRows.dense(rows.row(index), 1, form.nbytes), [header])
        assert not any(copy.load(range(index, index + 1)) or ())
    assert target == source
