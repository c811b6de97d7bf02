"""Readers of the queue "shm" in memory and on the network: in one queue, slow, stopped, dead or cut off."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import shm_queue_ends as ends
import shm_remote_ends as remote
from kvplug import ConfigError, PeerGoneError, TimeoutError, TransportError
from kvplug.transport import InsecureAddressError, PeerIdentity, QueueHandle, WireError
from kvplug_shm.queue import reader_link, remote_writer
from kvplug_shm.queue.network import QueueMessage
from kvplug_shm.queue.reader_table import ReaderTable
from kvplug_shm.queue.remote_frames import PIECE_BYTES
from kvplug_testing.contract.forked_child import held, in_forked_child, more_than
from kvplug_testing.waits import Call, until

queue, child = ends.queue, ends.child
NETWORK, SECRET = remote.NETWORK, remote.SECRET


def elsewhere(handle: QueueHandle) -> QueueHandle:
    """As it looks from another host."""
    return attrs.evolve(handle, data={**handle.data, "domain": "another host"})


# -- which way -------------------------------------------------------------------------------------------


def test_readers_in_memory_and_on_the_network_are_readers_of_one_queue(queue: Any) -> None:
    writer, (local, far) = queue(2, local_reader_ranks=(0,))
    assert QueueHandle.from_plain(writer.export_handle().as_plain()).local_reader_ranks == (0,)
    ready = [Call(end.wait_until_ready) for end in (writer, local, far)]
    assert [each.outcome() for each in ready] == [None] * 3
    for reader, address in ((local, ""), (far, r" at 127\.0\.0\.1:\d+")):
        with pytest.raises(TimeoutError) as waited:
            reader.dequeue(timeout=0.05)
        assert re.search(rf"the writer \(pid {os.getpid()}{address}\)", str(waited.value))
    value = {"kv": torch.randn(3 * PIECE_BYTES // 4 + 17), "step": 7}
    for _ in range(10):
        writer.enqueue(value)
        with writer.acquire_write(5) as chunk:
            chunk[:] = b"bytes"
        for reader in (local, far):
            got = reader.dequeue()
            assert torch.equal(got["kv"], value["kv"]) and got["step"] == 7
            with reader.acquire_read() as view:
                assert view == b"bytes"
    for number in range(ends.CHUNKS):
        writer.enqueue(number)
        assert local.dequeue() == number
    with pytest.raises(TimeoutError, match=rf"rank 1 \(pid {os.getpid()}\), 4 messages behind") as waited:
        writer.enqueue("no room", timeout=0.2)
    assert "rank 0" not in str(waited.value)
    far.close()
    writer.enqueue("room")
    assert local.dequeue() == "room"
    assert [each.gone for each in writer.readers] == ["", "has left"]


def test_on_loopback_there_is_no_network_where_nobody_is_placed_on_it(queue: Any) -> None:
    writer, _ = queue(attached=0)
    handle = writer.export_handle()
    assert handle.data["network"] is None
    with pytest.raises(TransportError, match="listens on no network"):
        ends.endpoint().create_from_handle(elsewhere(handle), 0)
    with pytest.raises(ConfigError, match="TCP"):
        queue(host="unix:", **NETWORK)


def test_where_nothing_is_said_memory_is_taken_if_it_reaches_and_the_network_if_not(queue: Any) -> None:
    with pytest.raises(InsecureAddressError):
        queue(host="0.0.0.0")
    writer, (local,) = queue(2, attached=1, host="0.0.0.0", credentials=SECRET)
    handle, end = writer.export_handle(), ends.endpoint(host="0.0.0.0", credentials=SECRET)
    assert handle.local_reader_ranks == (0, 1)
    with end.create_from_handle(elsewhere(handle), 1) as far:
        writer.enqueue("both")
        assert [local.dequeue(), far.dequeue()] == ["both", "both"]
        for again, rank in ((handle, 1), (elsewhere(handle), 0)):
            with pytest.raises(ConfigError, match="attached"):
                end.create_from_handle(again, rank)


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_writer_that_sends_a_pickle_gets_nothing_run(
    queue: Any, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The root cause of CVE-2025-30165 and CVE-2024-11041: what came from a socket is unpickled."""
    writer, (reader,) = queue(**NETWORK)
    payload = ends.evil(tmp_path / "made")
    head, body = (payload, b"") if where == "head" else (b"\xc0", payload)
    monkeypatch.setattr(ReaderTable, "message", lambda *_: QueueMessage(False, head, memoryview(body)))
    writer.enqueue("anything")
    with pytest.raises(WireError):
        reader.dequeue(timeout=10)
    assert not list(tmp_path.iterdir())


