"""Gives up a suite whose tests run into deadlines again and again: each of them takes up to a minute."""

from __future__ import annotations

import pytest

from kvplug_testing import peers, waits
from kvplug_testing.contract.base import Contract
from kvplug_testing.scorecard import NOT_RUN

MOST = 3
"""After so many tests of a suite that ran into a deadline, the others are not run."""


class Hangs:
    """The tests of this process that ran into a deadline, by suite."""

    def __init__(self) -> None:
        self._tests: dict[type[Contract], list[str]] = {}

    def note(self, suite: type[Contract], test: str, error: BaseException, took_s: float) -> None:
        """A test has failed with this error, ``took_s`` seconds after it began."""
        if _is_deadline(error, took_s):
            tests = self._tests.setdefault(suite, [])
            if test not in tests:  # its cleanup may run into one, too
                tests.append(test)

    def reason(self, suite: type[Contract]) -> str:
        """Why no more tests of the suite are run; empty if they are."""
        tests = self._tests.get(suite, [])
        if len(tests) < MOST:
            return ""
        return f"{NOT_RUN}{len(tests)} tests of {suite.__name__} ran into a deadline: {', '.join(tests)}"


def _is_deadline(error: BaseException, took_s: float) -> bool:
    """Whether a test waited for something that never came. Short timeouts, which many tests want to see,
    are none of these deadlines.
    """
    if isinstance(error, pytest.fail.Exception):
        return str(error).startswith(("Timeout >", "Timeout (>"))  # pytest-timeout's, old and new
    if took_s < waits.patience_s:
        return False
    if isinstance(error, peers.ChildError):
        return error.kind in (TimeoutError.__name__, waits.DeadlineError.__name__)
    return isinstance(error, (waits.DeadlineError, TimeoutError))
