"""The store "fs" keeps the laws."""

from __future__ import annotations

from types import MappingProxyType

from kvplug_testing import StoreContract


class TestFs(StoreContract):
    store = "fs"
    options = MappingProxyType({"touch_s": 0})
    use_granularity_s = 0.02