# -- what arrives ----------------------------------------------------------------------------------------


def anonymous_bytes() -> int:
    """Private memory of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"RssAnon:\s+(\d+) kB", status)[1]) << 10  # type: ignore[index]


def test_a_reader_that_is_stopped_holds_the_writer_up_once_and_costs_bounded_memory(
    queue: Any, child: Any
) -> None:
    writer, _ = queue(attached=0, max_chunks=100, max_chunk_bytes=PIECE_BYTES, **NETWORK)
    reader = child("read_until_the_end", writer.export_handle(), **NETWORK)
    reader.stop()
    before, began = anonymous_bytes(), time.monotonic()
    for _ in range(100):
        writer.enqueue(bytes(PIECE_BYTES))
    assert time.monotonic() - began < ends.PATIENCE_S
    assert anonymous_bytes() - before < 40 * PIECE_BYTES
    reader.cont()
    reader.send("read")
    until(lambda: writer.readers[0].lag == 0)
    writer.close()
    *messages, end = reader.result()
    assert messages == [PIECE_BYTES] * 100 and end.startswith("PeerGoneError")


def test_a_stopped_reader_is_not_waited_for_beyond_the_callers_deadline(
    queue: Any, child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_writer, "ARRIVAL_S", 1000.0)
    writer, _ = queue(attached=0, **NETWORK)
    reader = child("sit", writer.export_handle(), **NETWORK)
    reader.stop()
    Call(lambda: writer.enqueue("late", timeout=0.1)).end()
    assert not writer.readers[0].gone
    reader.kill()


def test_what_a_writer_said_last_is_read_by_a_reader_that_looks_after_the_connection_has_ended(
    queue: Any, child: Any
) -> None:
    writer, _ = queue(attached=0, **NETWORK)
    reader = child("read_until_the_end", writer.export_handle(), **NETWORK)
    writer.enqueue("first")
    reader.stop()
    writer.close()
    reader.cont()
    reader.send("read")
    first, end = reader.result()
    assert first == "first" and "has closed, and everything of it was received" in end


# -- ends that leave, die or fall silent -----------------------------------------------------------------


def test_a_reader_that_closes_and_exits_at_once_has_left_and_one_that_is_killed_has_not(
    queue: Any, child: Any
) -> None:
    writer, (local,) = queue(3, attached=1, local_reader_ranks=(0,))
    leaves, dies = (
        child(what, writer.export_handle(), rank=rank, **NETWORK)
        for rank, what in ((1, "read_one"), (2, "sit"))
    )
    writer.enqueue("first")
    assert leaves.result() == local.dequeue() == "first"
    until(lambda: writer.readers[1].gone)
    dies.kill()
    until(lambda: writer.readers[2].gone)
    _, left, died = writer.readers
    assert (left.gone, left.died, died.died) == ("has left", False, True)
    assert died.process == f"pid {dies.pid}" and re.fullmatch("its (process|connection) ended", died.gone)
    for number in range(2 * ends.CHUNKS):
        writer.enqueue(number)
        assert local.dequeue() == number


@pytest.fixture(params=["it cannot be seen", "no descriptor is left", "no thread is left"])
def unwatched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No end of this process can watch the other end's process."""

    def fail(**_: Any) -> None:
        raise OSError(errno.EMFILE, "no descriptors") if "descriptor" in request.param else RuntimeError("no")

    if "seen" in request.param:
        monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    else:
        monkeypatch.setattr(reader_link, "watch", fail)


