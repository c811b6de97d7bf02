"""The commands and configurations of the pages about stores, as plain processes: two engines share pages."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
from prerequisites import REDIS

from kvplug import Config, check_config
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to"
PROMPT = range(100)


@attrs.frozen
class Place:
    """A store that the commands of a page have started."""

    name: str
    page: str
    shown: dict[str, Any]
    """The options of the page that name its hosts."""
    used: dict[str, Any]
    """What replaces them in this test."""
    count: Callable[[], int]
    """How many pages it has."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Starts a program, and returns the file with what it writes."""
    with ExitStack() as stack:

        def start(*command: str) -> Path:
            path = tmp_path / f"log-{len(list(tmp_path.glob('log-*')))}"
            log = stack.enter_context(path.open("wb"))
            process = subprocess.Popen(command, stdout=log, stderr=log)
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            return path

        yield start


def commands_of(page: str, program: str) -> list[list[str]]:
    found = re.findall(rf"command: ({program}.*)", (HOW_TO / page).read_text())
    return [shlex.split(command) for command in found]


def redis(run: Callable[..., Path], tmp_path: Path) -> Place:
    valkey = pytest.importorskip("valkey")
    from redis_server import free_port

    page, port = "keep-kv-in-redis.md", free_port()
    ((_, *arguments),) = commands_of(page, "valkey-server ")
    run(
        REDIS.path_or_skip(),
        *arguments,
        *("--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path)),
    )
    client = valkey.Valkey(port=port)

    def answers() -> bool:
        with suppress(valkey.ConnectionError):
            return bool(client.ping())
        return False

    waits.until(answers, 10, "the server")
    return Place(
        "redis",
        page,
        {"address": ["kv:6379"], "size": "64 GiB"},
        {"address": [f"127.0.0.1:{port}"], "size": "64 MiB"},
        lambda: len(list(client.scan_iter(match="kvplug:2:m:*"))),
    )


def mooncake(run: Callable[..., Path], tmp_path: Path) -> Place:
    pool = pytest.importorskip("mooncake_pool", reason="kvplug-mooncake is not installed")
    if reason := pool.probe().reason:
        pytest.skip(reason)
    page, port, shows = "keep-kv-in-mooncake.md", pool.free_port(), pool.free_port()
    commands = commands_of(page, r"mooncake_\w+ ")
    assert [command[0] for command in commands] == ["mooncake_master", *["mooncake_client"] * 2]
    changes = {"50051": str(port), "master:": "127.0.0.1:", "64 GB": "64 MB"}
    changes |= dict.fromkeys(("holder-1", "holder-2"), "127.0.0.1")
    for program, *arguments in commands:
        for old, new in changes.items():
            arguments = [each.replace(old, new) for each in arguments]
        is_master = program == "mooncake_master"
        arguments.append(f"--metrics_port={shows}" if is_master else f"--port={pool.free_port()}")
        log = run(str(Path(sys.executable).parent / program), *arguments)
        if is_master:
            waits.until(lambda: pool.listens(port), 20, "the master")
        else:
            waits.until(lambda log=log: "Mounting segment" in log.read_text(), 20, "a holder")

    def count() -> int:
        with urllib.request.urlopen(f"http://127.0.0.1:{shows}/get_all_keys", timeout=5) as answer:
            return sum(line.startswith(b"kvplug:1:") for line in answer)

    return Place("mooncake", page, {"master": "master:50051"}, {"master": f"127.0.0.1:{port}"}, count)


@pytest.mark.parametrize("place", [redis, mooncake], ids=lambda place: place.__name__)
def test_two_engines_share_pages_with_the_configuration_of_the_page(
    place: Callable[..., Place], run: Callable[..., Path], tmp_path: Path
) -> None:
    store = place(run, tmp_path)
    text = re.findall(r"```toml\n(.*?)```", (HOW_TO / store.page).read_text(), re.DOTALL)[0]
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    secret.chmod(0o600)
    given = tomllib.loads(text)
    assert given.pop("secret_file") == "/etc/kvplug/secret"
    options = given["options"]
    assert store.shown.items() <= options[store.name].items()
    options[store.name] |= store.used
    options |= {"host": {"size": 8 << 20, "segment_bytes": 1 << 20}, "lookup": {"load_policy": "always"}}

    def engine(name: str, seed: int) -> FakeEngine:
        address = f"unix:@kvplug-page-{tmp_path.name}-{name}"
        return FakeEngine(Config.from_dict({**given, "secret_file": str(secret), "host": address}), seed=seed)

    with engine("one", 1) as one:
        one.prefill(request_of("first", PROMPT))
        waits.until(lambda: store.count() == 6, 20, "what is saved behind")
    with engine("other", 2) as other:
        prompt = request_of("second", PROMPT)
        blocks, loaded, report = other.load(prompt)
        assert loaded == 96 and not report.invalid_block_ids
        assert other.is_right(prompt.token_ids, blocks, len(PROMPT))
        assert other.worker.last_route.startswith(store.name)


def test_the_configuration_for_s3_names_what_there_is() -> None:
    text = re.findall(r"```toml\n(.*?)```", (HOW_TO / "keep-kv-in-s3-with-nixl.md").read_text(), re.DOTALL)[0]
    known = tomllib.loads(text)
    assert known.pop("secret_file") and "nixl" in known["stores"]
    check_config(Config.from_dict(known))
