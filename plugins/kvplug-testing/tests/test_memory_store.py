"""The store "memory" keeps the laws, with ends that share their pages within this process."""

from __future__ import annotations

from kvplug_testing import StoreContract


class TestMemory(StoreContract):
    store = "memory"
    reached_by = "options"
    across_processes = False
    use_granularity_s = 0.0
