"""Which way a reader of the queue "shm" takes, memory or the network, and both in one queue."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from kvplug import CapacityError, ConfigError, TimeoutError, TransportError
from kvplug.transport import (
    Credentials,
    InsecureAddressError,
    MessageQueue,
    QueueContext,
    QueueHandle,
    Secret,
    WireError,
)
from kvplug_shm.options import ShmQueueOptions
from kvplug_shm.queue.endpoint import ShmQueueEndpoint
from kvplug_shm.queue.network import QueueMessage
from kvplug_shm.queue.remote_reader import RemoteReader

SECRET = Credentials(Secret("a secret that these tests share"))


@pytest.fixture
def endpoint() -> Iterator[Any]:
    made: list[MessageQueue] = []

    class Endpoint(ShmQueueEndpoint):
        def create(self, *args: Any) -> Any:
            made.append(super().create(*args))
            return made[-1]

        def create_from_handle(self, *args: Any) -> Any:
            made.append(super().create_from_handle(*args))
            return made[-1]

    def make(credentials: Credentials | None = None, **given: Any) -> Endpoint:
        usual: dict[str, Any] = {"options": ShmQueueOptions(), "n_reader": 2, "max_chunk_bytes": 1 << 16}
        return Endpoint(
            QueueContext(credentials=credentials or Credentials(), **{"max_chunks": 4, **usual, **given})
        )

    yield make
    for each in made:
        each.abort()


def is_remote(reader: Any) -> bool:
    return isinstance(reader._source, RemoteReader)


def elsewhere(handle: QueueHandle) -> QueueHandle:
    """As it looks from another host."""
    return attrs.evolve(handle, data={**handle.data, "domain": "another host"})


def test_readers_in_memory_and_on_the_network_are_readers_of_one_queue(endpoint: Any) -> None:
    end = endpoint(local_reader_ranks=(0,))
    writer = end.create()
    handle = QueueHandle.from_plain(writer.export_handle().as_plain())
    assert handle.local_reader_ranks == (0,)
    local, remote = (end.create_from_handle(handle, rank) for rank in range(2))
    assert (is_remote(local), is_remote(remote)) == (False, True)
    value = {"kv": torch.randn(300_000), "step": 7}
    for _ in range(10):
        writer.enqueue(value)
        with writer.acquire_write(5) as chunk:
            chunk[:] = b"bytes"
        for reader in (local, remote):
            got = reader.dequeue()
            assert torch.equal(got["kv"], value["kv"]) and got["step"] == 7
            with reader.acquire_read() as view:
                assert view == b"bytes"
    for number in range(4):
        writer.enqueue(number)
        assert local.dequeue() == number
    with pytest.raises(TimeoutError, match=rf"rank 1 \(pid {os.getpid()}\), 4 messages behind") as waited:
        writer.enqueue("no room", timeout=0.2)
    assert "rank 0" not in str(waited.value)
    remote.close()
    writer.enqueue("room")
    assert local.dequeue() == "room"
    assert [each.gone for each in writer.readers] == ["", "has left"]


def test_on_loopback_there_is_no_network_where_nobody_is_placed_on_it(endpoint: Any) -> None:
    end = endpoint()
    handle = end.create().export_handle()
    assert handle.data["network"] is None
    with pytest.raises(TransportError, match="listens on no network"):
        end.create_from_handle(elsewhere(handle), 0)
    with pytest.raises(ConfigError, match="TCP"):
        endpoint(host="unix:", local_reader_ranks=()).create()


def test_where_nothing_is_said_memory_is_taken_if_it_reaches_and_the_network_if_not(endpoint: Any) -> None:
    with pytest.raises(InsecureAddressError):
        endpoint(host="0.0.0.0").create()
    end = endpoint(SECRET, host="0.0.0.0")
    writer = end.create()
    handle = writer.export_handle()
    assert handle.local_reader_ranks == (0, 1)
    local, remote = end.create_from_handle(handle, 0), end.create_from_handle(elsewhere(handle), 1)
    assert (is_remote(local), is_remote(remote)) == (False, True)
    writer.enqueue("both")
    assert [local.dequeue(), remote.dequeue()] == ["both", "both"]


def test_a_rank_that_came_by_one_way_does_not_come_by_the_other(endpoint: Any) -> None:
    end = endpoint(SECRET, host="0.0.0.0")
    handle = end.create().export_handle()
    end.create_from_handle(handle, 0)
    end.create_from_handle(elsewhere(handle), 1)
    for again, rank in ((handle, 1), (elsewhere(handle), 0)):
        with pytest.raises(ConfigError, match="attached"):
            end.create_from_handle(again, rank)


def test_a_message_beyond_the_limit_is_refused_by_the_writer(endpoint: Any) -> None:
    end = endpoint(n_reader=1, local_reader_ranks=(), options=ShmQueueOptions(max_message_bytes=1 << 20))
    writer = end.create()
    reader = end.create_from_handle(writer.export_handle(), 0)
    with pytest.raises(CapacityError):
        writer.enqueue(bytes((1 << 20) + 1))
    writer.enqueue(bytes(1 << 19))
    assert reader.dequeue() == bytes(1 << 19)


def evil(path: Path) -> bytes:
    """A protocol-0 pickle, written by hand: ``builtins.open(path, "w")``."""
    return f"cbuiltins\nopen\n(V{path}\nVw\ntR.".encode()


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_writer_that_sends_a_pickle_gets_nothing_run(
    endpoint: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root cause of CVE-2025-30165 and CVE-2024-11041: what came from a socket is unpickled."""
    end = endpoint(n_reader=1, local_reader_ranks=())
    writer = end.create()
    reader = end.create_from_handle(writer.export_handle(), 0)
    payload = evil(tmp_path / "made")
    head, body = (payload, b"") if where == "head" else (b"\xc0", payload)
    monkeypatch.setattr(
        type(writer._network._feed),
        "message",
        lambda self, number: QueueMessage(False, head, memoryview(body)),
    )
    writer.enqueue("anything")
    with pytest.raises(WireError):
        reader.dequeue(timeout=10)
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_nothing_of_the_network_is_imported_before_it_is_needed() -> None:
    where = "kvplug_shm.queue.endpoint"
    program = f"import sys, {where}; sys.exit('zmq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0


def test_the_writer_is_named_by_process_and_address(endpoint: Any) -> None:
    end = endpoint(n_reader=1, local_reader_ranks=())
    writer = end.create()
    reader = end.create_from_handle(writer.export_handle(), 0)
    with pytest.raises(TimeoutError) as waited:
        reader.dequeue(timeout=0.1)
    assert re.search(rf"the writer \(pid {os.getpid()} at 127\.0\.0\.1:\d+\)", str(waited.value))
