"""LMCache's own programs over kvplug stores: its verifier of L2 adapters, and its server."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest

from lmcache_programs import adapter, ask, run, served, status


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["host", "fs", "redis"])
def test_the_verifier_of_lmcache_passes(name, tmp_path, request):
    options: dict[str, Any] = {"host": {"size": "256 MiB"}, "fs": {"path": str(tmp_path / "pages")}}
    if name == "redis":
        options = {"redis": {"address": request.getfixturevalue("redis").address}}
    params = {"stores": [name], "options": {name: options[name]}}
    said = run(
        *("bench", "l2", "--l2-adapter", adapter(params), "--no-skip-verify"),
        *("--num-keys", "16", "--in-flight", "4", "--rounds", "3", "--lookup-max-hit-rate", "0.5"),
    )
    assert "All 64 keys data verified OK" in said
    assert re.findall(r"Total success: +(\d+)", said) == ["192", "96", "192"]  # stored, found, loaded
    assert set(re.findall(r"Rounds timed out: +(\d+)", said)) == {"0"}


@pytest.mark.timeout(600)
def test_a_fresh_server_finds_the_chunks_of_the_first(tmp_path):
    params = {"stores": ["fs"], "options": {"fs": {"path": str(tmp_path / "pages")}}}
    with served(params, tmp_path / "first.log") as first:
        hits, before = ask(first)
        limit = time.monotonic() + 20
        while status(first)["num_pages"] < 4:  # it stores behind
            assert time.monotonic() < limit
            time.sleep(0.1)
    assert hits == ["0/2", "2/2", "0/2", "2/2"]
    with served(params, tmp_path / "second.log") as second:
        hits, after = ask(second)
        figures = status(second)
    assert hits == ["2/2"] * 4
    assert set(after) == set(before)  # the client had zeroed its memory before
    assert len(set(after)) == 2
    assert figures["succeeded"]["get"] >= 4
    assert figures["failed"] == {}


@pytest.mark.timeout(600)
def test_a_server_goes_on_while_its_store_is_stopped_and_when_it_dies(redis, tmp_path):
    params = {"stores": ["redis"], "options": {"redis": {"address": redis.address}}, "timeout_s": 1}
    with served(params, tmp_path / "log") as ports:
        assert ask(ports)[0] == ["0/2", "2/2"] * 2
        os.kill(redis.process.pid, signal.SIGSTOP)
        try:
            assert ask(ports, 2)[0] == ["0/2", "2/2"] * 2  # the chunks are in the server's own memory
        finally:
            os.kill(redis.process.pid, signal.SIGCONT)
        redis.kill()
        assert ask(ports, 4)[0] == ["0/2", "2/2"] * 2
        failed = status(ports)["failed"]
    assert {"store_gone", "timeout"} & failed["put"].keys()
