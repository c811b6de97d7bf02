"""Pipe "cpu" and queue "shm" over TLS, between processes with one certificate authority."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from kvplug import Config, PeerGoneError, build_queue, connect_pipe, listen_pipe
from kvplug.transport import QueueEndpoint
from kvplug_testing import peers
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "encrypt-with-tls.md"
KEYS = ("tls_cert", "tls_key", "tls_ca")


def by_trustme(folder: Path) -> dict[str, Any]:
    ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
    leaf = ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    leaf.private_key_and_cert_chain_pem.write_to_path(folder / "both.pem")
    ca.cert_pem.write_to_path(folder / "ca.pem")
    names = "both.pem", "both.pem", "ca.pem"
    return {key: str(folder / name) for key, name in zip(KEYS, names, strict=True)}


def by_the_page(folder: Path) -> dict[str, Any]:
    """Run its commands for an authority and a host, here at 127.0.0.1, and read and check its file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    page = PAGE.read_text(encoding="utf-8").replace("10.0.0.5", "127.0.0.1")
    page = page.replace("/home/me/tls", str(folder)).replace("/home/me", str(folder))
    shown = re.findall(r"^ *```console\n(.*?)^ *```", page, re.M | re.S)
    commands = re.sub(r"^ *(\$ )?", "", "".join(shown), flags=re.M)
    subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True, timeout=60)
    (folder / "kvplug.secret").write_text("the secret of these tests")
    (folder / "kvplug.secret").chmod(0o600)
    (toml,) = re.findall(r"^ *```toml\n(.*?)^ *```", page, re.M | re.S)
    written = folder / "kvplug.toml"
    written.write_text(textwrap.dedent(toml))
    program = "from kvplug.cli.main import main; main()"
    check = [sys.executable, "-c", program, "config", "check", str(written)]
    done = subprocess.run(check, capture_output=True, text=True, check=False, timeout=60)
    assert "kvplug.toml: no faults" in done.stdout, done.stdout + done.stderr
    return tomllib.loads(written.read_text())


@pytest.fixture(scope="module", params=[by_trustme, by_the_page], ids=["trustme", "the page"])
def tls(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The keys of a config, by name."""
    made: dict[str, Any] = request.param(tmp_path_factory.mktemp("tls"))
    assert set(KEYS) <= set(made)
    return made


HERE = {"host": "127.0.0.1", "timeout_s": 20}


def config(tls: dict[str, Any]) -> Config:
    tcp = {"cpu": {"socket": "tcp"}}  # else it is a Unix socket: the peer is on this host
    return Config.from_dict({**HERE, "transport": "cpu", "options": tcp, **tls})


def without(tls: dict[str, Any]) -> dict[str, Any]:
    """The same config without its files."""
    return {key: value for key, value in tls.items() if key not in KEYS}


def relays() -> int:
    return sum(thread.name == "kvplug-relay" for thread in threading.enumerate())


def echoes(parent: peers.Parent, tls: dict[str, Any]) -> None:
    with listen_pipe(config(tls), "127.0.0.1:0") as server:
        parent.send(server.contact)
        pipe = server.accept()
        for _ in range(3):
            pipe.send_tensor(pipe.recv_tensor()).wait(20)
        pipe.recv_tensor()


@pytest.mark.full
def test_tensors_cross_a_pipe_over_tls_and_a_death_is_noticed(tls: dict[str, Any], fork_server) -> None:
    with fork_server.start(f"{__file__}:echoes", tls, timeout_s=50) as peer:
        pipe = connect_pipe(config(tls), peer.recv())
        assert relays() > 1, "the connections of the pipe have no TLS"
        for tensor in (torch.arange(5.0), torch.randn(3, 1 << 20), torch.empty(0, dtype=torch.int8)):
            sent = pipe.send_tensor(tensor)
            assert torch.equal(pipe.recv_tensor(timeout=20), tensor)
            sent.wait(20)
        waiting = Call(lambda: pipe.recv_tensor(timeout=20))
        peer.kill()
        waiting.raised(PeerGoneError, within=10)
        pipe.abort()


def queue(tls: dict[str, Any]) -> QueueEndpoint:
    """Of readers that the writer's memory does not reach."""
    return build_queue(Config.from_dict({**HERE, "queue": "shm", **tls}), local_reader_ranks=())


def reads(parent: peers.Parent, tls: dict[str, Any], handle: dict[str, Any]) -> bool:
    with queue(tls).create_from_handle(QueueEndpoint.Handle.from_plain(handle), 0) as reader:
        got = reader.dequeue()
        return relays() == 1 and torch.equal(got["kv"], torch.arange(1 << 20))


def test_a_queue_reaches_readers_over_tls_and_refuses_those_without_it(
    tls: dict[str, Any], fork_server: Any
) -> None:
    with queue(tls).create() as writer:
        handle = writer.export_handle()
        with pytest.raises(PermissionError, match=r"it uses TLS and this end does not|nor TLS"):
            queue(without(tls)).create_from_handle(handle, 0)
        with fork_server.start(f"{__file__}:reads", tls, handle.as_plain(), timeout_s=50) as reader:
            writer.enqueue({"kv": torch.arange(1 << 20)})
            assert reader.result(50)
