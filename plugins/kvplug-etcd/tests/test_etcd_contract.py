"""The directory "etcd" is judged by the kit, with a real server."""

from __future__ import annotations

import functools
import signal
import uuid
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from kvplug_testing import DirectoryContract


class TestEtcd(DirectoryContract):
    directory = "etcd"
    lease_s = 3.0  # etcd's shortest is two seconds
    server: ClassVar[Any]

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        from etcd_server import EtcdServer  # not in the processes that the kit starts

        cls.server = EtcdServer(tmp_path_factory.mktemp("etcd"))
        yield
        cls.server.kill()

    def url(self) -> str:
        return f"etcd://{self.server.address}/{uuid.uuid4().hex}"

    def stop(self) -> Callable[[], object]:
        self.server.process.send_signal(signal.SIGSTOP)
        return functools.partial(self.server.process.send_signal, signal.SIGCONT)
