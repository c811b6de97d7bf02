"""Which peers a queue's port accepts, and what unauthenticated peers and lying readers and writers cause."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import shm_queue_ends as ends
import shm_remote_ends as remote
from kvplug import AuthenticationError, ConfigError, PeerGoneError, TransportError
from kvplug.errors import InsecureAddressError
from kvplug.net.trust.credentials import Secret
from kvplug.transport import Credentials, QueueEndpoint, WireError
from kvplug_shm.queue import reader_table
from kvplug_shm.queue.stream import HEADER, REPORT, FrameKind, header
from kvplug_testing.waits import until

queue, child = ends.queue, ends.child
NETWORK, SECRET = remote.NETWORK, ends.SECRET
MIB = 1 << 20


@pytest.fixture
def writer(queue: Any) -> Any:
    return queue(2, attached=0, **NETWORK)[0]


def joined(handle: QueueEndpoint.Handle, rank: int = 0, credentials: Credentials = SECRET) -> Any:
    return ends.endpoint(**NETWORK, credentials=credentials).create_from_handle(handle, rank)


def has_come(writer: Any, rank: int = 0) -> bool:
    return "not come" not in writer.readers[rank].process


def goes_on(writer: Any) -> None:
    """The writer still serves a reader that may come."""
    with joined(writer.export_handle(), 1) as reader:
        writer.enqueue("still there")
        while reader.dequeue() != "still there":  # what was sent before it came, too
            pass


# -- authentication ------------------------------------------------------------------------------------


def test_a_reader_needs_the_secret_of_the_writer(writer: Any) -> None:
    handle = writer.export_handle()
    with pytest.raises(AuthenticationError, match="the secrets differ"):
        joined(handle, 0, Credentials(Secret("not the secret of these tests")))
    with pytest.raises(InsecureAddressError):
        joined(handle, 0, Credentials())
    assert not has_come(writer)
    goes_on(writer)


def test_the_network_needs_a_secret(queue: Any) -> None:
    with pytest.raises(InsecureAddressError):
        queue(credentials=Credentials(), **NETWORK)


def test_on_one_host_a_unix_socket_needs_no_secret(queue: Any) -> None:
    writer, (reader,) = queue(host="unix:@kvplug", credentials=Credentials(), **NETWORK)
    writer.enqueue("here")
    assert reader.dequeue() == "here"


def test_a_handle_of_an_earlier_queue_does_not_lead_to_a_later_one(writer: Any) -> None:
    handle = writer.export_handle()
    earlier = remote.with_contact(handle, handle.data["remote_contact"], queue="an earlier one")
    with pytest.raises(PeerGoneError, match="another queue listens"):
        joined(earlier)
    assert not has_come(writer)
    goes_on(writer)


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1")])
def test_it_listens_at_the_configured_address_only(queue: Any, host: str, other: str) -> None:
    """The root cause of CVE-2025-30202: a socket of the queue that listens on every interface."""
    writer, _ = queue(attached=0, host=host, **NETWORK)
    there = remote.address_of(writer.export_handle())
    assert there[0] == host
    socket.create_connection(there).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, there[1]))


# -- unauthenticated peers, and readers and writers that have the secret ----------------------------------


def test_whatever_bytes_a_stranger_sends_the_writer_goes_on(writer: Any) -> None:
    rng = random.Random(7)
    for nbytes in (0, 1, 100, 10_000):
        with (
            socket.create_connection(remote.address_of(writer.export_handle())) as stranger,
            contextlib.suppress(OSError),
        ):
            stranger.sendall(rng.randbytes(nbytes))
            stranger.settimeout(0.2)
            stranger.recv(4096)
    assert not has_come(writer)
    goes_on(writer)


@pytest.mark.parametrize(
    "message",
    [b"\xff" * 100, REPORT.pack(0, 0, 5), REPORT.pack(0, 5, 0), REPORT.pack(128, 0, 0), bytes(7) + b"\1"],
)
def test_a_reader_that_sends_nonsense_is_evicted_and_the_others_go_on(writer: Any, message: bytes) -> None:
    with contextlib.closing(remote.insider(writer.export_handle())) as insider:
        insider.sock.sendall(message)
        if len(message) < REPORT.size:
            insider.sock.shutdown(socket.SHUT_RDWR)
        until(lambda: writer.readers[0].gone)
    gone = "it sent an invalid report" if len(message) >= REPORT.size else "its connection ended"
    assert writer.readers[0].gone.startswith(gone) and writer.readers[0].died
    goes_on(writer)


def test_an_evicted_reader_gets_no_bytes_of_later_messages(
    queue: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer may fill the memory again from which it was sending."""
    mixed: dict[str, Any] = {"local_reader_ranks": (1,), "host": "127.0.0.1", "credentials": SECRET}
    writer, _ = queue(2, attached=0, max_chunks=2, max_chunk_bytes=32 * MIB, **mixed)
    local = ends.endpoint(**mixed).create_from_handle(writer.export_handle(), 1)
    came = bytearray()

    def overwrite_and_read(_: logging.LogRecord) -> bool:
        for _ in range(4):
            writer.enqueue(b"B" * 31 * MIB)
            local.dequeue()
        with contextlib.suppress(OSError):
            while part := insider.sock.recv(MIB):
                came.extend(part)
        return True

    with contextlib.closing(remote.insider(writer.export_handle())) as insider, local:
        insider.sock.settimeout(2)
        writer.enqueue(b"A" * 31 * MIB)  # more than the sockets hold
        local.dequeue()
        monkeypatch.setattr(reader_table.logger, "filters", [overwrite_and_read])
        insider.sock.sendall(b"\xff" * REPORT.size)
        until(lambda: came and insider.sock.recv(1) == b"")
    assert b"A" * MIB in came and b"BB" not in came


