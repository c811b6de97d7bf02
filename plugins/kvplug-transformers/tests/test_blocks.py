"""The pool of blocks: one owner each."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvplug_transformers.engine.blocks import BlockPool, blocks_for


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_a_block_has_one_owner_and_none_is_lost_or_freed_twice(moves):
    pool = BlockPool(8)
    owned: list[list[int]] = []
    for takes, amount in moves:
        if takes:
            got = pool.allocate(amount)
            assert (got is None) == (amount > 8 - sum(map(len, owned)))
            owned += [got] if got else []
        elif owned:
            freed = owned.pop(amount % len(owned))
            pool.free(freed)
            for again in (freed[:1], [*(owned[0] if owned else ()), freed[0]]):
                with pytest.raises(ValueError, match="freed twice"):
                    pool.free(again)
        held = [block for blocks in owned for block in blocks]
        assert len(set(held)) == len(held)
        assert pool.num_free == 8 - len(held)


def test_a_freed_block_is_allocated_last_and_a_part_of_a_block_is_a_block():
    pool = BlockPool(4)
    pool.free(pool.allocate(1))
    assert pool.allocate(4) == [1, 2, 3, 0]
    assert [blocks_for(tokens, 16) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
