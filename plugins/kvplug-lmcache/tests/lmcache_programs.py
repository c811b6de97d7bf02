"""LMCache's own programs over kvplug stores: its benches, and its server."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redis_server import free_port

LMCACHE = str(Path(sys.executable).parent / "lmcache")


def description(**params: Any) -> dict[str, Any]:
    """What LMCache makes an adapter of, with these ``adapter_params``."""
    return {
        "type": "plugin",
        "module_path": "kvplug_lmcache.adapter",
        "class_name": "KvplugL2Adapter",
        "adapter_params": {"weights": "those of this test", **params},
    }


def adapter(params: dict[str, Any]) -> str:
    return json.dumps(description(**params))


def run(*arguments: str, within: float = 200) -> str:
    done = subprocess.run([LMCACHE, *arguments], capture_output=True, text=True, timeout=within, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


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
