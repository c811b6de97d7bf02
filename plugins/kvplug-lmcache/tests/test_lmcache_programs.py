"""LMCache's own programs over kvplug stores: its verifier of L2 adapters, and its server."""

from __future__ import annotations

import re
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
