"""Pages are copied bit by bit, and wrong ones are found: pages.c beside copies token by token."""

from __future__ import annotations

import itertools
import random
from array import array
from typing import Any

import pytest
import torch
from hypothesis import assume, given, strategies as st

from kvplug.engine import BlockViews, PageBlocks
from kvplug.errors import LayoutError, UnsupportedError
from kvplug.transport import (
    MissReason,
    PageBuffers,
    PageCopy,
    PageFormat,
    PageMemory,
    PageRows,
    PageSeal,
    Series,
)
from kvplug.transport.spec import StoreSpec
from kvplug.transport.store import compiled
from kvplug.transport.store.format import Part, opaque_format, pieces_format
from kvplug.transport.store.memory import PagePieces

LAYERS, BLOCKS, HEADS, SIZE = 3, 8, 2, 4
SEAL = PageSeal()
Caches = list[list[torch.Tensor]]


def caches(block_size: int, order: str, dtype: torch.dtype, heads: int = HEADS) -> Caches:
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


def saved(memory: PageMemory, count: int, gap: int) -> tuple[PageRows, list[bytes]]:
    """Rows with the pages of that memory, and their headers."""
    form = memory.format
    step = form.nbytes + gap
    buffer = memoryview(bytearray(count * step))
    rows = PageRows(buffer, [(index + 1) % count * step for index in range(count)], form.nbytes)
    copy, pages = PageCopy(memory, SEAL), range(count)
    copy.use(0, rows)
    made = copy.save(pages)
    assert copy.hash(pages) == made
    series = Series(form)
    headers = [SEAL.header(series, b"", rows.row(at), each) for at, each in enumerate(made)]
    assert headers == [SEAL.header(series, b"", rows.row(at)) for at in pages], "checksums by Python"
    return rows, headers


def loading(rows: PageRows, headers: list[bytes], memory: PageMemory, **given: Any) -> PageCopy:
    copy = PageCopy(memory, SEAL, **given)
    copy.use(0, rows, headers)
    return copy


def checks(rows: PageRows, headers: list[bytes], memory: PageMemory, layers: range) -> list[Any]:
    count = len(rows)
    return loading(rows, headers, memory).load(range(count), layers) or [None] * count


def tokens_of(views: Caches, blocks: list[int], layer: int, part: int) -> torch.Tensor:
    """The bytes of all tokens of these blocks, in order."""
    bits = views[layer][part].view(torch.uint8)
    return torch.cat([bits[block] for block in blocks]).flatten(1)


def rows_of(views: Caches, blocks: list[int], form: PageFormat, first: int, count: int) -> list[bytes]:
    """The bytes of the pages: layer after layer, part after part, token after token."""
    every = [tokens_of(views, blocks, *each) for each in itertools.product(range(LAYERS), range(2))]
    begins = range(first, first + count * form.page_tokens, form.page_tokens)
    return [
        b"".join(bytes(tokens[begin : begin + form.page_tokens].numpy()) for tokens in every)
        for begin in begins
    ]


