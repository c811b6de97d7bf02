"""The store "nixl" is judged by the kit, over a folder and over a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any, ClassVar

import pytest

from kvplug.transport import BlockingStore
from kvplug_nixl.probe import probe
from kvplug_testing import StoreContract
from kvplug_testing.contract.store.suite import Place

pytestmark = pytest.mark.skipif(not probe().viable, reason=probe().reason or "NIXL is here")
_is_warm: list[bool] = []


class TestNixlFiles(StoreContract):
    store = "nixl"


@pytest.mark.full  # the S3 server takes minutes
class TestNixlObjects(StoreContract):
    store = "nixl"
    place_option = "prefix"
    budget_option = ""
    waivers: ClassVar[dict[str, str]] = {
        "test_a_forked_child_holds_none_of_the_descriptors": (
            "the AWS SDK inside NIXL keeps an event descriptor for each of its connections after a fork; the"
            " child's are closed when it ends or starts another program"
        )
    }
    server: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        from s3_server import S3Server  # not in the processes that the kit starts

        cls.server = S3Server(tmp_path_factory.mktemp("s3"))
        cls.options = MappingProxyType(cls.server.options)
        yield
        cls.server.kill()

    def warm_up(self) -> None:
        """The AWS SDK starts a thread with three descriptors, once in a process, and keeps it."""
        super().warm_up()
        if not _is_warm:
            store = self.make_store(self.context(Place(options={}, buffer_size=1 << 20)))
            assert isinstance(store, BlockingStore)
            assert store.has([bytes(32)]) == [False]
            store.close()
            _is_warm.append(True)
