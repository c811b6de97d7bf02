"""The store and the directory "redis" are judged by the kit, with a real server."""

from __future__ import annotations

import contextlib
import functools
import signal
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from kvplug.transport import Store
from kvplug_testing import BlockingStoreContract, DirectoryContract, StoreContract


class Served:
    """Starts a server for the tests of a class."""

    server: ClassVar[Any]
    options: ClassVar[dict[str, Any]]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        from redis_server import RedisServer  # not in the processes that the kit starts

        cls.server = RedisServer(tmp_path_factory.mktemp("redis"))
        cls.options = {"address": [f"unix:{cls.server.socket}"]}
        yield
        cls.server.kill()


class TestRedisMethods(Served, BlockingStoreContract):
    store = "redis"
    place_option = "prefix"


class TestRedis(Served, StoreContract):
    store = "redis"
    place_option = "prefix"

    @contextlib.contextmanager
    def holding_up(self, store: Store) -> Iterator[None]:
        from server_process import stopped

        with stopped(self.server.process):
            yield


class TestRedisDirectory(DirectoryContract):
    directory = "redis"
    lease_s = 1.0
    server: ClassVar[Any]
    numbers: ClassVar[Iterator[int]] = iter(range(1, 16))

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        from redis_server import RedisServer

        cls.server = RedisServer(tmp_path_factory.mktemp("redis"))
        yield
        cls.server.kill()

    def url(self) -> str:
        return f"redis://{self.server.address}/{next(self.numbers)}"

    def stop(self) -> Callable[[], object]:
        self.server.process.send_signal(signal.SIGSTOP)
        return functools.partial(self.server.process.send_signal, signal.SIGCONT)