@pytest.mark.parametrize("order", ["KBTHD", "BHTKD", "KBHTD", "BKTHD", "HBTKD"])
@some_pages(heads=st.sampled_from([1, HEADS]), flipped=st.none() | st.integers(0, 10**6), alike=st.booleans())
def test_pages_leave_a_cache_and_come_back_bit_by_bit(
    order, block_size, page_tokens, dtype, heads, start, count, clip, flipped, alike, seed
) -> None:
    first = start * page_tokens
    end = first + count * page_tokens
    blocks = shuffled_blocks(block_size, end, seed)
    form, source = form_of(page_tokens, dtype, heads), caches(block_size, order, dtype, heads)
    if not alike:  # a layer that lies in another way
        source[1] = caches(block_size, "BKHTD", dtype, heads)[0]
    rows, headers = saved(PageBlocks(form, source, blocks, first, count), count, gap=8)
    assert [bytes(rows.row(at)) for at in range(count)] == rows_of(source, blocks, form, first, count)
    wrong = None if flipped is None else flipped % count
    if flipped is not None:
        rows.row(flipped % count)[flipped % form.nbytes] ^= 1
    target, other = caches(block_size, order, dtype, heads), blocks[::-1]
    before = [[part.clone() for part in layer] for layer in target]
    writable = range(first + 1, end - 1) if clip else range(first, end)
    into = PageBlocks(form, target, other, first, count, writable=writable)
    found = [checks(rows, headers, into, layers) for layers in (range(1), range(1, LAYERS))]
    wrongs = [[part[at] for part in found].count(MissReason.CORRUPT) for at in range(count)]
    assert wrongs == [int(at == wrong) for at in range(count)]
    for layer, part in itertools.product(range(LAYERS), range(2)):
        wanted = tokens_of(before, other, layer, part)
        wanted[writable.start : writable.stop] = tokens_of(source, blocks, layer, part)[
            writable.start : writable.stop
        ]
        if wrong is not None and found[layer > 0][wrong]:
            begin = first + wrong * page_tokens
            wanted[max(begin, writable.start) : min(begin + page_tokens, writable.stop)] = 0
        assert torch.equal(tokens_of(target, other, layer, part), wanted)


@pytest.mark.parametrize("order", ["KBTHD", "BKTHD", "BHTKD", None])
@given(
    block_size=st.sampled_from([1, 4]),
    start=st.integers(0, 1),
    count=st.integers(1, 3),
    layers=st.sampled_from([range(1), range(1, LAYERS), range(LAYERS)]),
    flipped=st.none() | st.integers(0, 10**6),
    seed=st.integers(0, 99),
)
def test_pages_that_a_pipe_receives_straight_into_their_blocks_are_checked_there(
    order, block_size, start, count, layers, flipped, seed
) -> None:
    """``None``: into rows."""
    form, first = form_of(block_size, torch.float16), start * block_size
    blocks = shuffled_blocks(block_size, first + count * block_size, seed)
    rows, headers = saved(
        PageBlocks(form, caches(block_size, "KBTHD", torch.float16), blocks, first, count), count, 8
    )
    into: PageMemory = PageBuffers.empty(form, count)
    if order is not None:
        into = PageBlocks(form, caches(block_size, order, torch.float16), blocks[::-1], first, count)
    if order == "BHTKD":  # keys and values lie side by side: a block is in pieces
        assert into.block_bytes == 0
        return
    begin, nbytes = layers.start * form.layer_nbytes, into.block_bytes
    sent = [bytearray(rows.row(at)[begin : layers.stop * form.layer_nbytes]) for at in range(count)]
    wrong = None if flipped is None else flipped % count
    if wrong is not None:
        sent[wrong][flipped % len(sent[wrong])] ^= 1
    pages = range(count)
    views, block_ids = into.blocks(pages, layers)
    assert len(views) * nbytes == len(sent[0])
    for index, (view,) in enumerate(views):
        for page, block in enumerate(block_ids):
            view[block] = torch.frombuffer(sent[page], dtype=torch.uint8)[index * nbytes :][:nbytes]
    copy = PageCopy(into, SEAL)
    copy.expect(0, headers)
    found = copy.check(pages, layers) or [None] * count
    assert found == [MissReason.CORRUPT if page == wrong else None for page in pages]
    again = PageRows.dense(memoryview(bytearray(count * form.nbytes)), count, form.nbytes)
    copy.use(0, again)
    copy.save(pages)
    for page in pages:
        wanted = bytes(len(sent[page])) if page == wrong else bytes(sent[page])
        assert bytes(again.row(page)[begin : begin + len(wanted)]) == wanted


