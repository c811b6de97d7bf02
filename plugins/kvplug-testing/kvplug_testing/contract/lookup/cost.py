"""The cost of a search (law LOOKUP-6): it grows with the prompt, not with the number of entries.

The law is about growth, not speed. The test compares CPU time with 100 and with 10,000 entries, on one
machine and within seconds. A linear search costs a hundred times more, an index hardly more; the limit of ten
is far from both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from kvplug import TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import LookupStore
from kvplug_testing.contract.base import law
from kvplug_testing.contract.lookup.suite import LookupSuite

FEW, MANY, MOST_GROWTH = 100, 10_000, 10.0
_LENGTH = 24


def _tokens(number: int) -> list[int]:
    """Tokens of equal length; the first half is the same for all, so that every entry nearly matches."""
    return [*range(_LENGTH // 2), *(1000 * (number + 1) + place for place in range(_LENGTH // 2))]


def _match(store: LookupStore) -> None:
    assert store.match([*range(_LENGTH // 2), -1]) == _LENGTH // 2


def _select(store: LookupStore) -> None:
    try:
        store.select([*range(_LENGTH // 2), -1], min_tokens=_LENGTH)
    except EntryGoneError:
        return
    raise AssertionError("nothing shares so much")


def _drop_select(store: LookupStore) -> None:
    try:
        store.drop_select([*range(_LENGTH // 2), -1], timeout=0)
    except TimeoutError:
        return
    raise AssertionError("nothing matches")


FINDS = {"match": _match, "select": _select, "drop_select": _drop_select}


class Cost(LookupSuite):
    """Measured at the end that holds the entries, which searches for both ends."""

    @law("LOOKUP-6", timeout_s=120, level="long")
    def test_finding_does_not_cost_more_where_more_is_held(self) -> None:
        store = self.hold()
        spent: dict[str, list[float]] = {name: [] for name in FINDS}
        held = 0
        for count in (FEW, MANY):
            for number in range(held, count):
                store.insert(_tokens(number), None, None, None, None)
            held = count
            for name, find in FINDS.items():
                spent[name].append(statistics.median(self._spent(store, find) for _ in range(7)))
        for name, (few, many) in spent.items():
            assert many < MOST_GROWTH * few, (
                f"one {name} takes {1e6 * few:.0f} us of processor time with {FEW} entries and"
                f" {1e6 * many:.0f} us with {MANY}: it grows with the number of entries"
            )

    def _spent(self, store: LookupStore, find: Callable[[LookupStore], None], times: int = 20) -> float:
        before = time.process_time()
        for _ in range(times):
            find(store)
        return (time.process_time() - before) / times
