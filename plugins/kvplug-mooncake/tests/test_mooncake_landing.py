"""The landing area: what is lent overlaps nothing, and all of it comes back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from kvplug import CapacityError
from kvplug.transport import Deadline
from kvplug_mooncake.landing import Landing, LateError, Slot


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 700), st.integers(0, 20))))
def test_slots_do_not_overlap_and_all_room_comes_back(steps: list[tuple[bool, int, int]]) -> None:
    landing = Landing(memoryview(bytearray(2048)))
    lent: list[Slot] = []
    for gives, nbytes, which in steps:
        if gives and lent:
            landing.give(lent.pop(which % len(lent)))
            continue
        try:
            slot = landing.take(nbytes, Deadline.after(0))
        except LateError:
            continue
        assert len(slot.view) == nbytes
        assert all(slot.at + nbytes <= other.at or other.at + other.nbytes <= slot.at for other in lent), (
            "two calls have the same memory"
        )
        lent.append(slot)
    for slot in lent:
        landing.give(slot)
    assert landing.take(2048, Deadline.after(0)).at == 0
    with pytest.raises(CapacityError, match="landing_bytes is 2048"):
        landing.take(2049, Deadline.after(0))