def test_pages_that_a_pipe_cannot_receive_straight_into_their_blocks_have_no_block_bytes() -> None:
    form, views = form_of(4, torch.float16), caches(4, "KBTHD", torch.float16)
    assert PageBlocks(form, views, [3, 1], 0, 2).block_bytes * 2 == form.layer_nbytes
    assert PageBlocks(form, views, [3, 1, 2], 2, 2).block_bytes == 0, "pages do not begin with a block"
    assert PageBlocks(form, views, [3, 1], 0, 2, writable=range(1, 8)).block_bytes == 0, "not all tokens"
    assert PageBlocks(form_of(8, torch.float16), views, [3, 1], 0, 1).block_bytes == 0, "two blocks a page"
    groups = [PageBlocks.Group(layers=frozenset({each}), block_ids=[3, 1]) for each in range(LAYERS)]
    assert PageBlocks(form, views, groups, 0, 2).block_bytes == 0, "several block tables"
    read_only = PageRows.dense(memoryview(bytes(form.nbytes)), 1, form.nbytes)
    assert PageBuffers(form, read_only).block_bytes == 0


@some_pages()
def test_layers_have_block_tables_of_their_own(
    block_size, page_tokens, dtype, start, count, clip, seed
) -> None:
    first = start * page_tokens
    end = first + count * page_tokens
    blocks = shuffled_blocks(block_size, end, seed)
    form, source = form_of(page_tokens, dtype), caches(block_size, "KBTHD", dtype)

    def memory(views: Caches, window: int) -> PageBlocks:
        """Layer 1 has blocks of its own, and none before the window."""
        missing = window // block_size
        own = [-1] * missing + blocks[::-1][missing:]
        tables = [
            PageBlocks.Group(layers=frozenset({0, 2}), block_ids=blocks),
            PageBlocks.Group(layers=frozenset({1}), block_ids=own, begin=window),
        ]
        writable = range(first + 1, end - 1) if clip else None
        return PageBlocks(form, views, tables, first, count, writable=writable if window else None)

    rows, headers = saved(memory(source, 0), count, gap=8)
    window = first + (end - first) // 2
    target = caches(block_size, "KBTHD", dtype)
    before = [[part.clone() for part in layer] for layer in target]
    into = memory(target, window)
    assert checks(rows, headers, into, range(LAYERS)) == [None] * count
    writable = range(first + 1, end - 1) if clip and window else range(first, end)
    for layer, part in itertools.product(range(LAYERS), range(2)):
        own = blocks[::-1] if layer == 1 else blocks
        begin = max(writable.start, window) if layer == 1 else writable.start
        wanted = tokens_of(before, own, layer, part)
        wanted[begin : max(begin, writable.stop)] = tokens_of(source, own, layer, part)[
            begin : max(begin, writable.stop)
        ]
        assert torch.equal(tokens_of(target, own, layer, part), wanted)
    if window > first:
        with pytest.raises(LayoutError, match="have no blocks"):
            saved(into, count, gap=0)


@pytest.mark.parametrize("changed", [0, 2])
def test_a_slot_that_holds_another_page_by_the_end_of_the_copy_is_found(changed: int) -> None:
    form = form_of(4, torch.float16)
    pages = PageBlocks(form, caches(4, "KBTHD", torch.float16), [0, 1, 2], 0, 3)
    rows, headers = saved(pages, 3, gap=8)
    words = memoryview(bytearray(8 * 6)).cast("Q")
    at, expected = array("Q", [1, 3, 5]), array("Q", [7, 2**63 + 1, 9])
    for word, generation in zip(at, expected, strict=True):
        words[word] = generation
    copy = loading(rows, headers, pages, generations=PageCopy.Generations(words, at, expected))
    some, layers = range(1, 3), range(1, LAYERS)
    assert not any(copy.load(some, layers) or ())
    rows.row(2)[form.layer_nbytes] ^= 1
    words[at[changed]] += 1
    found = copy.load(some, layers)
    assert found == [None, MissReason.EVICTED if changed == 2 else MissReason.CORRUPT]


PIECE = 128 << 10
"""``PIECE`` of pages.c."""


