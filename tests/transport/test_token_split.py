"""Whose tokens lie where once every rank has all: pure, and without torch."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvplug import ConfigError
from kvplug.transport import TensorMismatchError
from kvplug.transport.communicator.calls import TokenSplit, width_of


def test_shared_tokens_are_there_once() -> None:
    split = TokenSplit.of([2, 2, 3, 3], 2)
    assert (split.sizes, split.total, split.shared) == ((2, 0, 3, 0), 5, True)
    assert [split.rows(rank) for rank in range(4)] == [slice(0, 2), slice(0, 2), slice(2, 5), slice(2, 5)]


def test_ranks_that_share_tokens_have_as_many() -> None:
    with pytest.raises(TensorMismatchError, match="rank 2 has 3 tokens and rank 3 has 4"):
        TokenSplit.of([2, 2, 3, 4], 2)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(1, 3))
def test_rows_of_owners_cover_everything_once(counts: list[int], width: int) -> None:
    split = TokenSplit.of([count for count in counts for _ in range(width)], width)
    rows = [split.rows(rank) for rank in range(len(counts) * width)]
    covered = [row for each in rows[::width] for row in range(each.start, each.stop)]
    assert covered == list(range(sum(counts))) == list(range(split.total))
    assert all(rows[rank] == rows[rank - rank % width] for rank in range(len(rows)))


def test_ranks_are_shared_out_evenly_among_data_parallel_ranks() -> None:
    assert [width_of(8, 4), width_of(4, 4), width_of(1, 4)] == [2, 1, 1]
    with pytest.raises(ConfigError, match="4 ranks cannot be divided evenly by data_parallel_size=3"):
        width_of(4, 3)
