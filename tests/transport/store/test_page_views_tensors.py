"""Pages that lie anywhere in memory are copied by compiled code and by Python to the same bytes."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, strategies as st

from kvplug.transport import PageReading, PageRows, PageSaving, PageSeal, PageViews, Series, opaque_format

SEAL = PageSeal()


@pytest.mark.parametrize("native", [True, False])
@given(nbytes=st.sampled_from([1, 7, 64, 4097]), count=st.integers(1, 5), seed=st.integers(0, 99))
def test_pages_leave_views_and_come_back_with_checksums(
    native: bool, nbytes: int, count: int, seed: int
) -> None:
    series, chance = Series(opaque_format(nbytes), seal=SEAL.id), random.Random(seed)
    source = [memoryview(bytearray(chance.randbytes(nbytes))) for _ in range(count)]
    target = [memoryview(bytearray(nbytes)) for _ in range(count)]
    chance.shuffle(target)  # their addresses are in any order
    rows = PageRows.dense(memoryview(bytearray(count * nbytes)), count, nbytes)
    checksums = PageSaving(SEAL, PageViews(series.format, source), native=native).save(0, rows)
    reading = PageReading(SEAL, PageViews(series.format, target), native=native)
    for index in range(count):
        header = SEAL.header(series, b"", rows.row(index), checksums[index])
        assert reading.load(index, header, rows.row(index)) is None
    assert target == source
