"""`kvplug store serve host`: a store in a program of its own, also in other namespaces, as in another pod."""

from __future__ import annotations

import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvplug_testing import waits

KVPLUG = (sys.executable, "-c", "from kvplug.cli.main import main; main()")
APART = ("--net", "--ipc", "--pid", "--fork", "--kill-child")
"""As containers of several pods: no abstract socket and no process of one is seen by another."""
USER = """
import logging
import sys
import torch  # before the other end waits for it: on a busy machine this takes many seconds
import kvplug
from kvplug.transport import PageBuffers, PageRequest, Series, foreign_key, opaque_format

what, address, seed = sys.argv[1:]
said = []
logging.getLogger("kvplug_host").addHandler(handler := logging.Handler("WARNING"))
handler.emit = lambda record: said.append(record.getMessage())
config = {"stores": ["host"], "host": address.replace("kv.sock", what + ".sock"),
          "timeout_s": 120, "options": {"host": {"contact": address}}}
store = kvplug.build_store(kvplug.Config.from_dict(config))
series = Series(opaque_format(100_000), b"", store.seal.id)
identities = [b"page %d" % number for number in range(4)]
memory = PageBuffers.empty(series.format, len(identities))
rows = memory.rows()
wanted = [bytes([int(seed) + number]) * 100_000 for number in range(len(identities))]
if what == "put":
    for number, page in enumerate(wanted):
        rows.row(number)[:] = page
pages = PageRequest(series=series, keys=[foreign_key(b"apart", each) for each in identities],
                    identities=identities, memory=memory)
results = (store.submit_put if what == "put" else store.submit_get)(pages).wait(120)
assert results == [None] * len(identities), results
if what == "get":
    assert [bytes(rows.row(number)) for number in range(len(identities))] == wanted
print("mapped" if store.route == "its memory is mapped" else store.route.partition(" to ")[0])
store.close()
assert not said, said
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


def run(*command: str, within: Sequence[str] = ()) -> str:
    """What it prints. It must succeed."""
    done = subprocess.run(
        [*within, *command], capture_output=True, text=True, timeout=8 * waits.patience_s, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def stats(address: str, within: Sequence[str] = ()) -> dict[str, object]:
    found = json.loads(run(*KVPLUG, "store", "stats", address, "--json", within=within))
    assert isinstance(found, dict)
    return found


def test_a_store_apart_says_what_it_holds_and_ends_politely(tmp_path: Path) -> None:
    path = tmp_path / "kv.sock"
    with served(f"unix:{path}") as program:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, "another user may connect"
        found = stats(f"unix:{path}")
        assert found == {
            "name": "host",
            "num_pages": 0,
            "used_bytes": 0,
            "budget_bytes": 4 << 20,
            "num_clients": 0,
        }
        assert "4 MiB" in run(*KVPLUG, "store", "stats", f"unix:{path}")
        program.send_signal(signal.SIGTERM)
        _, said = program.communicate(timeout=waits.patience_s)
        assert program.returncode == 0, said
        assert "listens" in said and "SIGTERM" in said
    assert not list(tmp_path.iterdir()), "a socket file was left"


def test_no_store_at_an_address_is_an_error_that_names_it(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/nothing.sock"
    done = subprocess.run(
        [*KVPLUG, "store", "stats", address, "--set=connect_timeout_s=1"],
        capture_output=True,
        text=True,
        timeout=waits.patience_s,
        check=False,
    )
    assert done.returncode == 1
    assert "nothing.sock" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("map_", "route"), [("true", "mapped"), ("false", "over a pipe")])
def test_pods_share_a_store_by_a_socket_path(tmp_path: Path, map_: str, route: str) -> None:
    """Each program has network, processes and shared memory of its own; they share one folder."""
    pod = unshared(*APART)
    address = f"unix:{tmp_path}/kv.sock"
    with served(address, f"options.host.map={map_}", "timeout_s=120", within=pod) as program:
        for what in ("put", "get"):
            assert run(sys.executable, "-c", USER, what, address, "65", within=pod).strip() == route
        found = stats(address, within=pod)
        assert found["num_pages"] == 4 and found["num_clients"] == 0
        children = Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split()
        os.kill(int(children[0]), signal.SIGTERM)
        _, said = program.communicate(timeout=waits.patience_s)
        assert program.returncode == 0, said
    assert not list(tmp_path.iterdir()), "a socket file was left"
