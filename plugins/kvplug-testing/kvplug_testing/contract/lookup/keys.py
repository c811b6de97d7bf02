"""The key of an entry (law LOOKUP-1): equal ``extra``, and token ids as integers, under the roi."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kvplug.engine import EntryGoneError
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
from kvplug_testing.waits import Call, raises

_M61 = (1 << 61) - 1
NEIGHBOURS = [
    (120001, 120002),  # equal with a relative tolerance of 1e-5
    (120001, 120000),
    ((1 << 31) + 1, (1 << 31) + 2),
    ((1 << 31) + 1, 1 - (1 << 31)),  # the same lower 32 bits
    ((1 << 40) + 5, 5),
    ((1 << 53) + 1, 1 << 53),  # equal as floats of 64 bits
    (16777217, 16777216),  # equal as floats of 32 bits
]
EQUAL_HASHES = [(-1, -2), (4, 4 + _M61), (0, _M61), (11 + _M61, 11)]
"""Different integers with the same hash in Python."""


def given_as(kind: str, tokens: list[int]) -> Any:
    """Token ids in one of the forms that a caller may use."""
    if kind == "list":
        return tokens
    if kind == "tuple":
        return tuple(tokens)
    if kind == "array":
        import numpy as np

        return np.array(tokens, dtype=np.int64)
    import torch

    return torch.tensor(tokens, dtype=torch.int32 if kind == "tensor of int32" else torch.int64)


FORMS = ["list", "tuple", "array", "tensor", "tensor of int32"]


class Keys(LookupSuite):
    """One entry, and queries that nearly equal its key."""

    @law("LOOKUP-1")
    @at_both_ends
    def test_the_same_tokens_with_another_extra_are_a_miss(self, end: str) -> None:
        store, buffer = self.opened(end)
        put = entry([1, 2, 3], extra=b"lora-a")
        inserted(store, put)
        for extra in (b"", b"lora-b", b"lora-", b"lora-a\0"):
            assert matched(buffer, [1, 2, 3], extra=extra) == 0, f"the extra {extra!r} found that of lora-a"
            raises(EntryGoneError, partial(buffer.select, [1, 2, 3], extra=extra))
            missed(buffer, [1, 2, 3], extra=extra, timeout=0.05)
            missed(buffer, None, extra=extra, timeout=0.05)
        assert matched(buffer, [1, 2, 3], extra=b"lora-a") == 3
        assert not unlike(put, taken(buffer, None, extra=b"lora-a"))

    @law("LOOKUP-1")
    @at_both_ends
    def test_only_tokens_under_the_roi_count(self, end: str) -> None:
        store, buffer = self.opened(end)
        put = entry([1, 2, 3, 4], roi=[False, True, True, False])
        inserted(store, put)
        assert matched(buffer, [1, 2, 3, 4]) == 0, "tokens that are not under the entry's roi counted"
        assert matched(buffer, [2, 3]) == 2
        assert matched(buffer, [9, 2, 3, 9], [False, True, True, False]) == 2, "the query's roi was ignored"
        assert matched(buffer, [2, 9, 3], [True, False, True]) == 2
        assert matched(buffer, [2, 9, 3]) == 1
        missed(buffer, [1, 2, 3, 4], timeout=0.05)
        assert not unlike(put, read(buffer, [9, 2, 3], [False, True, True]))
        assert not unlike(put, taken(buffer, [2, 9], [True, False]))

    @law("LOOKUP-1")
    @at_both_ends
    @pytest.mark.parametrize("form", FORMS)
    def test_tokens_and_roi_may_be_a_list_a_tensor_or_an_array(self, end: str, form: str) -> None:
        store, buffer = self.opened(end)
        put = entry([5, 120001, 7], roi=[True, True, False])
        mask = given_as(form, [1, 1, 0])
        mask = [True, True, False] if isinstance(mask, list | tuple) else mask == 1
        store.insert(
            given_as(form, [5, 120001, 7]), mask, put.key, put.value, put.hidden, metadata=put.metadata
        )
        query = given_as(form, [5, 120001, 9])
        assert matched(buffer, query) == 2
        assert matched(buffer, query, mask) == 2
        assert not unlike(put, read(buffer, query))
        assert not unlike(put, taken(buffer, query, mask))

    @law("LOOKUP-1")
    @at_both_ends
    @pytest.mark.parametrize(("held", "asked"), NEIGHBOURS + EQUAL_HASHES)
    def test_ids_are_compared_exactly(self, end: str, held: int, asked: int) -> None:
        store, buffer = self.opened(end)
        for tokens in ([held], [7, held, 9], [7, 8, held]):
            inserted(store, entry(tokens, without=["key", "value", "hidden"]))
        for query, shared in (([asked], 0), ([7, asked, 9], 1), ([7, 8, asked], 2)):
            assert matched(buffer, query) == shared, f"{asked} was taken for {held}"
            missed(buffer, query, timeout=0.05)
        raises(EntryGoneError, lambda: buffer.select([7, asked, 9], min_tokens=2))
        assert taken(buffer, [7, 8, held]).tokens.tolist() == [7, 8, held]

    @law("LOOKUP-1")
    def test_what_cannot_be_a_key_is_refused_and_nothing_is_stored(self) -> None:
        store = self.hold()
        for tokens, roi in (
            ([], None),
            ([1, 2], [False, False]),
            ([1, 2], [True]),
            ([1.5, 2.0], None),
            ([[1, 2], [3, 4]], None),
            ([1 << 64], None),
        ):
            call = Call(partial(store.insert, tokens, roi, None, None, None)).end()
            assert isinstance(call.error, ValueError | TypeError), (
                f"tokens {tokens} under the roi {roi} are no key; insert gave {call.error or call.value!r}"
            )
        missed(store, None, timeout=0)
