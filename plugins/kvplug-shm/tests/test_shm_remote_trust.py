"""Who gets in over the network half of a queue, and what strangers, readers and writers that lie can do."""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

import shm_queue_ends as ends
import shm_remote_ends as remote
from kvplug import AuthenticationError, TransportError
from kvplug.errors import InsecureAddressError
from kvplug.net.trust.credentials import Secret
from kvplug.transport import Credentials, Deadline, QueueHandle, WireError
from kvplug_shm.queue import remote_frames as frames
from kvplug_shm.queue.remote_contact import RemoteContact, new_contact
from kvplug_shm.queue.remote_dialling import connect, dial_writer, use_keys
from kvplug_shm.queue.remote_door import FrontDoor
from kvplug_shm.queue.remote_frames import QueueFrameKind
from kvplug_shm.queue.remote_keys import Keys
from kvplug_testing.waits import Call, until

queue, child = ends.queue, ends.child
NETWORK, SECRET, with_network = remote.NETWORK, ends.SECRET, remote.with_network
MIB = 1 << 20
WHO = {
    "boot_id": "another host",
    "pid_ns": "",
    "net_ns": "",
    "pid": 77,
    "start_time": 0,
    "host": "example",
    "label": "",
}


@pytest.fixture
def writer(queue: Any) -> Any:
    return queue(2, attached=0, **NETWORK)[0]


def joined(handle: QueueHandle, rank: int = 0, credentials: Credentials = SECRET) -> Any:
    return ends.endpoint(**NETWORK, credentials=credentials).create_from_handle(handle, rank)


def contact_of(handle: QueueHandle) -> RemoteContact:
    return RemoteContact.from_plain(handle.data["network"])


def has_come(writer: Any, rank: int = 0) -> bool:
    return "not come" not in writer.readers[rank].process


def goes_on(writer: Any) -> None:
    """The writer still serves a reader that may come."""
    with joined(writer.export_handle(), 1) as reader:
        writer.enqueue("still there")
        while reader.dequeue() != "still there":  # what was sent before it came, too
            pass


# -- secrets -------------------------------------------------------------------------------------------


def test_the_same_secret_gets_in_and_another_or_none_does_not(writer: Any, queue: Any) -> None:
    handle = writer.export_handle()
    with pytest.raises(AuthenticationError, match="the secrets differ"):
        joined(handle, 0, Credentials(Secret("not the secret of these tests")))
    with pytest.raises(AuthenticationError, match="has a secret and this end has none"):
        joined(handle, 0, Credentials())
    with pytest.raises(AuthenticationError, match="this end has a secret and the writer"):
        joined(with_network(handle, token="ab" * 32))
    assert not has_come(writer)
    goes_on(writer)


def test_the_network_needs_a_secret(queue: Any) -> None:
    with pytest.raises(InsecureAddressError):
        queue(credentials=Credentials(), **NETWORK)
    handle = queue(attached=0, **NETWORK)[0].export_handle()
    with pytest.raises(InsecureAddressError):
        joined(with_network(handle, token="ab" * 32), 0, Credentials())


def test_every_role_has_a_key_of_its_own() -> None:
    keys = [Keys(shared, salt) for shared in (b"a" * 16, b"b" * 16) for salt in (b"0" * 16, b"1" * 16)]
    pairs = [pair for each in keys for pair in (each.writer, *map(each.reader, range(3)))]
    assert len({pair.secret for pair in pairs}) == len({pair.public for pair in pairs}) == 16
    assert Keys(b"a" * 16, b"0" * 16).reader(2).secret == keys[0].reader(2).secret
    assert zmq.curve_public(pairs[0].secret) == pairs[0].public and len(pairs[0].raw_public) == 32


# -- strangers -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def dealer(writer: Any, ours: Any = None) -> Iterator[Any]:
    """A bare socket of ZeroMQ behind the front door, which the secret opens."""
    contact = contact_of(writer.export_handle())
    with zmq.Context() as where, where.socket(zmq.DEALER) as made:
        made.linger = 0
        use_keys(made, contact.keys(SECRET), 0)
        if ours is not None:
            made.curve_publickey, made.curve_secretkey = ours
        relay = connect(made, dial_writer(contact, SECRET, Deadline.after(ends.PATIENCE_S)))
        yield made
        relay.abort()


def joining() -> bytes:
    """What a reader says first."""
    return frames.plain(QueueFrameKind.JOIN, {"version": frames.VERSION, "who": WHO, "patience_s": 10.0})


