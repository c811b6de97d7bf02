"""The command and the configuration of the page about Redis, as plain processes."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import valkey
from prerequisites import REDIS

from kvplug import Config
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keep-kv-in-redis.md"
PROMPT = range(100)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Of a server that the command on the page starts."""
    from redis_server import free_port

    (command,) = re.findall(r"command: (valkey-server .*)", PAGE.read_text())
    port = free_port()
    arguments = [REDIS.path_or_skip(), *shlex.split(command)[1:], "--port", str(port), "--bind", "127.0.0.1"]
    server = subprocess.Popen([*arguments, "--dir", str(tmp_path)], stdout=subprocess.DEVNULL)
    client = valkey.Valkey(port=port)
    for _ in range(500):
        try:
            client.ping()
            break
        except valkey.ConnectionError:
            time.sleep(0.02)
    yield port
    server.kill()
    server.wait(10)


def test_two_engines_share_pages_with_the_configuration_of_the_page(port: int, tmp_path: Path) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    given = tomllib.loads(text)
    assert given.pop("secret_file") == "/etc/kvplug/secret"
    options = given["options"]
    assert options["redis"] == {"address": ["kv:6379"], "size": "64 GiB"}
    options["redis"] = {"address": [f"127.0.0.1:{port}"], "size": "64 MiB"}
    options |= {"host": {"size": 8 << 20, "segment_bytes": 1 << 20}, "lookup": {"load_policy": "always"}}

    def engine(name: str, seed: int) -> FakeEngine:
        address = f"unix:@kvplug-page-{port}-{name}"
        return FakeEngine(Config.from_dict({**given, "secret_file": str(secret), "host": address}), seed=seed)

    with engine("one", 1) as one:
        one.prefill(request_of("first", PROMPT))
        saved = valkey.Valkey(port=port)
        waits.until(lambda: len(list(saved.scan_iter(match="kvplug:1:m:*"))) == 6, 10, "what is saved behind")
    with engine("other", 2) as other:
        prompt = request_of("second", PROMPT)
        blocks, loaded, report = other.load(prompt)
        assert loaded == 96 and not report.invalid_block_ids
        assert other.is_right(prompt.token_ids, blocks, len(PROMPT))
        assert other.worker.last_route.startswith("redis")
