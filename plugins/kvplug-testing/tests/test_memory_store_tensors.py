"""The store "memory" keeps the laws, with ends that reach it by a link."""

from __future__ import annotations

import pytest

from kvplug_testing import StoreContract


@pytest.mark.variant
class TestMemoryByALink(StoreContract):
    store = "memory"
    use_granularity_s = 0.0
