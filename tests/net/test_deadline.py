"""Deadlines: what a timeout may be."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import pytest

from kvplug import ConfigError
from kvplug.net.deadline import Deadline


@pytest.mark.parametrize("timeout", [None, math.inf, 1e10, 1e300, 2**63])
def test_a_timeout_that_no_clock_can_hold_is_for_ever(timeout: float | None) -> None:
    remaining = Deadline.after(timeout).remaining()
    assert remaining is None


def test_a_deadline_that_has_passed_leaves_no_time() -> None:
    assert Deadline(0.0).remaining() == 0.0  # a socket refuses to wait for less


@pytest.mark.parametrize("timeout", [-1, -0.001, math.nan, -math.inf, "5", b"5", [5], timedelta(seconds=5)])
def test_what_is_not_a_timeout_is_refused_by_name(timeout: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"timeout: .* was given; allowed is a number of seconds, 0 or more"
    ):
        Deadline.after(timeout)
