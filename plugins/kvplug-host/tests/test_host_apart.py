"""`kvplug store serve host`: a store in a program of its own, also in other namespaces, as in another pod."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

import kvplug
from host_programs import config
from kvplug.assembly import stores
from kvplug.assembly.resolve import ResolvedConfig
from kvplug.cli.store import store
from kvplug_lab.named_pages import NamedPages
from kvplug_testing import peers, waits
from kvplug_testing.forkserver import ForkServer

KVPLUG = (sys.executable, "-c", "from kvplug.cli.main import main; main()")
APART = ("--net", "--ipc", "--pid", "--fork", "--kill-child")
"""As containers of several pods: no abstract socket and no process of one is seen by another."""
USER = """
import sys
import torch  # before the other end waits for it: on a busy machine this takes many seconds
import kvplug
from kvplug_lab.named_pages import NamedPages

verb, address = sys.argv[1:]
config = {"stores": ["host"], "host": address.replace("kv.sock", verb + ".sock"),
          "timeout_s": 120, "options": {"host": {"contact": address}}}
with kvplug.build_store(kvplug.Config.from_dict(config)) as store:
    results = getattr(NamedPages(100_000), verb)(store, *"abcd")
    assert results == [None] * 4, results
    print("mapped" if store.route == "its memory is mapped" else store.route.partition(" to ")[0])
"""


def unshared(*flags: str) -> list[str]:
    """The command that runs another in namespaces of its own, or a skip with the reason."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare here")
    command = ["unshare", *flags]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=30, check=False)
    if tried.returncode:
        pytest.skip(f"namespaces cannot be made here: {tried.stderr.strip()}")
    return command


@contextmanager
def served(address: str, *options: str, within: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """A program that serves the store, once it listens."""
    command = [*within, *KVPLUG, "store", "serve", "host", "--address", address]
    command += [f"--set={option}" for option in ("options.host.size=4 MiB", *options)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        listens = program.stdout.readline().strip()
        if listens != address:
            program.kill()
            raise AssertionError(program.communicate()[1])
        yield program
    finally:
        program.kill()
        program.communicate()


def run(*command: str, within: Sequence[str]) -> str:
    """What it prints. It must succeed, without a word on stderr."""
    done = subprocess.run(
        [*within, *command], capture_output=True, text=True, timeout=8 * waits.patience_s, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return done.stdout


def stats(address: str, *more: str) -> Result:
    return CliRunner().invoke(store, ["stats", address, *more])


def holds(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(stats(f"unix:{path}", "--json").output)
    return found


def put(parent: peers.Parent, address: str) -> list[Any]:
    with kvplug.build_store(config(contact=address)) as store:
        return NamedPages(100_000).put(store, *"abcd")


def test_a_store_apart_says_what_it_holds_and_logs_each_step_and_ends_politely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    monkeypatch.setenv("KVPLUG_LOG", "json")
    path = tmp_path / "kv.sock"
    with served(f"unix:{path}") as program:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, "another user may connect"
        with fork_server.start(f"{__file__}:put", f"unix:{path}") as child:
            assert child.result() == [None] * 4
        waits.until(lambda: not holds(path)["num_clients"], what="the end of the program that put pages")
        found = holds(path)
        assert found.pop("used_bytes") >= 400_000
        assert found == {
            "name": "host",
            "medium": "host",
            "num_pages": 4,
            "budget_bytes": 4 << 20,
            "num_clients": 0,
        }
        assert "4 MiB" in stats(f"unix:{path}").output
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=waits.patience_s)
        assert program.returncode == 0, said
    lines = [json.loads(line) for line in said.splitlines()]
    theirs = [each for each in lines if re.search(rf"pid {child.pid}\b", each.get("peer", ""))]
    assert [each["event"] for each in theirs] == ["peer_connected", "agreed", "peer_left"], said
    first, (connected, agreed, _) = lines[0], theirs
    assert (first["event"], first["address"]) == ("listening", connected["address"])
    assert first["address"] == f"unix:{path}"
    assert agreed["purpose"] == "store" and agreed["transports"]["cpu"] in agreed["message"]
    assert "SIGTERM" in said
    assert not list(tmp_path.iterdir()), "a socket file was left"
    result = stats(f"unix:{path}", "--set=connect_timeout_s=1")
    assert result.exit_code == 1 and str(path) in str(result.exception)


def test_a_store_apart_has_loaded_its_pipes_before_it_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That imports torch: on a busy machine for half a minute, and the first program waits for 5 seconds."""
    loaded: list[bool] = []
    offers, open_server = ResolvedConfig.offers, stores.StoreServer

    def offer(resolved: ResolvedConfig, *, load: bool) -> Any:
        loaded.append(load)
        return offers(resolved, load=load)

    def serve(*given: Any, **more: Any) -> stores.StoreServer:
        assert loaded == [True], "the pipes are loaded while the first program waits"
        return open_server(*given, **more)

    monkeypatch.setattr(ResolvedConfig, "offers", offer)
    monkeypatch.setattr(stores, "StoreServer", serve)
    stores.serve_store(config(), address=f"unix:{tmp_path}/kv.sock").close()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("map_", "route"), [("true", "mapped"), ("false", "over a pipe")])
def test_pods_share_a_store_by_a_socket_path(tmp_path: Path, map_: str, route: str) -> None:
    """Each program has network, processes and shared memory of its own; they share one folder."""
    pod = unshared(*APART)
    address = f"unix:{tmp_path}/kv.sock"
    with served(address, f"options.host.map={map_}", "timeout_s=120", within=pod) as program:
        for verb in ("put", "got"):
            assert run(sys.executable, "-c", USER, verb, address, within=pod).strip() == route
        found = json.loads(run(*KVPLUG, "store", "stats", address, "--json", within=pod))
        assert found["num_pages"] == 4 and found["num_clients"] == 0
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        _, said = program.communicate(timeout=waits.patience_s)
        assert program.returncode == 0, said
    assert not list(tmp_path.iterdir()), "a socket file was left"
