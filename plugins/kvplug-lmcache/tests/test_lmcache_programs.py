"""LMCache's own programs over kvplug stores: its verifier of L2 adapters, and its server."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

LMCACHE = str(Path(sys.executable).parent / "lmcache")


def adapter(params: dict[str, Any]) -> str:
    return json.dumps(
        {
            "type": "plugin",
            "module_path": "kvplug_lmcache.adapter",
            "class_name": "KvplugL2Adapter",
            "adapter_params": params,
        }
    )


def run(*arguments: str, within: float = 200) -> str:
    done = subprocess.run([LMCACHE, *arguments], capture_output=True, text=True, timeout=within, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["host", "fs", "redis"])
def test_the_verifier_of_lmcache_passes(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
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


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


@contextmanager
def served(params: dict[str, Any], log: Path) -> Iterator[tuple[int, int]]:
    """LMCache's server; yields its ports for requests and for HTTP."""
    port, http, prometheus = free_port(), free_port(), free_port()
    with log.open("w") as out:
        server = subprocess.Popen(
            [
                *(LMCACHE, "server", "--host", "127.0.0.1", "--port", str(port)),
                *("--http-host", "127.0.0.1", "--http-port", str(http), "--prometheus-port", str(prometheus)),
                *("--l1-size-gb", "0.25", "--eviction-policy", "LRU"),
                *("--supported-transfer-mode", "engine_driven", "--l2-adapter", adapter(params)),
            ],
            stdout=out,
            stderr=out,
        )
    try:
        limit = time.monotonic() + 200
        while True:
            try:
                status((port, http))
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < limit, log.read_text()[-5000:]
                time.sleep(0.2)
        yield port, http
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait(10)
            raise


def status(ports: tuple[int, int]) -> dict[str, Any]:
    """What the adapter says of itself."""
    with urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/status", timeout=10) as answer:
        (found,) = json.load(answer)["storage_manager"]["l2_adapters"]
    return dict(found)


def ask(ports: tuple[int, int], start: int = 0) -> tuple[list[str], list[str]]:
    """How many chunks each lookup found of two prompts of two chunks each, and the checksums of their KV."""
    said = run(
        *("bench", "server", "--mode", "cpu", "--interval", "0"),
        *("--rpc-url", f"tcp://127.0.0.1:{ports[0]}", "--url", f"http://127.0.0.1:{ports[1]}"),
        *("--start", str(start), "--end", str(start + 2)),
        *("--kvcache-shape-spec", "(2,128,16,2,64):float16:4", "--num-blocks", "128"),
    )
    return re.findall(r"LOOKUP: (\d/\d) chunks hit", said), re.findall(r"CHECKSUM: (\w+)", said)


@pytest.mark.timeout(600)
def test_a_fresh_server_finds_the_chunks_of_the_first(tmp_path: Path) -> None:
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
def test_a_server_goes_on_while_its_store_is_stopped_and_when_it_dies(redis: Any, tmp_path: Path) -> None:
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
