"""Pages in several pieces are copied by compiled code and by Python to the same bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from kvplug.engine import LayoutError
from kvplug.transport import PagePieces, PageReading, PageRows, PageSaving, PageSeal, Series, pieces_format

SEAL = PageSeal()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("even", [True, False], ids=["evenly spaced", "anywhere"])
@given(
    sizes=st.lists(st.sampled_from([1, 7, 64, 4097]), min_size=1, max_size=4),
    repeats=st.sampled_from([1, 3, 40]),
    count=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_pages_leave_their_pieces_and_come_back_with_checksums(
    native: bool, even: bool, sizes: list[int], repeats: int, count: int, seed: int
) -> None:
    chance, sizes = random.Random(seed), sizes * repeats
    series = Series(pieces_format(sizes), seal=SEAL.id)
    nbytes = sum(sizes)

    def pages() -> list[list[memoryview]]:
        """As an engine has them: a buffer for each piece, with a page of it after the other; or without
        order."""
        step = max(sizes)
        buffers = [memoryview(bytearray(step * count)) for _ in sizes]
        order = [chance.sample(range(count), count) for _ in sizes]
        return [
            [
                buffer[at * step :][:size]
                for buffer, size, of in zip(buffers, sizes, order, strict=True)
                for at in [index if even else of[index]]
            ]
            for index in range(count)
        ]

    source, target = pages(), pages()
    for page in source:
        for piece in page:
            piece[:] = chance.randbytes(len(piece))
    rows = PageRows.dense(memoryview(bytearray(count * nbytes)), count, nbytes)
    checksums = PageSaving(SEAL, PagePieces(source), native=native).save(0, rows)
    assert [bytes(rows.row(index)) for index in range(count)] == [b"".join(page) for page in source]
    reading = PageReading(SEAL, PagePieces(target), native=native)
    for index in range(count):
        header = SEAL.header(series, b"", rows.row(index), checksums[index])
        assert reading.load(index, header, rows.row(index)) is None
    assert target == source


def test_pages_that_make_no_format_are_refused() -> None:
    piece = memoryview(bytearray(8))
    with pytest.raises(LayoutError, match="at least one page"):
        PagePieces([])
    with pytest.raises(LayoutError, match=r"same lengths; got \[8, 8\] and \[8, 4\]"):
        PagePieces([(piece, piece), (piece, piece[:4])])
    with pytest.raises(LayoutError, match="contiguous bytes"):
        PagePieces([(piece[::2],)])
    with pytest.raises(LayoutError, match="65 pieces"):
        pieces_format([*[1] * 64, 2])