@pytest.mark.parametrize("nbytes", [PIECE, PIECE + 1, 3 * PIECE, 3 * PIECE + 5])
@pytest.mark.parametrize("flipped", [0, PIECE - 1, -1])
def test_large_parts_are_copied_and_hashed_piece_by_piece(nbytes: int, flipped: int) -> None:
    form = opaque_format(nbytes)
    source, target = PageBuffers.empty(form, 2), PageBuffers.empty(form, 2)
    source.rows().buffer[:] = random.Random(nbytes).randbytes(2 * nbytes)
    rows, headers = saved(source, 2, gap=8)
    assert [bytes(rows.row(at)) for at in range(2)] == [bytes(source.rows().row(at)) for at in range(2)]
    assert checks(rows, headers, target, range(1)) == [None, None]
    assert bytes(target.rows().buffer) == bytes(source.rows().buffer)
    copy = PageCopy(target, SEAL)
    copy.expect(0, headers)
    assert copy.check(range(2), range(1)) is None
    rows.row(1)[flipped] ^= 1
    wrong = [None, MissReason.CORRUPT]
    assert checks(rows, headers, target, range(1)) == wrong
    assert not any(target.rows().row(1))
    target.rows().row(1)[:] = rows.row(1)
    assert copy.check(range(2), range(1)) == wrong
    assert not any(target.rows().row(1)) and bytes(target.rows().row(0)) == bytes(source.rows().row(0))


# -- pages that lie anywhere in memory, whole or in pieces -----------------------------------------------


@pytest.mark.parametrize("lie", ["evenly spaced", "anywhere", "whole"])
@given(
    sizes=st.lists(st.sampled_from([1, 7, 64, 4097]), min_size=1, max_size=4),
    repeats=st.sampled_from([1, 3, 40]),
    count=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_pages_leave_their_pieces_and_come_back_with_checksums(
    lie: str, sizes: list[int], repeats: int, count: int, seed: int
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
    copy = PageCopy(from_memory, SEAL)
    copy.use(0, rows)
    checksums = copy.save(range(count))
    assert [bytes(rows.row(index)) for index in range(count)] == [b"".join(page) for page in source]
    copy = PageCopy(into_memory, SEAL)
    for index in range(count):  # one row at a time
        header = SEAL.header(series, b"", rows.row(index), checksums[index])
        copy.use(index, PageRows.dense(rows.row(index), 1, form.nbytes), [header])
        assert not any(copy.load(range(index, index + 1)) or ())
    assert target == source


# -- what cannot be copied ------------------------------------------------------------------------------


def test_memory_that_pages_c_cannot_copy_is_refused() -> None:
    form, views = form_of(4, torch.float16), caches(4, "KBTHD", torch.float16)
    views[1][0] = views[1][0].to("meta")
    with pytest.raises(LayoutError, match="on meta"):
        PageCopy(PageBlocks(form, views, [0, 1], 0, 2))
    views[1][0] = torch.zeros(BLOCKS, 4, HEADS, SIZE, dtype=torch.float32)
    with pytest.raises(LayoutError, match="bytes per token"):
        PageCopy(PageBlocks(form, BlockViews(views), [0, 1], 0, 2))
    with pytest.raises(LayoutError, match="do not fit pages"):
        PageCopy(PageBlocks(form, caches(4, "KBTHD", torch.float32), [0, 1], 0, 2))
    many = torch.zeros(BLOCKS, 4, *[2] * 5, 3)[..., :2]
    with pytest.raises(LayoutError, match="5 axes with gaps"):
        BlockViews([[many.permute(0, 1, 6, 5, 4, 3, 2, 7)]]).parts  # noqa: B018


def test_read_only_memory_is_read_and_not_written() -> None:
    pages = PagePieces([(memoryview(b"abcd"),)])
    rows, headers = saved(pages, 1, gap=0)
    assert bytes(rows.row(0)) == b"abcd"
    with pytest.raises(LayoutError, match="read-only"):
        checks(rows, headers, pages, range(1))


def test_without_the_compiled_part_no_store_is_viable_and_the_reason_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(compiled, "_FILE", tmp_path / "_pages.so")
    compiled.library.cache_clear()
    try:
        probe = StoreSpec(name="mine", summary="A store.", factory="mine:Store").run_probe()
        assert not probe.viable and "install kvplug again" in probe.reason
        with pytest.raises(UnsupportedError, match="install kvplug again"):
            PageCopy(PageBuffers.empty(opaque_format(4), 1))
    finally:
        monkeypatch.undo()
        compiled.library.cache_clear()
