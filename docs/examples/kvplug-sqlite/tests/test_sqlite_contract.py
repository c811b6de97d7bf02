"""The store "sqlite" is judged by kvplug's conformance kit."""

from __future__ import annotations

from kvplug_testing import BlockingStoreContract, StoreContract


class TestSqliteMethods(BlockingStoreContract):
    store = "sqlite"


class TestSqlite(StoreContract):
    store = "sqlite"
