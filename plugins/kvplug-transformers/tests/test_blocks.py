"""The pool of blocks: one owner each."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvplug_transformers.engine.blocks import BlockPool, blocks_for


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_block_has_one_owner_and_none_is_lost(moves):
    pool = BlockPool(8)
    owned: list[list[int]] = []
    for takes, amount in moves:
        if takes:
            got = pool.allocate(amount)
            assert (got is None) == (amount > 8 - sum(map(len, owned)))
            owned += [got] if got else []
        elif owned:
            pool.free(owned.pop(amount % len(owned)))
        held = [block for blocks in owned for block in blocks]
        assert len(set(held)) == len(held)
        assert pool.num_free == 8 - len(held)


def test_a_block_freed_twice_is_an_error_and_frees_nothing():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([first, first])
    pool.free([first])
    with pytest.raises(ValueError, match="freed twice"):
        pool.free([second, first])
    assert pool.num_free == 3


def test_a_freed_block_is_the_last_to_be_handed_out():
    pool = BlockPool(4)
    pool.free(pool.allocate(1))
    assert pool.allocate(4) == [1, 2, 3, 0]


def test_a_partial_block_is_a_block():
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
