"""For all tests, the core's and the plugins'."""

from __future__ import annotations

import gc
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does; a test of speed measures that itself.
settings.register_profile("kvplug", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvplug")


# tox says it, for the recap at the very end of the matrix; pytest runs that tests start are not meant.
_failed_to = os.environ.pop("FAILED_TESTS_FILE", None)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note a failure where all environments' failures are gathered: what it was, and how it ended."""
    if _failed_to is not None and report.failed:
        said = report.longreprtext.splitlines()
        errors = [line for line in said if line.startswith("E  ")][:10]  # stacks may follow
        lines = [f"{report.nodeid} ({report.when})", *errors, *said[-5:]]
        Path(_failed_to).parent.mkdir(parents=True, exist_ok=True)
        with Path(_failed_to).open("a") as file:
            file.writelines(f"{line[:300]}\n" for line in lines)


@pytest.fixture(autouse=True, scope="module")
def _what_was_there_before_is_not_collected() -> None:
    """Tests that count what is left collect before they count; they need not walk all that is imported."""
    gc.collect()
    gc.freeze()


if sys.version_info < (3, 12) and sys.gettrace() is not None:
    # Under coverage each thread begins with settrace, which fails there while another thread is inside it:
    # the thread ends without a word, and the test that waits for it fails.
    _settrace = sys.settrace

    def _set_in_turn(function: Any) -> None:
        for _ in range(1000):
            try:
                return _settrace(function)
            except RuntimeError:
                time.sleep(0.0001)
        return _settrace(function)

    sys.settrace = _set_in_turn
