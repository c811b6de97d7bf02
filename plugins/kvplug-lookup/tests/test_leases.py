"""The rules of lending, against a model that keeps a plain list."""

from __future__ import annotations

import math

import attrs
import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvplug.engine import LentError
from kvplug_lookup.buffer.leases import Lease, Leases


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@attrs.define
class Known:
    lease: Lease
    ends: float


class Lending(RuleBasedStateMachine):
    """Random calls; the model is a list of leases in force."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.leases = Leases(self.clock)
        self.known: list[Known] = []
        self.over: list[Lease] = []
        self.given: set[int] = set()

    entries = st.integers(0, 2)
    holders = st.sampled_from(["a", "b", "c"])

    def of(self, entry_id: int) -> list[Known]:
        return [known for known in self.known if known.lease.entry_id == entry_id]

    @rule(
        entry_id=entries,
        holder=holders,
        exclusive=st.booleans(),
        duration_s=st.none() | st.integers(1, 20).map(float),
    )
    def take(self, entry_id: int, holder: str, exclusive: bool, duration_s: float | None) -> None:
        in_force = self.of(entry_id)
        may = not in_force or (not exclusive and not any(known.lease.exclusive for known in in_force))
        assert self.leases.may_take(entry_id, exclusive=exclusive) == may
        if not may:
            with pytest.raises(LentError):
                self.leases.take(entry_id, holder, exclusive=exclusive, duration_s=duration_s)
            return
        lease = self.leases.take(entry_id, holder, exclusive=exclusive, duration_s=duration_s)
        assert lease.lease_id not in self.given
        self.given.add(lease.lease_id)
        self.known.append(Known(lease, math.inf if duration_s is None else self.clock.now + duration_s))

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        known = data.draw(st.sampled_from(self.known))
        assert known.lease in self.leases
        assert self.leases.release(known.lease)
        assert known.lease not in self.leases and not self.leases.release(known.lease)
        self.end(known)

    @precondition(lambda self: self.over)
    @rule(data=st.data())
    def release_late(self, data: st.DataObject) -> None:
        assert not self.leases.release(data.draw(st.sampled_from(self.over)))

    @rule(holder=holders)
    def revoke(self, holder: str) -> None:
        theirs = [known for known in self.known if known.lease.holder == holder]
        assert self.leases.revoke(holder) == tuple(known.lease for known in theirs)
        for known in theirs:
            self.end(known)

    @rule(seconds=st.integers(0, 10))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds

    @rule()
    def expire(self) -> None:
        overdue = sorted(
            (known for known in self.known if known.ends <= self.clock.now),
            key=lambda known: (known.ends, known.lease.lease_id),
        )
        assert self.leases.expire() == tuple(known.lease for known in overdue)
        for known in overdue:
            self.end(known)

    def end(self, known: Known) -> None:
        self.known.remove(known)
        self.over.append(known.lease)

    @invariant()
    def the_book_is_the_models(self) -> None:
        assert len(self.leases) == len(self.known)
        for entry_id in range(3):
            in_force = self.of(entry_id)
            assert self.leases.is_lent(entry_id) == bool(in_force)
            assert set(self.leases.holders(entry_id)) == {known.lease.holder for known in in_force}
            exclusive = [known for known in in_force if known.lease.exclusive]
            assert not exclusive or len(in_force) == 1
        ends = min((known.ends for known in self.known), default=math.inf)
        assert self.leases.next_expiry() == (None if ends == math.inf else ends)


TestLending = Lending.TestCase
TestLending.settings = settings(
    max_examples=3 * settings.default.max_examples // 5, stateful_step_count=30, deadline=None
)