@pytest.mark.usefixtures("unwatched")
def test_a_silent_reader_that_is_not_watched_is_evicted_and_learns_what_it_lost(
    queue: Any, child: Any
) -> None:
    """The more impatient of the two ends decides how often both send something."""
    writer, _ = queue(attached=0, heartbeat_timeout_s=1.0, **NETWORK)
    reader = child("read_until_the_end", writer.export_handle(), heartbeat_timeout_s=60.0, **NETWORK)
    time.sleep(2.0)
    assert not writer.readers[0].gone, "heartbeats did not keep it alive"
    writer.enqueue("arrived")
    reader.stop()
    until(lambda: writer.readers[0].gone)
    assert writer.readers[0].gone.startswith("silent for") and writer.readers[0].died
    reader.cont()
    reader.send("read")
    first, end = reader.result()
    assert first == "arrived"
    assert end.startswith("TransportError") and "has evicted this reader (silent for" in end
    assert "0 of 1 messages are lost to reader rank 0, and all that come later" in end


def test_a_silent_writer_that_cannot_be_watched_is_gone(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PeerIdentity, "open_pidfd", lambda self: None)
    writer = child("write", None, 1, heartbeat_timeout_s=60.0, **NETWORK)
    end = ends.endpoint(heartbeat_timeout_s=0.5, **NETWORK)
    with end.create_from_handle(QueueHandle.from_plain(writer.recv()), 0) as reader:
        with pytest.raises(TimeoutError):
            reader.dequeue(timeout=1.5)  # heartbeats keep it alive
        writer.stop()
        with pytest.raises(PeerGoneError, match="silent"):
            reader.dequeue()
    writer.cont()


def test_a_connection_that_breaks_is_not_made_again_in_silence(queue: Any) -> None:
    writer, _ = queue(attached=0, **NETWORK)
    with remote.Wire(writer.export_handle()) as wire:
        reader = ends.endpoint(**NETWORK).create_from_handle(wire.handle, 0)
        writer.enqueue("before")
        wire.cut()
        assert reader.dequeue() == "before"
        with pytest.raises(PeerGoneError, match="the connection ended after 1 messages"):
            reader.dequeue()
        until(lambda: writer.readers[0].gone)
        assert (writer.readers[0].gone, writer.readers[0].died) == ("its connection ended", True)
        reader.abort()


def test_a_handler_may_abort_the_queue_while_its_thread_is_woken(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal's, which runs within whatever its thread does."""
    writer, _ = queue(**NETWORK)
    wake, struck, here = os.eventfd_write, [], []

    def interrupted(fd: int, value: int) -> None:
        if here == [threading.get_ident()] and not struck:
            struck.append(True)
            writer.abort()
        wake(fd, value)

    def enqueue() -> None:
        here.append(threading.get_ident())
        writer.enqueue("value")

    monkeypatch.setattr(os, "eventfd_write", interrupted)
    Call(enqueue).end()
    assert struck and writer.closed


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_keeps_the_programs_own_descriptors_and_none_of_zeromqs(queue: Any) -> None:
    before = in_forked_child(held)
    writer, (reader,) = queue(**NETWORK)
    host, _, number = str(writer.export_handle().data["network"]["address"]).rpartition(":")
    elsewhere = ("127.0.0.2", int(number))  # another address with the same number
    with contextlib.ExitStack() as stack:
        datagrams = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        datagrams.bind((host, int(number)))
        listening = stack.enter_context(socket.create_server(elsewhere))
        connected = stack.enter_context(socket.create_connection(elsewhere))
        event = os.eventfd(0)
        stack.callback(os.close, event)
        polling = stack.enter_context(select.epoll())
        polling.register(event)
        own = {each.fileno() for each in (datagrams, listening, connected, polling)} | {event}
        kept = more_than(before).split(", ")
        assert {int(line.partition(" ")[0]) for line in kept} == own, kept
    writer.enqueue("still there")
    assert reader.dequeue() == "still there"
