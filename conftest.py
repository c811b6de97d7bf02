"""For all tests, the core's and the plugins'."""

from __future__ import annotations

import gc
import sys
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes depends on what else the machine does; a test of speed measures that itself.
settings.register_profile("kvplug", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kvplug")


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
