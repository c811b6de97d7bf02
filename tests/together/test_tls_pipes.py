"""Pipe "cpu", lookup buffer and queue "shm" over TLS, between processes with one certificate authority."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import trustme

from kvplug import (
    AuthenticationError,
    Config,
    PeerGoneError,
    build_lookup,
    build_queue,
    connect_pipe,
    listen_pipe,
)
from kvplug.transport import QueueEndpoint, QueueHandle
from kvplug_testing import peers
from kvplug_testing.waits import Call

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Any]:
    """The keys of a config, by name."""
    ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
    leaf = ca.issue_cert("127.0.0.1", key_type=trustme.KeyType.ECDSA)
    leaf.private_key_and_cert_chain_pem.write_to_path(tmp_path / "both.pem")
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    files = {"tls_cert": "both.pem", "tls_key": "both.pem", "tls_ca": "ca.pem"}
    return {key: str(tmp_path / name) for key, name in files.items()}


def config(tls: dict[str, Any]) -> Config:
    tcp = {"cpu": {"socket": "tcp"}}  # else it is a Unix socket: the peer is on this host
    return Config.from_dict(
        {"transport": "cpu", "lookup_buffer": "simple", "timeout_s": 20, "options": tcp, **tls}
    )


def relays() -> int:
    return sum(thread.name == "kvplug-relay" for thread in threading.enumerate())


def echoes(parent: peers.Parent, tls: dict[str, Any]) -> None:
    with listen_pipe(config(tls), "127.0.0.1:0") as server:
        parent.send(server.contact)
        pipe = server.accept()
        for _ in range(3):
            pipe.send_tensor(pipe.recv_tensor()).wait(20)
        pipe.recv_tensor()


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


def holds(parent: peers.Parent, tls: dict[str, Any]) -> None:
    with listen_pipe(config(tls), "127.0.0.1:0") as server:
        parent.send(server.contact)
        store = build_lookup(config(tls)).hold()
        key = torch.arange(48.0).reshape(2, 3, 1, 8)
        store.insert([1, 2, 3], None, key, -key, None)
        store.attach(server.accept(), server.accept())
        parent.recv()
        store.close()


def test_a_lookup_buffer_is_read_over_tls(tls: dict[str, Any], fork_server) -> None:
    with fork_server.start(f"{__file__}:holds", tls, timeout_s=50) as holder:
        contact = holder.recv()
        pipes = [connect_pipe(config(tls), contact) for _ in range(2)]
        buffer = build_lookup(config(tls)).reach(*pipes)
        found = buffer.select([1, 2, 3, 4])
        assert found.tokens.tolist() == [1, 2, 3]
        assert torch.equal(found.value, -torch.arange(48.0).reshape(2, 3, 1, 8))
        buffer.close()
        holder.send("done")


def test_a_config_without_tls_is_refused_by_name(tls: dict[str, Any]) -> None:
    with (
        listen_pipe(config(tls), "127.0.0.1:0") as server,
        pytest.raises(AuthenticationError, match="set tls_cert, tls_key and tls_ca"),
    ):
        connect_pipe(config({}), server.contact)


def queue(tls: dict[str, Any]) -> QueueEndpoint:
    """Of readers that the writer's memory does not reach."""
    return build_queue(Config.from_dict({"queue": "shm", "timeout_s": 20, **tls}), local_reader_ranks=())


def reads(parent: peers.Parent, tls: dict[str, Any], handle: dict[str, Any]) -> bool:
    with queue(tls).create_from_handle(QueueHandle.from_plain(handle), 0) as reader:
        got = reader.dequeue()
        return relays() == 2 and torch.equal(got["kv"], torch.arange(1 << 20))


def test_a_queue_reaches_readers_over_tls_and_refuses_those_without_it(
    tls: dict[str, Any], fork_server: Any
) -> None:
    with queue(tls).create() as writer:
        handle = writer.export_handle()
        with pytest.raises(AuthenticationError, match="it uses TLS and this end does not"):
            queue({}).create_from_handle(handle, 0)
        with fork_server.start(f"{__file__}:reads", tls, handle.as_plain(), timeout_s=50) as reader:
            writer.enqueue({"kv": torch.arange(1 << 20)})
            assert reader.result(50)
    with (
        queue({}).create() as writer,
        pytest.raises(AuthenticationError, match="set tls_cert, tls_key and tls_ca on both ends"),
    ):
        queue(tls).create_from_handle(writer.export_handle(), 0)
