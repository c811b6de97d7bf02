"""Which entry a query finds, and what comes out (laws LOOKUP-1 to LOOKUP-3, and LOOKUP-6)."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import attrs
import pytest

from kvplug import TimeoutError
from kvplug.engine import EntryGoneError
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.entries import Put, Sink, capacity_for, entry, sized, unlike
from kvplug_testing.contract.lookup.suite import (
    LookupSuite,
    at_both_ends,
    inserted,
    matched,
    missed,
    read,
    taken,
)
from kvplug_testing.contract.pipe.content import dtypes, tensor_of
from kvplug_testing.waits import Call, raises

_M61 = (1 << 61) - 1
NEIGHBOURS = [
    (120001, 120002),  # equal with a relative tolerance of 1e-5
    ((1 << 31) + 1, 1 - (1 << 31)),  # the same lower 32 bits
    ((1 << 40) + 5, 5),
    ((1 << 53) + 1, 1 << 53),  # equal as floats of 64 bits
    (16777217, 16777216),  # equal as floats of 32 bits
]
EQUAL_HASHES = [(-1, -2), (0, _M61), (11 + _M61, 11)]
"""Different integers with the same hash in Python."""
_PARTS = [("key",), ("value",), ("hidden",), ("key", "value"), ("key", "value", "hidden")]
_COMMON = [*range(12)]
"""The first half of the tokens of many entries, so that each of these nearly matches."""
FEW, MANY, MOST_GROWTH = 100, 10_000, 10.0


def _of_each_kind() -> Iterator[Put]:
    """Yield entries of the tokens 1, 2, 3 with every dtype, without some parts, with tensors that are not
    contiguous or empty, and with tokens in each form that a caller may use.
    """
    import numpy as np
    import torch

    for dtype in dtypes():
        if dtype != "complex32":  # torch warns about it
            yield entry([1, 2, 3], roi=[True, True, False], dtype=dtype, layers=3)
    for missing in _PARTS:
        yield entry([1, 2, 3], without=missing)
    turned = tensor_of("float32", (4, 2, 3, 2), seed=1).permute(3, 2, 1, 0)
    yield Put(tokens=[1, 2, 3], key=turned, value=turned[:, :, :, ::2], hidden=turned[0, 0])
    yield Put(tokens=[1, 2, 3], key=turned[:0], value=turned[:0], hidden=turned[0, 0, 0, 0])
    tokens, roi = [1, 2, 3], [True, True, False]
    yield entry((*tokens,), roi=(*roi,))
    yield entry(np.array(tokens), roi=np.array(roi))
    for dtype in (torch.int64, torch.int32):
        yield entry(torch.tensor(tokens, dtype=dtype), roi=torch.tensor(roi))


class Finding(LookupSuite):
    """Queries that nearly equal a key, random calls, and the content of entries."""

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

    @law("LOOKUP-1", "LOOKUP-5")
    def test_an_invalid_entry_is_refused_and_takes_no_room(self) -> None:
        store = self.hold(capacity_for(1))
        good = sized([1, 2])
        for tokens, roi, key, value in (
            ([], None, None, None),
            ([1, 2], [False, False], None, None),
            ([1, 2], [True], None, None),
            ([1.5, 2.0], None, None, None),
            ([[1, 2], [3, 4]], None, None, None),
            ([1 << 64], None, None, None),
            ([1, 2], None, good.hidden, None),
            ([1, 2], None, good.key, good.value[:1]),
            ([1, 2], None, good.key[:, :1], good.value),
        ):
            call = Call(partial(store.insert, tokens, roi, key, value, good.hidden)).end()
            assert isinstance(call.error, ValueError | TypeError), f"{call.error!r} of {tokens}, {roi}"
        inserted(store, good)
        assert not unlike(good, taken(store, [1, 2]))

    @law("LOOKUP-1", "LOOKUP-2", "LOOKUP-3", "LOOKUP-4", "LOOKUP-5", "LOOKUP-7", timeout_s=120)
    @at_both_ends
    def test_some_random_calls_find_what_a_slow_search_finds(self, end: str) -> None:
        self._call_at_random(end, examples=12, shrinks=False)

    @law("LOOKUP-1", "LOOKUP-2", "LOOKUP-3", "LOOKUP-4", "LOOKUP-5", "LOOKUP-7", timeout_s=300, level="long")
    @at_both_ends
    def test_many_random_calls_find_what_a_slow_search_finds(self, end: str) -> None:
        self._call_at_random(end, examples=100, shrinks=True)

    def _call_at_random(self, end: str, **given: Any) -> None:
        from kvplug_testing.contract.lookup import machine
        from kvplug_testing.contract.random_calls import run_machine

        made = partial(self.opened, end, machine.ROOMY if self.evicts else machine.BUDGET)
        run_machine(partial(machine.Machine, made, not self.evicts), steps=40, **given)

    # -- contents ------------------------------------------------------------------------------

    @law("LOOKUP-1", "LOOKUP-2", "LOOKUP-7")
    @at_both_ends
    def test_every_part_comes_out_bit_by_bit(self, end: str) -> None:
        store, buffer = self.opened(end)
        for put in _of_each_kind():
            entry_id = inserted(store, put)
            sink = Sink()
            assert not unlike(put, read(buffer, [1, 2, 4], sink=sink), without=("key", "value"))
            assert [header.entry_id for header in sink.headers] == [entry_id], "begin is called once, first"
            assert not sink.unlike(put)
            assert matched(buffer, put.tokens, put.roi) == len(put.counts), "the roi is ignored"
            assert not unlike(put, read(buffer, [1, 2]))
            assert not unlike(put, taken(buffer, put.tokens, put.roi))

    @law("LOOKUP-2", "LOOKUP-7")
    @at_both_ends
    def test_what_comes_out_is_a_copy_of_what_was_put_in(self, end: str) -> None:
        import torch

        store, buffer = self.opened(end)
        put = entry([1, 2, 3], roi=[True, True, False])
        tokens, roi, metadata = torch.tensor(put.tokens), torch.tensor(put.roi), {"tag": 1, "of": [b"it"]}
        kept = attrs.evolve(put, metadata={"tag": 1, "of": [b"it"]})
        key, value, hidden = (part.clone() for part in (put.key, put.value, put.hidden))
        store.insert(tokens, roi, key, value, hidden, metadata=metadata)
        for part in (tokens, roi, key, value, hidden):
            part.zero_()
        metadata["of"] = "another one"
        for _ in range(2):
            got = read(buffer, [1, 2])
            wrong = unlike(kept, got)
            assert not wrong, f"what was overwritten after the insert, or by a reader, came out: {wrong}"
            parts: list[Any] = [got.tokens, got.roi, got.key, got.value, got.hidden, got.header.tokens]
            for part in parts:
                part.zero_()
            got.header.metadata["of"] = "another one"

    # -- cost ----------------------------------------------------------------------------------

    @law("LOOKUP-6", timeout_s=120, level="long")
    def test_finding_does_not_cost_more_where_more_is_held(self) -> None:
        """Compares processor time with 100 and with 10,000 entries. A linear search costs a hundred times
        more, an index hardly more.
        """
        store = self.hold()
        finds = {
            "match": lambda: store.match([*_COMMON, -1]),
            "select": lambda: store.select([*_COMMON, -1], min_tokens=24),
            "drop_select": lambda: store.drop_select([*_COMMON, -1], timeout=0),
        }
        spent: dict[str, float] = {}
        for first, end in ((0, FEW), (FEW, MANY)):
            for number in range(first, end):
                tokens = [*_COMMON, *(1000 * (number + 1) + place for place in _COMMON)]
                store.insert(tokens, None, None, None, None)
            for name, find in finds.items():
                now = statistics.median(_cpu_s(find) for _ in range(7))
                few = spent.setdefault(name, now)
                assert now < MOST_GROWTH * few, (
                    f"{name} takes {few:.6f} s with {FEW} entries, and {now:.6f} s with {MANY}"
                )


def _cpu_s(find: Callable[[], Any]) -> float:
    """Return the processor time of 20 searches."""
    before = time.process_time()
    for _ in range(20):
        with contextlib.suppress(EntryGoneError, TimeoutError):
            find()
    return time.process_time() - before
