"""`kvplug store serve` as a service: its probes, and the files that run it, as plain processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from configparser import ConfigParser
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvplug import Config, ConfigError, Registry
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.assembly.stores import serve_store
from kvplug.cli.store import store as store_command
from kvplug.config.units import parse_bytes
from kvplug.errors import AddressInUseError
from kvplug.transport.spec import Kind
from kvplug_testing import waits
from kvplug_testing.engine import FakeEngine, request_of
from kvplug_testing.forkserver import ForkServer
from kvplug_testing.peers import Peer

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


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Callable[..., Peer]:
    """Runs the program ``kvplug`` with these arguments, in a process that has imported torch already."""

    def run(*arguments: str, **environment: str) -> Peer:
        return fork_server.start(
            "kvplug_lab.installed_site:run_program",
            [*arguments],
            [],
            str(tmp_path),
            environment,
            timeout_s=START_S,
        )

    return run


def serve(folder: Path, port: int, *more: str) -> Sequence[str]:
    options = (f"--address=unix:{folder}/kv.sock", f"--health=127.0.0.1:{port}", SMALL, *more)
    return ("store", "serve", "host", *options)


def is_ready(port: int) -> bool:
    return probe(port)[0] == 200


CLIENT = """
import socket, sys
client = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
client.send(b"GET /")
print("up", flush=True)
client.recv(1)
"""


def test_probes_are_answered_whatever_their_clients_do_and_end_with_the_store(
    run: Callable[..., Peer], tmp_path: Path
) -> None:
    port = free_port()
    with run(*serve(tmp_path, port)) as program:
        waits.until(lambda: probe(port, "/live")[0] == 200, START_S, "probes are answered while it starts")
        waits.until(lambda: is_ready(port), START_S, "the store is ready")
        with started(sys.executable, "-c", CLIENT, str(port)) as stopped:
            assert stopped.stdout is not None and stopped.stdout.readline() == "up\n"
            stopped.send_signal(signal.SIGSTOP)
            assert [probe(port)[0] for _ in range(20)] == [200] * 20
            _, body = probe(port)
            assert body["store"] == {
                "name": "host",
                "medium": "host",
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
            os.kill(program.pid, signal.SIGTERM)
            code, _, log = program.result()
    assert code == 0 and "listening for health probes" in log, log
    assert probe(port) == (0, {})


@pytest.mark.parametrize(
    ("health", "code", "message"),
    [
        ("127.0.0.1:{port}", 1, "127.0.0.1:{port} is in use"),
        ("192.0.2.1:80", 1, "cannot listen at 192.0.2.1:80: this host has no such address"),
        ("unix:@kvplug-health", 2, "allowed is host:port"),
        ("8080", 2, "allowed is host:port"),
    ],
)
def test_a_wrong_address_of_probes_is_refused_before_the_store_opens(
    run: Callable[..., Peer], tmp_path: Path, health: str, code: int, message: str
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with run(*serve(tmp_path, 0, "--health", health.format(port=port))) as program:
            *done, errors = program.result()
    assert done == [code, ""] and message.format(port=port) in errors, errors
    assert "listening" not in errors


# -- what it reports -------------------------------------------------------------------------------------

TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_what_a_store_served_to_an_engine_is_in_the_engines_trace_and_in_the_stores_metrics(
    collector: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvplug.metrics")
    address = f"unix:@kvplug-traced-{os.getpid()}"
    reports = {"tracing": "otlp_proto_http", "sinks": ["log"]}
    store = {"stores": ["host"], "options": {"host": {"size": "4 MiB"}}}
    given = {"connector": "lookup", "role": "both", "host": f"{address}-engine", "stores": ["host"]}
    options = {"host": {"contact": address}, "lookup": {"load_policy": "always"}}
    with (
        serve_store(Config.from_dict({**store, **reports}), "host", address),
        FakeEngine(Config.from_dict({**given, "options": options})) as engine,
    ):
        engine.prefill(request_of("saved", range(100)))
        engine.settle()
        params = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert engine.load(request_of("loaded", range(100), params=params))[1] == 96
    spans = [
        span
        for request in collector
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]
    assert {(span.name, span.trace_id.hex()) for span in spans} == {("kvplug.serve", TRACE)}
    assert any("side=store" in line and " handshake: " in line for line in caplog.messages)


def test_a_store_that_cannot_be_served_leaves_no_thread_that_reports(
    collector: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPLUG_SECRET", "5" * 32)
    given = {"stores": ["host"], "tracing": "otlp_proto_http", "sinks": ["log"]}
    config = Config.from_dict({**given, "options": {"host": {"size": "4 MiB"}}})
    with closing(socket.create_server(("127.0.0.1", 0))) as other, pytest.raises(AddressInUseError):
        serve_store(config, "host", f"127.0.0.1:{other.getsockname()[1]}")
    left = {thread.name for thread in threading.enumerate()}
    assert not left & {"kvplug-tracing", "kvplug-metrics"}
    for wrong in ({"tracing": "zipkin"}, {"sinks": ["unknown"]}):
        with pytest.raises(ConfigError, match=r"unknown|zipkin"):
            serve_store(Config.from_dict({"stores": ["host"], **wrong}))


# -- the files of docs/examples/service ------------------------------------------------------------------

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples" / "service"
PORT, GIB = "29580", 1 << 30
OVERHEAD = 4 * GIB
"""What the files leave beside the budget, for the program itself."""


def unit() -> dict[str, str]:
    parser = ConfigParser(interpolation=None, delimiters="=")
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read(EXAMPLES / "kvplug-store.service")
    return dict(parser["Service"])


def containerfile(instruction: str) -> list[str]:
    """The arguments of an instruction in the form of JSON, after its flags and ``CMD``."""
    (line,) = re.findall(rf"^{instruction} (.*)$", (EXAMPLES / "Containerfile").read_text(), re.M)
    found = json.loads(line[line.index("[") :])
    return [str(each) for each in found]


def here(arguments: Sequence[str], folder: Path, port: int) -> list[str]:
    """The arguments of a command as this host can run it, beside others and with little memory."""
    changed = [("/run/kvplug", str(folder)), (PORT, str(port)), ("64 GiB", "4 MiB"), ("0.0.0.0", "127.0.0.1")]
    for theirs, ours in changed:
        arguments = [each.replace(theirs, ours) for each in arguments]
    return [*arguments]


def test_the_command_of_the_unit_reports_that_it_is_ready_and_ends_in_time(tmp_path: Path) -> None:
    service, port = unit(), free_port()
    assert service["Type"] == "notify" and service["KillSignal"] == "SIGTERM"
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(START_S)
        env = os.environ | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        program, *arguments = shlex.split(service["ExecStart"])
        assert program.endswith("/kvplug")
        with started(*KVPLUG, *here(arguments, tmp_path, port), env=env) as program:
            assert systemd.recv(100) == b"READY=1"
            assert is_ready(port) and (tmp_path / "kv.sock").is_socket()
            program.terminate()
            assert systemd.recv(100) == b"STOPPING=1"
            _, log = program.communicate(timeout=float(service["TimeoutStopSec"]))
    assert program.returncode == 0, log


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    text = (EXAMPLES / "kvplug-store.service").read_text()
    (tmp_path / "kvplug-store.service").write_text(text.replace("/opt/kvplug/bin/kvplug", sys.executable))
    for command in (["verify"], ["security", "--offline=true", "--threshold=30", "--no-pager"]):
        done = subprocess.run(
            ["systemd-analyze", *command, str(tmp_path / "kvplug-store.service")],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def test_the_commands_of_the_container_serve_and_check_a_store(
    run: Callable[..., Peer], tmp_path: Path
) -> None:
    port = free_port()
    program, *arguments = containerfile("ENTRYPOINT") + containerfile("CMD")
    assert program == "kvplug"
    _, *check = here(containerfile("HEALTHCHECK"), tmp_path, port)
    check.insert(0, sys.executable)
    with run(*here(arguments, tmp_path, port), KVPLUG_OPTIONS__HOST__SIZE="4 MiB"):
        waits.until(lambda: is_ready(port), START_S, "the store is ready")
        assert subprocess.run(check, timeout=60, check=False).returncode == 0
    assert subprocess.run(check, timeout=60, check=False, capture_output=True).returncode != 0


def test_what_the_values_for_helm_name_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = pytest.importorskip("yaml").safe_load((EXAMPLES / "values.yaml").read_text())
    (tmp_path / "secret").write_text("a secret of more than sixteen bytes")
    (tmp_path / "secret").chmod(0o440)
    registry = Registry.from_env()
    for name, pod in values.items():
        with monkeypatch.context() as patch:
            for each in pod["env"]:
                value = each.get("value", "").replace("/etc/kvplug", str(tmp_path))
                patch.setenv(each["name"], value.replace("$(POD_NAME)", name))
            resolved = ResolvedConfig(Config.load(), registry)
            options = resolved.options_of(registry.get(Kind.STORE, "host"))
            assert resolved.credentials.key, "the secret is read"
        assert {each["name"] for each in pod["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        assert pod["podSecurityContext"] == values["store"]["podSecurityContext"], "they share a user"
        if name == "store":
            limit = int(pod["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
            assert options.size + OVERHEAD <= limit
    store = values["store"]
    given = store_command.commands["serve"].make_context("serve", ["host", *store["args"]]).params
    ports = {store[f"{probe}Probe"]["httpGet"]["port"] for probe in ("startup", "liveness", "readiness")}
    assert ports == {given["health"].port}
    assert given["address"] == f"unix:{store['volumeMounts'][0]['mountPath']}/kv.sock"


def test_the_limit_of_the_unit_has_room_for_its_budget() -> None:
    (size,) = re.findall(r"options\.host\.size=([^\"]+)", unit()["ExecStart"])
    assert parse_bytes(size) + OVERHEAD <= int(unit()["MemoryMax"].removesuffix("G")) * GIB
