"""What is particular to an end that reaches a store "simple". Its laws are in test_simple_contract.py."""

from __future__ import annotations

import pytest
import torch

from kvplug import CapacityError, TimeoutError, UnsupportedError
from kvplug_testing.waits import until


def test_a_query_that_is_no_tokens_or_too_long_for_a_message_is_refused_here(joined):
    end = joined.reach(joined.store())
    with pytest.raises(UnsupportedError):
        end.match([1.5])
    with pytest.raises(CapacityError):
        end.match(torch.zeros(3 << 20, dtype=torch.int64))
    assert end.match([1]) == 0


def test_transfers_given_up_at_random_moments_leave_the_pipes_in_order(joined, entry):
    store = joined.store()
    end, parts = joined.reach(store, limit=1), entry([1, 2, 3], layers=200)
    store.insert(*parts)
    given_up = 0
    for number in range(40):
        try:
            assert torch.equal(end.select([1], timeout=0.0005 * (1 + number % 20)).key, parts[2])
        except TimeoutError:
            given_up += 1
    assert given_up
    assert torch.equal(end.drop_select([1], timeout=10).key, parts[2])
    until(lambda: not store.bytes_used)
