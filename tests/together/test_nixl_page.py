"""The command and the configuration of the page about S3 and NIXL, as plain processes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keep-kv-in-s3-with-nixl.md"
PROMPT = range(100)


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Any]:
    """A client of the server that the command on the page starts, with the bucket of the page."""
    boto3 = pytest.importorskip("boto3", reason="no S3 server: pip install 'moto[server]'")
    pytest.importorskip("flask", reason="no S3 server: pip install 'moto[server]'")
    pytest.importorskip("nixl_cu12", reason="NIXL is not installed")
    from s3_server import free_port

    (command,) = re.findall(r"command: (moto_server .*)", PAGE.read_text())
    arguments = shlex.split(command)[1:]
    assert arguments == ["-H", "0.0.0.0", "-p", "5000"]
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        client = boto3.client(
            "s3",
            endpoint_url=f"http://127.0.0.1:{port}",
            region_name="us-east-1",
            aws_access_key_id="engines",
            aws_secret_access_key="0123456789",
        )
        limit = time.monotonic() + 60
        while True:
            try:
                client.create_bucket(Bucket="kv-pages")
                break
            except Exception:
                assert server.poll() is None and time.monotonic() < limit
                time.sleep(0.05)
        yield client
    finally:
        server.kill()
        server.wait(10)


def test_two_engines_share_pages_with_the_configuration_of_the_page(s3: Any, tmp_path: Path) -> None:
    text = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    for name in ("secret", "s3-secret"):
        (tmp_path / name).write_text("0123456789abcdef0123456789abcdef")
        (tmp_path / name).chmod(0o600)
    given = tomllib.loads(text)
    assert given.pop("secret_file") == "/etc/kvplug/secret"
    options = given["options"]
    assert options["nixl"]["endpoint"] == "http://s3:5000"
    options["nixl"] |= {
        "endpoint": s3.meta.endpoint_url,
        "secret_key_file": str(tmp_path / "s3-secret"),
    }
    options |= {"host": {"size": 8 << 20, "segment_bytes": 1 << 20}, "lookup": {"load_policy": "always"}}
    port = s3.meta.endpoint_url.rpartition(":")[2]

    def engine(name: str, seed: int) -> FakeEngine:
        address = f"unix:@kvplug-page-{port}-{name}"
        secret = str(tmp_path / "secret")
        return FakeEngine(Config.from_dict({**given, "secret_file": secret, "host": address}), seed=seed)

    def saved() -> int:
        return int(s3.list_objects_v2(Bucket="kv-pages", Prefix="kvplug/1/")["KeyCount"])

    with engine("one", 1) as one:
        one.prefill(request_of("first", PROMPT))
        waits.until(lambda: saved() == 6, 20, "what is saved behind")
    with engine("other", 2) as other:
        prompt = request_of("second", PROMPT)
        blocks, loaded, report = other.load(prompt)
        assert loaded == 96 and not report.invalid_block_ids
        assert other.is_right(prompt.token_ids, blocks, len(PROMPT))
        assert other.worker.last_route.startswith("nixl")
