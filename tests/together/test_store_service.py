"""`kvplug store serve` as a service: its probes, and what it reports to systemd."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvplug_testing import waits

pytestmark = pytest.mark.timeout(300)
KVPLUG = (sys.executable, "-c", "from kvplug.cli.main import main; main()")
SMALL = "--set=options.host.size=4 MiB"
START_S = 120.0
"""Opening a store imports torch."""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
        return found


def probe(port: int, path: str = "/ready") -> tuple[int, dict[str, object]]:
    """The status and the body; 0 if nothing listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=waits.patience_s) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as e:
        with e:
            return e.code, json.load(e)
    except urllib.error.URLError:
        return 0, {}


@contextmanager
def started(*command: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    program = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, errors="replace"
    )
    try:
        yield program
    finally:
        program.kill()
        program.communicate()


def serve(folder: Path, port: int, *more: str) -> Sequence[str]:
    options = (f"--address=unix:{folder}/kv.sock", f"--health=127.0.0.1:{port}", SMALL, *more)
    return (*KVPLUG, "store", "serve", "host", *options)


def is_ready(port: int) -> bool:
    return probe(port)[0] == 200


CLIENT = """
import socket, sys
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.send(b"GET /")
print("up", flush=True)
client.recv(1)
"""


def test_probes_are_answered_whatever_their_clients_do_and_end_with_the_store(tmp_path: Path) -> None:
    port = free_port()
    with started(*serve(tmp_path, port)) as program:
        waits.until(lambda: probe(port, "/live")[0] == 200, START_S, "probes are answered while it starts")
        waits.until(lambda: is_ready(port), START_S, "the store is ready")
        with started(sys.executable, "-c", CLIENT, str(port)) as stopped:
            assert stopped.stdout is not None and stopped.stdout.readline() == "up\n"
            stopped.send_signal(signal.SIGSTOP)
            assert [probe(port)[0] for _ in range(20)] == [200] * 20
            _, body = probe(port)
            assert body["store"] == {
                "name": "host",
                "num_pages": 0,
                "used_bytes": 0,
                "num_clients": 0,
                "budget_bytes": 4 << 20,
            }
            (tmp_path / "kv.sock").rename(tmp_path / "moved")
            status, found = probe(port, "/live")
            assert (status, found["reasons"]) == (503, ["the file of its socket was removed"])
            (tmp_path / "moved").rename(tmp_path / "kv.sock")
            assert is_ready(port)
            program.send_signal(signal.SIGTERM)
            _, said = program.communicate(timeout=waits.patience_s)
    assert program.returncode == 0 and "listening for health probes" in said, said
    assert probe(port) == (0, {})


@pytest.mark.parametrize(
    ("health", "code", "said"),
    [
        ("127.0.0.1:{port}", 1, "127.0.0.1:{port} is in use"),
        ("192.0.2.1:80", 1, "cannot listen at 192.0.2.1:80: this host has no such address"),
        ("unix:@kvplug-health", 2, "allowed is host:port"),
        ("8080", 2, "allowed is host:port"),
    ],
)
def test_a_wrong_address_of_probes_is_refused_before_the_store_opens(
    tmp_path: Path, health: str, code: int, said: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        command = serve(tmp_path, 0, "--health", health.format(port=port))
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_S, check=False)
    assert (done.returncode, done.stdout) == (code, "") and said.format(port=port) in done.stderr, done.stderr
    assert "listening" not in done.stderr
