"""The commands and the configuration of the page about Mooncake, as plain processes."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvplug import Config, build_store
from kvplug.transport import Presence
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "keep-kv-in-mooncake.md"
PROMPT = range(100)


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """Of the master, and of its pages for people. It and the holders are started by the page's commands."""
    mooncake_pool = pytest.importorskip("mooncake_pool", reason="kvplug-mooncake is not installed")
    if reason := mooncake_pool.probe().reason:
        pytest.skip(reason)
    commands = re.findall(r"command: (mooncake_\w+ .*)", PAGE.read_text())
    assert [command.split()[0] for command in commands] == ["mooncake_master", *["mooncake_client"] * 2]
    port, shows = mooncake_pool.free_port(), mooncake_pool.free_port()
    changes = {
        "50051": str(port),
        "master:": "127.0.0.1:",
        "holder-1": "127.0.0.1",
        "holder-2": "127.0.0.1",
        "64 GB": "64 MB",
    }
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            for old, new in changes.items():
                command = command.replace(old, new)
            program, *arguments = shlex.split(command)
            if program == "mooncake_master":
                arguments.append(f"--metrics_port={shows}")
            else:
                arguments.append(f"--port={mooncake_pool.free_port()}")
            log = stack.enter_context(open(tmp_path / f"log-{number}", "wb"))
            process = subprocess.Popen(
                [str(Path(sys.executable).parent / program), *arguments], stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            if program == "mooncake_master":
                waits.until(lambda: mooncake_pool.listens(port), 20, "the master")
            else:
                path = tmp_path / f"log-{number}"
                waits.until(lambda: "Mounting segment" in path.read_text(), 20, "a holder")  # noqa: B023
        yield port, shows


def num_pages(port: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/get_all_keys", timeout=5) as answer:
        return sum(line.startswith(b"kvplug:1:") for line in answer)


def test_two_engines_share_pages_with_the_configuration_of_the_page(
    ports: tuple[int, int], tmp_path: Path
) -> None:
    (text,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    given = tomllib.loads(text)
    assert given.pop("secret_file") == "/etc/kvplug/secret"
    options = given["options"]
    assert options["mooncake"].pop("master") == "master:50051"
    options["mooncake"]["master"] = f"127.0.0.1:{ports[0]}"
    options |= {"host": {"size": 8 << 20, "segment_bytes": 1 << 20}, "lookup": {"load_policy": "always"}}

    def config(name: str) -> Config:
        address = f"unix:@kvplug-page-{ports[0]}-{name}"
        return Config.from_dict({**given, "secret_file": str(secret), "host": address})

    with FakeEngine(config("one"), seed=1) as one:
        one.prefill(request_of("first", PROMPT))
        waits.until(lambda: num_pages(ports[1]) == 6, 10, "what is saved behind")
    with FakeEngine(config("other"), seed=2) as other:
        prompt = request_of("second", PROMPT)
        blocks, loaded, report = other.load(prompt)
        assert loaded == 96 and not report.invalid_block_ids
        assert other.is_right(prompt.token_ids, blocks, len(PROMPT))
        assert other.worker.last_route.startswith("mooncake")
    with build_store(config("third"), "mooncake") as store:
        assert store.submit_lookup([bytes(32)]).wait(10) == [Presence.ABSENT]
