"""The alarm about slow stores, with a real server and a network that becomes slow."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, build_store
from kvplug.metrics import rate as rates
from kvplug.transport import MissReason
from kvplug_lab.named_pages import NamedPages
from kvplug_redis.store import RedisStore
from redis_server import RedisServer

MIB = 1 << 20
PAGES = NamedPages(MIB)
NAMES = ("a", "b")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alarm after three slow batches, and on an idle host, whatever else this one does."""
    monkeypatch.setattr(rates, "_BATCH_BYTES", 2 * MIB)
    monkeypatch.setattr(rates, "_SLOW_BATCHES", 3)
    monkeypatch.setattr(rates, "_SLOW_S", 0.5)
    monkeypatch.setattr(rates, "_HISTORY", 4)
    monkeypatch.setattr(rates, "host_load", lambda: 1.0)


@pytest.mark.timeout(60)
@pytest.mark.xdist_group("timing")
@pytest.mark.parametrize("slow_path", ["warn", "refuse", "off"])
def test_a_store_whose_network_becomes_slow_is_told_and_counted_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    slow_path: str,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    server, read = RedisServer(tmp_path), RedisStore.read
    request.addfinalizer(server.kill)

    def slowly(*args: Any) -> int | None:
        time.sleep(1.2)
        return read(*args)

    options = {"redis": {"address": [server.address]}}
    config = Config.from_dict({"stores": ["redis"], "slow_path": slow_path, "options": options})
    with build_store(config) as store:
        assert PAGES.put(store, *NAMES) == [None] * 2
        for _ in range(8):
            assert PAGES.got(store, *NAMES) == [None] * 2
        monkeypatch.setattr(RedisStore, "read", slowly)
        count = 1 if slow_path == "off" else 4
        found = [PAGES.got(store, *NAMES) for _ in range(count)]
        counted: Any = store
        snapshot = counted.recorder.stats.snapshot()
    said = [each.getMessage() for each in caplog.records if each.name == "kvplug.assembly.slow_path"]
    if slow_path == "off":
        assert not said and "slow" not in snapshot and found == [[None] * 2] * count
        return
    (text,) = said
    assert "loading from the store 'redis' carries 0.0" in text and "a twentieth of the" in text
    assert snapshot["slow"] == {"get": {"redis": 1}}
    if slow_path == "refuse":
        assert found[-1] == [MissReason.SLOW] * 2 and snapshot["failures"]["get"]["slow"] == 2
    else:
        assert found == [[None] * 2] * count
