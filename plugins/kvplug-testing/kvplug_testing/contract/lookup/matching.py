"""Which entry a query finds (law LOOKUP-2), and how many tokens they share (law LOOKUP-3)."""

from __future__ import annotations

import random
from functools import partial

import pytest

from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import entry, unlike
from kvplug_testing.contract.lookup.suite import (
    LookupSuite,
    at_both_ends,
    inserted,
    matched,
    missed,
    read,
    taken,
)
from kvplug_testing.waits import Call


class Matching(LookupSuite):
    """Single queries, and random ones against a model."""

    @law("LOOKUP-2")
    @at_both_ends
    @pytest.mark.parametrize(
        ("held", "query", "matches"),
        [
            ([1, 2, 3], [1, 2, 3], True),
            ([1, 2, 3], [1, 2, 3, 4, 5], True),  # the entry is a prefix of the query
            ([1, 2, 3, 4, 5], [1, 2], True),  # the query is a prefix of the entry
            (list(range(17)), list(range(16)), True),  # not on the border of a block
            ([7], [7, 8, 9], True),
            ([1, 2, 3], [1, 2, 4], False),  # a common prefix, then different tokens
            ([1, 2, 3], [2, 3], False),
            ([1, 2, 3], [3, 2, 1], False),
            ([1, 2, 3], [], False),
        ],
    )
    def test_an_entry_matches_where_one_is_a_prefix_of_the_other(
        self, end: str, held: list[int], query: list[int], matches: bool
    ) -> None:
        store, buffer = self.opened(end)
        put = entry(held)
        inserted(store, put)
        if not matches:
            missed(buffer, query, timeout=0.1)
        assert not unlike(put, taken(buffer, query if matches else None))
        missed(buffer, None, timeout=0.05)

    @law("LOOKUP-2")
    @at_both_ends
    def test_of_several_the_oldest_wins_and_none_asks_for_the_oldest_of_all(self, end: str) -> None:
        store, buffer = self.opened(end)
        puts = [entry(tokens) for tokens in ([9], [1, 2, 3], [1], [1, 2], [1, 2, 3])]
        inserted(store, entry([1, 2], extra=b"another"))
        ids = [inserted(store, put) for put in puts]
        for query, which in (([1, 2], 1), ([1, 2], 2), (None, 0), ([1, 2, 3, 4], 3), (None, 4)):
            got = taken(buffer, query)
            found = ids.index(got.header.entry_id)
            assert found == which, f"{query} was given number {found}, and number {which} is older"
            assert not unlike(puts[which], got)

    @law("LOOKUP-2")
    @at_both_ends
    def test_nothing_of_one_entry_is_found_in_another(self, end: str) -> None:
        store, buffer = self.opened(end)
        puts = [entry([1, 2, number], extra=b"ab"[: number % 3]) for number in range(30)]
        for put in puts:
            inserted(store, put)
        random.Random(7).shuffle(puts)
        for put in puts:
            wrong = unlike(put, read(buffer, put.tokens, extra=put.extra))
            assert not wrong, f"the entry of {put.tokens} was read with something else in it: {wrong}"
        for put in puts:
            wrong = unlike(put, taken(buffer, put.tokens, extra=put.extra))
            assert not wrong, f"the entry of {put.tokens} was handed out with something else in it: {wrong}"

    @law("LOOKUP-3")
    @at_both_ends
    def test_match_is_the_longest_prefix_that_is_shared_whatever_follows(self, end: str) -> None:
        store, buffer = self.opened(end)
        for tokens in ([1, 2, 3, 4], [1, 2, 9], [5]):
            inserted(store, entry(tokens))
        for query, shared in (
            ([1, 2, 3, 4], 4),
            ([1, 2, 3, 4, 5, 6], 4),  # the entry ends first
            ([1, 2, 3], 3),  # the query ends first
            ([1, 2, 3, 7], 3),  # they differ in the middle of an entry
            ([1, 2, 9, 9], 3),
            ([1, 7], 1),
            ([5, 5], 1),
            ([7, 1, 2], 0),
            ([], 0),
        ):
            found = matched(buffer, query)
            assert found == shared, f"{query} shares {shared} tokens with an entry, and match says {found}"

    @law("LOOKUP-3")
    @at_both_ends
    def test_match_does_not_wait_for_an_entry(self, end: str) -> None:
        _, buffer = self.opened(end)
        call = Call(lambda: buffer.match([1, 2, 3])).end()
        assert call.result() == 0
        assert call.took_s < self.timeout_s / 2, f"it took {call.took_s:.1f} s to find that nothing is held"

    @law("LOOKUP-3")
    @at_both_ends
    def test_match_changes_nothing(self, end: str) -> None:
        store, buffer = self.opened(end)
        puts = [entry([1, 2, 3]), entry([1, 2])]
        ids = [inserted(store, put) for put in puts]
        for query in ([1, 2, 3], [1, 2], [4], [1, 2, 3, 4]):
            matched(buffer, query)
        for put, entry_id in zip(puts, ids, strict=True):
            got = taken(buffer, [1, 2])
            assert got.header.entry_id == entry_id, "matching has changed which entry is the oldest"
            assert not unlike(put, got)

    @law("LOOKUP-3")
    def test_a_match_is_answered_while_other_calls_of_its_end_wait_and_receive(self) -> None:
        store = self.hold()
        buffer, data_pipe = self.reach_pausable(store)
        put = entry([1, 2, 3], layers=8, hidden=30_000)  # more than the data pipe holds
        inserted(store, put)
        within = waits.patience_s
        waiting = Call(lambda: buffer.drop_select([9], timeout=within))
        receiving = self.pause_in_entry(data_pipe, lambda: buffer.select([1, 2, 3], timeout=within))
        assert matched(buffer, [1, 2, 9]) == 2
        assert matched(buffer, [9]) == 0
        data_pipe.resume()
        assert not unlike(put, receiving.result())
        inserted(store, entry([9]))
        assert waiting.result().tokens.tolist() == [9]

    @law("LOOKUP-2", "LOOKUP-3", "LOOKUP-1", timeout_s=300, level="long")
    @at_both_ends
    def test_random_calls_find_what_a_slow_search_finds(self, end: str) -> None:
        from kvplug_testing.contract.lookup import machine

        made = partial(self.opened, end, machine.ROOMY if self.evicts else machine.BUDGET)
        machine.run(made, examples=60, steps=40, fills=not self.evicts)
