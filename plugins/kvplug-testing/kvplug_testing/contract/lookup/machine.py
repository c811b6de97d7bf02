"""Random calls of a lookup buffer, each compared with a list that is searched from its beginning. Hypothesis
generates them.
"""

# A type checker may run without hypothesis; then its decorators have no type.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from functools import partial
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from kvplug import CapacityError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import LookupBuffer, LookupEndpoint
from kvplug_testing.contract.lookup.entries import Put, capacity_for, shared, sized, unlike
from kvplug_testing.contract.lookup.suite import insert, inserted, matched, missed, read, taken
from kvplug_testing.waits import raises

CAPACITY = 5
BUDGET = capacity_for(CAPACITY)
ROOMY = capacity_for(CAPACITY + 2)
"""Of a store that evicts: it may not have noticed yet that the last entry was received."""
# Few values, so that keys are often equal or prefixes; close values, so that a tolerance is detected.
_token = st.sampled_from([1, 2, 120001, 120002, (1 << 31) + 1])
_extra = st.sampled_from([b"", b"a", b"a\0"])


@st.composite
def _masked(draw: Any, least: int = 0) -> tuple[list[int], list[bool] | None]:
    """Tokens, and a roi or none; at least ``least`` tokens are under it."""
    tokens = draw(st.lists(_token, min_size=max(1, least), max_size=5))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    if mask is not None and sum(mask) < least:
        mask[0] = True
    return tokens, mask


class Machine(RuleBasedStateMachine):  # type: ignore[misc, unused-ignore]
    """The state machine."""

    def __init__(self, make: Any, fills: bool) -> None:
        super().__init__()
        self.store: LookupEndpoint.Store
        self.end: LookupBuffer
        self.store, self.end = make()
        self.fills = fills
        self.held: dict[int, Put] = {}
        """Oldest first."""
        self.newest = 0

    def _shared(self, key: Any, extra: bytes) -> dict[int, int]:
        """The number of tokens that each entry shares with the query."""
        query = Put(tokens=key[0], roi=key[1]).counts
        return {
            entry_id: shared(query, put.counts) for entry_id, put in self.held.items() if put.extra == extra
        }

    @rule(key=_masked(1), extra=_extra)
    def put_in(self, key: Any, extra: bytes) -> None:
        put = sized(key[0], roi=key[1], extra=extra)
        if len(self.held) < CAPACITY:
            entry_id = inserted(self.store, put)
            assert entry_id > self.newest, f"entry {entry_id} came after entry {self.newest}"
            self.newest = entry_id
            self.held[entry_id] = put
        elif self.fills:
            raises(TimeoutError, partial(insert, self.store, put, 0))

    @rule()
    def put_in_too_much(self) -> None:
        raises(CapacityError, partial(insert, self.store, sized([1] * 8, layers=1024), None))

    @rule(key=_masked(), extra=_extra)
    def look(self, key: Any, extra: bytes) -> None:
        there = max(self._shared(key, extra).values(), default=0)
        found = matched(self.end, *key, extra=extra)
        assert found == there, f"match returned {found}, and {there} tokens are shared"

    @rule(key=_masked(), extra=_extra)
    def take(self, key: Any, extra: bytes) -> None:
        length = len(Put(tokens=key[0], roi=key[1]).counts)
        common = self._shared(key, extra)
        fits = [each for each in common if common[each] == min(length, len(self.held[each].counts)) > 0]
        self._take(key, extra, fits)

    @rule(extra=_extra)
    def take_any(self, extra: bytes) -> None:
        self._take((None, None), extra, [each for each, put in self.held.items() if put.extra == extra])

    def _take(self, key: Any, extra: bytes, fits: list[int]) -> None:
        if not fits:
            missed(self.end, *key, extra=extra, timeout=0.01)
            # The store answers this end's next call only after it has noticed the end of the last one. Until
            # then it may give an inserted entry to that call, and take it back afterwards.
            matched(self.end, [1])
            return
        got = taken(self.end, *key, extra=extra)
        found = got.header.entry_id
        assert found == fits[0], f"entry {found} was handed out, and {fits[0]} is the oldest that matches"
        wrong = unlike(self.held.pop(found), got)
        assert not wrong, f"entry {found}: {wrong}"

    @rule(key=_masked(), extra=_extra, min_tokens=st.integers(1, 3))
    def read(self, key: Any, extra: bytes, min_tokens: int) -> None:
        common = self._shared(key, extra)
        most = max(common.values(), default=0)
        if most < min_tokens:
            select = partial(self.end.select, *key, extra=extra, min_tokens=min_tokens, timeout=None)
            raises(EntryGoneError, select)
            return
        got = read(self.end, *key, extra=extra, min_tokens=min_tokens)
        found = got.header.entry_id
        assert common.get(found) == most, f"entry {found} was read, and another one shares {most} tokens"
        wrong = unlike(self.held[found], got)
        assert not wrong, f"entry {found}: {wrong}"

    def teardown(self) -> None:
        if self.end is not self.store:
            self.end.abort()
        self.store.abort()