def test_a_reader_that_accepts_less_than_the_writer_sends_does_not_join(writer: Any) -> None:
    smaller = ends.endpoint(**NETWORK, options={"max_message_bytes": MIB})
    with pytest.raises(ConfigError, match="max_message_bytes: "):
        smaller.create_from_handle(writer.export_handle(), 0)
    goes_on(writer)


@pytest.fixture
def liar() -> Iterator[remote.LyingWriter]:
    made = remote.LyingWriter()
    yield made
    made.close()


ALIVE = header(FrameKind.ALIVE, 0)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        (header(FrameKind.MESSAGE, 1, True, 0, 2**63), "at most"),
        (header(FrameKind.MESSAGE, 1, True, 2**63, 2**63), "at most"),
        (header(FrameKind.OVER, 1, False, 2**20), "does not belong to a queue"),
        (b"\xff" * HEADER.size, "does not belong to a queue"),
        (header(FrameKind.MESSAGE, 0, True), "message 1 of 0"),
        (header(FrameKind.OVER, 3, False, 4) + b"why\x1b", r"evicted this reader \(why.\): 3 of 3 messages"),
    ],
)
def test_an_impossible_frame_is_an_error_of_the_reader_and_takes_no_memory(
    liar: remote.LyingWriter, lie: bytes, text: str
) -> None:
    with contextlib.closing(liar.reader(lambda: joined(liar.handle), ALIVE)) as reader:
        liar.say(lie)
        for _ in range(2):
            with pytest.raises((TransportError, WireError), match=text):
                reader.dequeue(timeout=10)


def test_a_writer_cannot_send_more_messages_than_the_queue_has_room_for(liar: remote.LyingWriter) -> None:
    with contextlib.closing(liar.reader(lambda: joined(liar.handle), ALIVE)) as reader:
        liar.say(header(FrameKind.MESSAGE, 9, True) * 5)
        liar.wait_for_hang_up()
        for _ in range(4):
            with reader.acquire_read(timeout=10):
                pass
        with pytest.raises(WireError, match="room for 4"):
            reader.dequeue(timeout=10)


def test_a_connection_that_ends_within_a_message_says_how_many_are_lost(liar: remote.LyingWriter) -> None:
    with contextlib.closing(liar.reader(lambda: joined(liar.handle), ALIVE)) as reader:
        liar.say(header(FrameKind.MESSAGE, 2, True, 0, MIB) + bytes(1000))
        liar.close()
        with pytest.raises(TransportError, match="at least 2 after them are lost"):
            reader.dequeue(timeout=10)


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_pickle_from_the_writer_is_not_executed(
    liar: remote.LyingWriter, where: str, tmp_path: Any
) -> None:
    """The root cause of CVE-2025-30165 and CVE-2024-11041: bytes from a socket are unpickled."""
    payload = ends.evil(tmp_path / "made")
    head, body = (payload, b"") if where == "head" else (b"\xc0", payload)
    with contextlib.closing(liar.reader(lambda: joined(liar.handle), ALIVE)) as reader:
        liar.say(header(FrameKind.MESSAGE, 1, False, len(head), len(body)) + head + body)
        with pytest.raises(WireError):
            reader.dequeue(timeout=10)
    assert not list(tmp_path.iterdir())
