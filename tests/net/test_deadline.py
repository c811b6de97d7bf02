"""Deadlines: what a timeout may be."""

from __future__ import annotations

import math

import pytest

from kvplug.net.deadline import DEFAULT_TIMEOUT, Deadline


@pytest.mark.parametrize("timeout", [None, math.inf, 1e10, 1e300, 2**63])
def test_a_timeout_that_no_clock_can_hold_is_for_ever(timeout: float | None) -> None:
    remaining = Deadline.after(timeout).remaining()
    assert remaining is None


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf])
def test_a_timeout_that_is_none_is_refused(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout"):
        Deadline.after(timeout)


def test_the_default_stands_in_where_nothing_was_said() -> None:
    assert Deadline.after(DEFAULT_TIMEOUT, None).remaining() is None
    remaining = Deadline.after(DEFAULT_TIMEOUT, 5).remaining()
    assert remaining is not None
    assert 4 < remaining <= 5
