"""The store "memory" keeps the laws, with ends in this process and with ends that reach it by a link."""

from __future__ import annotations

from kvplug_testing import StoreContract


class TestMemory(StoreContract):
    store = "memory"
    reached_by = "options"
    across_processes = False


class TestMemoryByALink(StoreContract):
    store = "memory"
