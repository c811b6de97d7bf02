"""Runs the state machines of Hypothesis that suites have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test


def run_machine(make: Callable[[], Any], *, examples: int, steps: int, shrinks: bool = False) -> None:
    """Make so many calls of so many machines.

    Args:
        shrinks: look for the shortest calls that fail. If a failure is a timeout, that can take minutes.
    """
    run_state_machine_as_test(
        make,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
            database=None,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        ),
    )