def test_a_client_with_a_key_of_its_own_is_not_heard(writer: Any) -> None:
    with dealer(writer, ours=zmq.curve_keypair()) as forged:
        forged.send(joining())
        assert not forged.poll(500)
    assert not has_come(writer)
    goes_on(writer)


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    """ZMTP 3.1's."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def test_a_client_of_zeromq_does_not_reach_zeromq_past_the_front_door(writer: Any) -> None:
    with socket.create_connection(remote.address_of(writer.export_handle())) as stranger:
        stranger.settimeout(0.5)
        answer = b""
        with contextlib.suppress(OSError):
            stranger.sendall(greeting())
            while data := stranger.recv(4096):
                answer += data
    assert not answer.startswith(greeting()[:1]), "ZeroMQ greets it"
    goes_on(writer)


def test_another_process_does_not_reach_zeromq_past_the_front_door(child: Any) -> None:
    process = child("write", None, 1, **NETWORK)
    process.recv()
    with open("/proc/self/net/unix", encoding="ascii", errors="replace") as file:
        names = [line.split()[7] for line in file if f"@kvplug-{process.pid}-" in line]
    assert names  # any user of this host sees them
    for name in names:
        with socket.socket(socket.AF_UNIX) as intruder:
            intruder.settimeout(10)
            intruder.connect(name.replace("@", "\0"))
            with contextlib.suppress(ConnectionError):
                intruder.sendall(greeting())
                assert not intruder.recv(1)  # else it greets


@pytest.mark.parametrize(("host", "other"), [("127.0.0.1", "127.0.0.2"), ("::1", "127.0.0.1")])
def test_it_listens_where_it_was_told_to_and_nowhere_else(queue: Any, host: str, other: str) -> None:
    """The root cause of CVE-2025-30202: a socket of the queue that listens on every interface."""
    writer, _ = queue(attached=0, host=host, **NETWORK)
    there = remote.address_of(writer.export_handle())
    assert there[0] == host
    socket.create_connection(there).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, there[1]))


# -- who knows the secret -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "gone"),
    [
        ([b"\xff" * 100], "it sent nonsense"),
        ([b"a", b"b", b"c"], "it sent nonsense"),
        ([frames.taken(0, 0, 5)], "it sent nonsense"),
        ([bytes([QueueFrameKind.TAKEN])], "it sent nonsense"),
        ([bytes(MIB)], "its connection ended"),  # the frame is too long
    ],
    ids=range(5),
)
def test_a_reader_that_sends_nonsense_is_evicted_and_the_others_go_on(
    writer: Any, message: list[bytes], gone: str
) -> None:
    with dealer(writer) as insider:
        insider.send(joining())
        assert insider.poll(10_000) and insider.recv()[0] == QueueFrameKind.WELCOME
        insider.send_multipart(message)
        until(lambda: writer.readers[0].gone)
    assert writer.readers[0].gone.startswith(gone) and writer.readers[0].died
    goes_on(writer)


class LyingWriter:
    """The writer's socket, with the right keys."""

    def __init__(self) -> None:
        self._door = FrontDoor("127.0.0.1", SECRET)
        contact = new_contact(self._door.contact, SECRET)
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 0
        keys = contact.keys(SECRET).writer
        self.socket.curve_server = 1
        self.socket.curve_publickey, self.socket.curve_secretkey = keys.public, keys.secret
        name = f"kvplug-test-{secrets.token_hex(12)}"
        self.socket.bind(f"ipc://@{name}")
        self._door.open(name)
        data = {"domain": "another host", "contact": "", "network": contact.as_plain()}
        self.handle = QueueHandle(transport="shm", reader_ranks=(0,), local_reader_ranks=(), data=data)
        self._reader = b""

    def reader(self) -> Any:
        """A reader that has joined."""
        joins = Call(lambda: joined(self.handle))
        assert self.socket.poll(10_000)
        self._reader, _ = self.socket.recv_multipart()
        self.say(welcome())
        return joins.result()

    def say(self, *all_of: bytes) -> None:
        for each in all_of:
            self.socket.send_multipart([self._reader, each])

    def close(self) -> None:
        self._door.close(0)
        self.socket.close()
        self._context.term()


@pytest.fixture
def liar() -> Iterator[LyingWriter]:
    made = LyingWriter()
    yield made
    made.close()


def welcome() -> bytes:
    said = {"version": frames.VERSION, "who": WHO, "patience_s": 10.0, "published": 0}
    return frames.plain(QueueFrameKind.WELCOME, said)


def first(number: int, nbytes: int, payload: bytes = b"") -> bytes:
    """A chunk's beginning, as the table of remote_frames draws it."""
    return struct.pack("<BB6xQQQ", QueueFrameKind.MESSAGE, True, number, 0, nbytes) + payload


def piece(number: int, offset: int) -> bytes:
    return struct.pack("<B7xQQ", QueueFrameKind.PIECE, number, offset) + bytes(3)


@pytest.mark.parametrize(
    ("lie", "text"),
    [
        ([first(0, 2**63)], "at most"),
        ([first(3, 3, b"abc")], "3 messages from the writer, from number 0 on, were lost"),
        ([first(0, 9, b"abc")], "3 of 9 bytes"),
        ([first(0, MIB), piece(0, 7)], "does not continue"),
        ([first(0, MIB), first(1, 3, b"abc")], "came amid message 0"),
        ([frames.taken(1, 2, 3)], "another version"),
        ([b"\xff" * 50], "unknown kind"),
    ],
    ids=range(7),
)
def test_what_cannot_be_is_an_error_of_the_reader_and_takes_no_memory(
    liar: LyingWriter, lie: list[bytes], text: str
) -> None:
    with contextlib.closing(liar.reader()) as reader:
        liar.say(*lie)
        for _ in range(2):
            with pytest.raises((TransportError, WireError), match=text):
                reader.dequeue(timeout=10)
