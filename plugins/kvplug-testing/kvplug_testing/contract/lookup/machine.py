"""Random calls of a lookup buffer, each compared with the slow model. Hypothesis generates and shrinks
them.
"""

# A type checker may run without hypothesis; then its decorators have no type.
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    rule,
    run_state_machine_as_test,
)

from kvplug import CapacityError, TimeoutError
from kvplug.engine import EntryGoneError
from kvplug.transport import LookupBuffer, LookupStore
from kvplug_testing.contract.lookup.entries import Put, capacity_for, sized, unlike
from kvplug_testing.contract.lookup.model import ReferenceModel
from kvplug_testing.contract.lookup.suite import insert, inserted, matched, missed, read, taken
from kvplug_testing.waits import raises

CAPACITY = 5
# Few values, so that keys are often equal or prefixes; close values, so that a tolerance is detected.
_token = st.sampled_from([1, 2, 120001, 120002, (1 << 31) + 1])
_extra = st.sampled_from([b"", b"a"])
_min_tokens = st.integers(1, 3)


@st.composite
def _masked(draw: Any, least: int = 0) -> tuple[list[int], list[bool] | None]:
    """Tokens, and a roi or none; at least ``least`` tokens are under it."""
    tokens = draw(st.lists(_token, min_size=max(1, least), max_size=5))
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    if mask is not None and sum(mask) < least:
        mask[0] = True
    return tokens, mask


def _under(tokens: list[int], roi: list[bool] | None) -> tuple[int, ...]:
    return Put(tokens=tokens, roi=roi).counts


class Machine(RuleBasedStateMachine):  # type: ignore[misc, unused-ignore]
    """The state machine. Class attributes set how it makes a store and the tested end."""

    make: Any
    fills: bool = True
    """Whether inserts are tried where there is no room: not if they would remove entries."""

    def __init__(self) -> None:
        super().__init__()
        self.store: LookupStore
        self.end: LookupBuffer
        self.store, self.end = type(self).make()
        self.model = ReferenceModel(CAPACITY)

    @rule(key=_masked(1), extra=_extra)
    def put_in(self, key: Any, extra: bytes) -> None:
        put = sized(key[0], roi=key[1], extra=extra)
        if self.model.is_full and not self.fills:
            return
        if self.model.is_full:
            raises(TimeoutError, lambda: insert(self.store, put, timeout=0))
        else:
            entry_id = inserted(self.store, put)
            newest = max(self.model.held, default=0)
            assert entry_id > newest, f"entry {entry_id} came after entry {newest}: ids ascend with age"
            self.model.held[entry_id] = put

    @rule()
    def put_in_too_much(self) -> None:
        too_large = sized([1] * 8, layers=1024)
        raises(CapacityError, lambda: insert(self.store, too_large, timeout=30))

    @rule(key=_masked(), extra=_extra)
    def look(self, key: Any, extra: bytes) -> None:
        there = self.model.match(_under(*key), extra)
        found = matched(self.end, *key, extra=extra)
        assert found == there, f"match says {found}, and {there} tokens are shared"

    @rule(key=_masked(), extra=_extra)
    def take(self, key: Any, extra: bytes) -> None:
        self._take(key, _under(*key), extra)

    @rule(extra=_extra)
    def take_any(self, extra: bytes) -> None:
        self._take((None, None), None, extra)

    def _take(self, key: Any, query: tuple[int, ...] | None, extra: bytes) -> None:
        entry_id = self.model.oldest(query, extra)
        if entry_id is None:
            missed(self.end, *key, extra=extra, timeout=0.01)
            # The store answers this end's next call only after it knows that the last one has ended. Until
            # then it may give an inserted entry to that call, and take it back afterwards.
            matched(self.end, [1])
            return
        got = taken(self.end, *key, extra=extra)
        found = got.header.entry_id
        assert found == entry_id, f"entry {found} was handed out, and {entry_id} is the oldest that matches"
        wrong = unlike(self.model.held.pop(entry_id), got)
        assert not wrong, f"entry {entry_id}: {wrong}"

    @rule(key=_masked(), extra=_extra, min_tokens=_min_tokens)
    def read(self, key: Any, extra: bytes, min_tokens: int) -> None:
        there = self.model.longest(_under(*key), extra, min_tokens)
        if not there:
            raises(EntryGoneError, lambda: self.end.select(*key, extra=extra, min_tokens=min_tokens))
            return
        got = read(self.end, *key, extra=extra, min_tokens=min_tokens)
        found = got.header.entry_id
        assert found in there, f"entry {found} was read, and {sorted(there)} share the longest prefix"
        wrong = unlike(self.model.held[found], got)
        assert not wrong, f"entry {found}: {wrong}"

    def teardown(self) -> None:
        if self.end is not self.store:
            self.end.abort()
        self.store.abort()


def run(make: Any, examples: int, steps: int, *, fills: bool = True) -> None:
    """Compare the result of ``make()``, a store and one of its ends, with the model.

    Args:
        fills: try inserts for which there is no room.
    """
    machine = type("LookupMachine", (Machine,), {"make": staticmethod(make), "fills": fills})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


BUDGET = capacity_for(CAPACITY)
ROOMY = capacity_for(CAPACITY + 2)
"""Of a store that evicts: it may not know yet that the last entry was received."""
