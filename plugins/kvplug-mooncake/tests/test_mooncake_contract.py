"""The store "mooncake" is judged by the kit, with a real master and a holder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from kvplug_testing import StoreContract


class TestMooncake(StoreContract):
    store = "mooncake"
    place_option = "prefix"
    pool: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        from mooncake_pool import Pool  # not in the processes that the kit starts

        folder = tmp_path_factory.mktemp("mooncake")
        cls.pool = Pool(folder, "--default_kv_lease_ttl=4000", segment_bytes=3 << 29)
        cls.options = {"master": cls.pool.address, "timeout_s": 8.0}  # for a busy host
        yield
        cls.pool.close()
