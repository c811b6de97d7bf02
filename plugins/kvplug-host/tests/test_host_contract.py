"""The store "host" is judged against the laws."""

from __future__ import annotations

from kvplug_testing import StoreContract


class TestHost(StoreContract):
    store = "host"
