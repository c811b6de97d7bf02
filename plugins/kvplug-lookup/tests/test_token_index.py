from __future__ import annotations

import tracemalloc

import pytest

from kvplug import UnsupportedError
from kvplug_lookup.buffer.entry import ids_under, token_array
from kvplug_lookup.buffer.index import TokenIndex


def ids(*tokens):
    return ids_under(tokens, None)


@pytest.mark.parametrize("tokens", [[1.0, 2.0], [True, False], ["a"], [2**63], [2**63, -1], [[1], [2, 3]]])
def test_token_ids_that_are_not_64_bit_integers_are_refused(tokens):
    with pytest.raises(UnsupportedError):
        token_array(tokens)


def test_an_entry_keeps_its_age_while_it_is_read():
    index = TokenIndex()
    for entry_id in range(3):
        index.insert(entry_id, ids(1, 2))
    index.suspend(0)
    index.suspend(1)
    assert index.oldest_match(ids(1, 2)) == 2
    index.resume(1)
    index.resume(0)
    for entry_id in range(3):
        assert index.oldest_match(ids(1, 2)) == entry_id
        index.remove(entry_id)


def test_memory_does_not_grow_while_entries_are_inserted_and_removed():
    index = TokenIndex()

    def come_and_go(number):
        for entry_id in range(1000 * number, 1000 * (number + 1)):
            index.insert(entry_id + 1, ids(entry_id % 4 + 1, entry_id))
            index.insert(-entry_id - 1, ids(1, 2), b"%d" % entry_id)
            index.remove(-entry_id - 1)
            if entry_id > 3:
                index.remove(entry_id - 3)
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = come_and_go(0)
        assert come_and_go(1) - before < 20_000
    finally:
        tracemalloc.stop()
    assert len(index) == 4


def test_a_long_chain_of_prefixes_needs_no_recursion():
    index = TokenIndex()
    prompt = list(range(3000))
    for length in range(3000, 0, -1):
        index.insert(3000 - length, ids(*prompt[:length]))
    assert index.match(ids(*prompt)) == 3000
    assert index.oldest_match(ids(0)) == 0
    for length in range(1, 3001):
        index.remove(3000 - length)
    assert len(index) == 0
