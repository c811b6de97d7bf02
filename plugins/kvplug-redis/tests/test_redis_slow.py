"""The alarm about slow stores, with a real server behind a proxy that becomes slow."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, build_store
from kvplug.metrics import path_rate
from kvplug.transport import MissReason
from kvplug_testing.named_pages import NamedPages
from redis_server import RedisServer

MIB = 1 << 20
PAGES = NamedPages(MIB)
NAMES = ("a", "b")


class Proxy:
    """Carries bytes between the store and its server; what the server says, at most at a rate."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.bytes_per_s = float("inf")
        self._turn = threading.Lock()
        self._sockets = [self._listening]
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listening.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += [client, server]
                for pair in ((client, server, False), (server, client, True)):
                    thread = threading.Thread(target=self._carry, args=pair)
                    self._threads.append(thread)
                    thread.start()

    def _carry(self, source: socket.socket, target: socket.socket, throttled: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(MIB):
                target.sendall(data)
                if throttled and self.bytes_per_s < float("inf"):
                    with self._turn:  # all connections share the rate
                        time.sleep(len(data) / self.bytes_per_s)

    def close(self) -> None:
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    server = RedisServer(tmp_path)
    proxy = Proxy(server.port)
    yield proxy
    proxy.close()
    server.kill()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm after three slow batches, and on an idle host, whatever else this one does."""
    monkeypatch.setattr(path_rate, "_BATCH_BYTES", 2 * MIB)
    monkeypatch.setattr(path_rate, "_SLOW_BATCHES", 3)
    monkeypatch.setattr(path_rate, "_SLOW_S", 0.5)
    monkeypatch.setattr(path_rate, "_LEAST_HISTORY", 4)
    monkeypatch.setattr(path_rate, "host_load", lambda: 1.0)


@pytest.mark.timeout(60)
@pytest.mark.xdist_group("timing")
@pytest.mark.parametrize("slow_path", ["warn", "refuse", "off"])
def test_a_store_whose_network_becomes_slow_is_told_and_counted_once(
    proxy: Proxy, slow_path: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"redis": {"address": [proxy.address]}}
    config = Config.from_dict({"stores": ["redis"], "slow_path": slow_path, "options": options})
    with build_store(config) as store:
        assert PAGES.put(store, *NAMES) == [None] * 2
        for _ in range(8):
            assert PAGES.got(store, *NAMES) == [None] * 2
        proxy.bytes_per_s = 1.5e6
        count = 1 if slow_path == "off" else 4
        found = [PAGES.got(store, *NAMES) for _ in range(count)]
        counted: Any = store
        snapshot = counted._stats.snapshot()
    said = [each.getMessage() for each in caplog.records if each.name == "kvplug.assembly.slow_stores"]
    if slow_path == "off":
        assert not said and "slow_gets" not in snapshot and found == [[None] * 2] * count
        return
    (text,) = said
    assert "loading from the store 'redis' carries 0.0" in text and "a twentieth of the" in text
    assert "its server, the network to it, or other programs that use it may be busy" in text
    assert snapshot["slow_gets"] == {"redis": 1} and "slow_puts" not in snapshot
    if slow_path == "refuse":
        assert "kvplug loads nothing from it for 60 s at a time" in text
        assert found[-1] == [MissReason.SLOW] * 2 and snapshot["failures"]["get"]["slow"] == 2
    else:
        assert found == [[None] * 2] * count
