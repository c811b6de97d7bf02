"""The store "nixl" is judged by the kit, over a folder and over a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from kvplug_testing import StoreContract

class TestNixlFiles(StoreContract):
    store = "nixl"


class TestNixlObjects(StoreContract):
    store = "nixl"
    place_option = "prefix"
    budget_option = ""
    server: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        from s3_server import S3Server  # not in the processes that the kit starts

        cls.server = S3Server(tmp_path_factory.mktemp("s3"))
        cls.options = MappingProxyType(cls.server.options)
        yield
        cls.server.kill()
