"""Who gets in over the network half of a queue, and what strangers and liars can do there."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import shm_remote_ends as ends
from kvplug import AuthenticationError
from kvplug.transport import Deadline, InsecureAddressError, QueueHandle
from kvplug_shm.queue import remote_frames as frames
from kvplug_shm.queue.remote_contact import RemoteContact
from kvplug_shm.queue.remote_dialling import connect, dial_writer, use_keys
from kvplug_shm.queue.remote_frames import QueueFrameKind
from kvplug_shm.queue.remote_keys import Keys
from kvplug_testing import waits

REMOTE = str(Path(__file__).with_name("shm_remote_ends.py"))
context, joined, taken, joining = ends.context, ends.joined, ends.taken, ends.joining
WHO = ends.WHO
SECRET = "a secret that these tests share"


@pytest.fixture
def writer() -> Iterator[Any]:
    made = ends.Writing(context(secret=SECRET), range(2))
    yield made
    made.network.abort()
    made.network.join(None)


def token_of(writing: Any) -> str:
    """That of the front door, on loopback."""
    _, _, token = writing.network.data["contact"].partition("?token=")
    assert len(token) > 20
    return str(token)


def goes_on(writer: Any) -> None:
    """The writer still serves who is allowed to come."""
    reader = joined(context(secret=SECRET), writer.network.data, 1)
    writer.feed.evict(0, "is not of this test", died=False)
    writer.send(b"still there")
    found = [taken(reader)[2] for _ in writer.feed.messages]
    assert found[-1] == b"still there"
    reader.leave(died=False)


@contextlib.contextmanager
def dealer(writer: Any, *, curve: bool = True, ours: Any = None) -> Iterator[Any]:
    """A bare socket of ZeroMQ behind the front door, which the secret opens."""
    credentials = context(secret=SECRET).credentials
    contact = RemoteContact.from_plain(writer.network.data)
    keys = contact.keys(credentials)
    with zmq.Context() as where, where.socket(zmq.DEALER) as made:
        made.linger = 0
        if curve:
            use_keys(made, keys, 0)
        if ours is not None:
            made.curve_publickey, made.curve_secretkey = ours
        relay = connect(made, dial_writer(contact, credentials, Deadline.after(ends.PATIENCE_S)))
        yield made
        relay.abort()


def events_of(writer: Any) -> list[int]:
    """What the writer's ROUTER tells of connections from here on."""
    events, seen = writer.network._connection_events, []

    def see() -> Iterator[Any]:
        for event, fd in events():
            seen.append(event)
            yield event, fd

    writer.network._connection_events = see
    return seen


# -- secrets -------------------------------------------------------------------------------------------


def test_the_same_secret_gets_in_and_another_does_not(writer: Any) -> None:
    with pytest.raises(AuthenticationError, match="the secrets differ"):
        joined(context(secret="not the secret of these tests"), writer.network.data)
    assert not writer.feed.came
    goes_on(writer)


def test_a_secret_at_one_end_only_is_refused_before_anything_is_dialled(writer: Any) -> None:
    with pytest.raises(AuthenticationError, match="has a secret and this end has none"):
        joined(context(), writer.network.data)
    open_to_token = ends.Writing(context())
    with pytest.raises(AuthenticationError, match="this end has a secret and the writer"):
        joined(context(secret=SECRET), open_to_token.network.data)
    open_to_token.network.abort()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_an_address_that_other_hosts_reach_needs_a_secret(host: str) -> None:
    with pytest.raises(InsecureAddressError):
        ends.Writing(context(host=host))
    address = "192.0.2.1:9"
    contact = {"version": 2, "contact": address, "address": address, "salt": "00" * 16, "token": "00" * 32}
    with pytest.raises(InsecureAddressError):
        joined(context(), contact)


def test_the_token_of_one_queue_does_not_open_another() -> None:
    one, other = ends.Writing(context()), ends.Writing(context())
    for stolen in (
        {"token": one.network.data["token"]},
        {"contact": other.network.data["contact"].replace(*map(token_of, (other, one)))},
    ):
        with pytest.raises(AuthenticationError):
            joined(context(), {**other.network.data, **stolen})
    assert not other.feed.came
    one.network.abort()
    other.network.abort()


def test_a_queue_of_the_same_secret_has_other_keys(writer: Any) -> None:
    another = ends.Writing(context(secret=SECRET))
    mixed = {**writer.network.data, "salt": another.network.data["salt"]}
    with pytest.raises(AuthenticationError):
        joined(context(secret=SECRET), mixed)
    another.network.abort()


def test_neither_token_nor_keys_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        writing = ends.Writing(context())
        reader = joined(context(), writing.network.data)
        contact = RemoteContact.from_plain(writing.network.data)
        handle = QueueHandle(
            transport="shm", reader_ranks=(0,), local_reader_ranks=(), data=dict(writing.network.data)
        )
        keys = contact.keys(context().credentials)
        shown = [writing.network, reader, contact, handle, keys, keys.writer, reader.writer, str(contact)]
        reader.leave(died=True)
        writing.feed.until(lambda: writing.feed.gone)
        writing.network.abort()
    told = " ".join(map(repr, shown)) + caplog.text
    hidden = [contact.token, token_of(writing), keys.writer.secret.decode(), keys.reader(0).secret.decode()]
    assert len(contact.token) == 64
    assert not [secret for secret in hidden if secret in told]


def test_every_role_has_a_key_of_its_own() -> None:
    keys = [Keys(shared, salt) for shared in (b"a" * 16, b"b" * 16) for salt in (b"0" * 16, b"1" * 16)]
    pairs = [pair for each in keys for pair in (each.writer, *map(each.reader, range(3)))]
    assert len({pair.secret for pair in pairs}) == len({pair.public for pair in pairs}) == 16
    assert Keys(b"a" * 16, b"0" * 16).reader(2).secret == keys[0].reader(2).secret
    assert zmq.curve_public(pairs[0].secret) == pairs[0].public and len(pairs[0].raw_public) == 32


# -- strangers -----------------------------------------------------------------------------------------


def test_a_client_with_a_key_of_its_own_is_not_heard(writer: Any) -> None:
    with dealer(writer, ours=zmq.curve_keypair()) as forged:
        forged.send(frames.plain(QueueFrameKind.JOIN, joining()))
        writer.feed.until(lambda: writer.network._admission.refused)
        assert not forged.poll(200)
    assert not writer.feed.came
    goes_on(writer)


def test_a_client_without_keys_is_not_heard(writer: Any) -> None:
    with dealer(writer, curve=False) as bare:
        bare.send(frames.plain(QueueFrameKind.JOIN, joining()))
        assert not bare.poll(500)
    assert not writer.feed.came
    goes_on(writer)


def test_a_client_of_zeromq_does_not_reach_zeromq_past_the_front_door(writer: Any) -> None:
    seen = events_of(writer)
    contact = RemoteContact.from_plain(writer.network.data)
    with zmq.Context() as where, where.socket(zmq.DEALER) as made:
        made.linger = 0
        use_keys(made, contact.keys(context(secret=SECRET).credentials), 0)
        made.connect(f"tcp://{contact.address}")
        made.send(frames.plain(QueueFrameKind.JOIN, joining()))
        assert not made.poll(500)
    writer.feed.until(lambda: writer.network._door.refusals)
    assert zmq.EVENT_ACCEPTED not in seen and not writer.feed.came
    goes_on(writer)


def test_another_process_does_not_reach_zeromq_past_the_front_door(fork_server: Any) -> None:
    with fork_server.start(f"{REMOTE}:remote_writer", 1) as child:
        child.recv()
        with open("/proc/self/net/unix", encoding="ascii", errors="replace") as file:
            names = [line.split()[7] for line in file if f"@kvplug-{child.pid}-" in line]
        assert names  # any user of this host sees them
        for name in names:
            with socket.socket(socket.AF_UNIX) as intruder:
                intruder.settimeout(10)
                intruder.connect(name.replace("@", "\0"))
                with contextlib.suppress(ConnectionError):
                    intruder.sendall(greeting())
                    assert not intruder.recv(1)  # else it greets


def test_a_conversation_that_is_replayed_opens_nothing(writer: Any) -> None:
    relay = ends.Wire(writer.network.data)
    reader = joined(context(secret=SECRET), relay.data)
    writer.send(b"once")
    assert taken(reader)[2] == b"once"
    reader.leave(died=False)
    writer.feed.until(lambda: writer.feed.gone)
    came = dict(writer.feed.came)
    writer.feed.came.clear()
    for pause_s in (0.0, 0.05):
        with socket.create_connection(ends.address_of(writer.network.data)) as again:
            for at in range(0, len(relay.heard), 200):
                try:
                    again.sendall(relay.heard[at : at + 200])
                except OSError:
                    break
                time.sleep(pause_s)
            time.sleep(0.2)
    assert came and not writer.feed.came
    relay.cut()
    goes_on(writer)


def greeting(mechanism: bytes = b"CURVE") -> bytes:
    """ZMTP 3.1's."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32)


def test_what_strangers_send_is_harmless(writer: Any) -> None:
    rng = random.Random(5)
    huge = struct.pack(">BQ", 0x06, 1 << 62)  # a long command
    said = [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80\x04cbuiltins\neval\n.",
        rng.randbytes(100_000),
        greeting(),
        greeting(b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
        greeting() + huge + rng.randbytes(10_000),
        greeting() + b"\x04\xc8\x05HELLO" + rng.randbytes(194),
        greeting() + rng.randbytes(5_000),
    ]
    with open("/proc/self/statm", encoding="ascii") as statm:
        before = int(statm.read().split()[1])
    strangers = []
    for each in said * 3:
        stranger = socket.create_connection(ends.address_of(writer.network.data))
        strangers.append(stranger)
        stranger.settimeout(5.0)
        try:
            stranger.sendall(each)
        except OSError:
            continue
    time.sleep(0.3)
    goes_on(writer)
    with open("/proc/self/statm", encoding="ascii") as statm:
        grown = (int(statm.read().split()[1]) - before) * os.sysconf("SC_PAGESIZE")
    assert grown < 64 << 20
    for stranger in strangers:
        stranger.close()


class Flood:
    """Connections that say nothing, made all the time from another thread, each held until the end."""

    def __init__(self, where: tuple[str, int], count: int, pause_s: float) -> None:
        self.made = 0
        self._where, self._count, self._pause_s = where, count, pause_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        with contextlib.ExitStack() as held:
            while self.made < self._count and not self._stop.is_set():
                stranger = held.enter_context(socket.socket())
                stranger.setblocking(False)
                stranger.connect_ex(self._where)
                self.made += 1
                time.sleep(self._pause_s)
            self._stop.wait(100)


def test_a_flood_of_strangers_takes_few_descriptors_while_readers_join_and_receive(fork_server: Any) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
    count = min(most, 4096) * 3 // 4
    try:
        with fork_server.start(f"{REMOTE}:writer_with_few_descriptors", timeout_s=100) as child:
            data = child.recv()
            readers = []
            with Flood(ends.address_of(data), count, 0.0005) as flood:
                for rank in range(4):
                    began = time.monotonic()
                    readers.append(joined(context(), data, rank))
                    assert time.monotonic() - began < 8.0, "the flood delayed it"
                    child.send("go")
                    for reader in readers:
                        assert taken(reader)[2] == b"still there"
                    assert child.recv() < ends.FEW_DESCRIPTORS
                    waits.until(lambda rank=rank: flood.made >= count * (rank + 1) // 4)
                for reader in readers:
                    reader.leave(died=True)
            child.send("how many")
            assert child.recv() < ends.FEW_DESCRIPTORS
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_strangers_that_come_and_go_make_the_writer_say_nothing_to_its_readers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    writing = ends.Writing(context(heartbeat_timeout_s=1000.0))
    reader = joined(context(heartbeat_timeout_s=1000.0), writing.network.data)
    put, seen = writing.network._put, events_of(writing)
    said: list[int] = []
    monkeypatch.setattr(writing.network, "_put", lambda to, parts: (said.append(parts[0][0]), put(to, parts)))
    for _ in range(50):
        socket.create_connection(ends.address_of(writing.network.data)).close()
    writing.feed.until(lambda: writing.network._door.refusals == {"left": 50})
    writing.send(b"still there")
    assert taken(reader)[2] == b"still there"
    assert said == [QueueFrameKind.MESSAGE] and zmq.EVENT_ACCEPTED not in seen
    reader.leave(died=False)
    writing.network.abort()


def test_connections_that_nobody_looks_at_do_not_keep_it_from_ending(fork_server: Any) -> None:
    """ZeroMQ's thread must not wait for room for what it tells of them: it holds what closing needs."""
    with fork_server.start(f"{REMOTE}:writer_that_does_not_look", 1500, timeout_s=100) as child:
        assert child.result() == "ended"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_it_listens_where_it_was_told_to_and_nowhere_else(host: str) -> None:
    """The root cause of CVE-2025-30202: a socket of the queue that listens on every interface."""
    writing = ends.Writing(context(host=host))
    port = f":{ends.address_of(writing.network.data)[1]:04X}"
    found = []
    for table in ("tcp", "tcp6"):
        with open(f"/proc/self/net/{table}", encoding="ascii") as file:
            found += [
                line.split()[1] for line in file.readlines()[1:] if port in line and line.split()[3] == "0A"
            ]
    packed = socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    words = [packed[at : at + 4][::-1].hex().upper() for at in range(0, len(packed), 4)]
    assert found == ["".join(words) + port]
    writing.network.abort()


def test_an_address_of_one_link_keeps_its_interface() -> None:
    """Without it there is no such address on this host."""
    with open("/proc/self/net/if_inet6", encoding="ascii") as file:
        found = [line.split() for line in file]
    links = [(bytes.fromhex(each[0]), each[5]) for each in found if each[3] == "20"]
    if not links:
        pytest.skip("no interface has an address of its link")
    packed, interface = links[0]
    host = f"{socket.inet_ntop(socket.AF_INET6, packed)}%{interface}"
    writing = ends.Writing(context(host=host, secret=SECRET))
    reader = joined(context(secret=SECRET), writing.network.data)
    writing.send(b"there")
    assert taken(reader)[2] == b"there"
    reader.leave(died=False)
    writing.network.abort()


# -- those that know the secret -------------------------------------------------------------------------


@pytest.fixture
def insider(writer: Any) -> Iterator[Any]:
    """A socket of ZeroMQ that has proved itself for rank 0 and says what the test wants."""
    with dealer(writer) as made:
        yield made


@pytest.mark.parametrize(
    "said",
    [
        [b""],
        [b"\x00"],
        [b"\xff" * 100],
        [b"a", b"b", b"c"],
        [frames.taken(1, 1, 1)],
        [frames.taken(0, 0, 5)],
        [bytes([QueueFrameKind.TAKEN])],
        [frames.goodbye(3)],
        [frames.plain(QueueFrameKind.JOIN, joining())],
        [b"\x80\x04cbuiltins\neval\n."],
    ],
)
def test_a_reader_that_sends_nonsense_is_evicted_and_the_others_go_on(
    writer: Any, insider: Any, said: list[bytes]
) -> None:
    insider.send(frames.plain(QueueFrameKind.JOIN, joining()))
    assert insider.poll(10_000) and insider.recv()[0] == QueueFrameKind.WELCOME
    assert writer.feed.came == {0: "pid 77 on example"}
    insider.send_multipart(said)
    writer.feed.until(lambda: writer.feed.gone)
    why, died = writer.feed.gone[0]
    assert why.startswith("it sent nonsense") and died
    goes_on(writer)


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        {},
        joining(version=2),
        joining(patience_s=0.0),
        joining(patience_s="long"),
        joining(who={**WHO, "pid": -1}),
        joining(who={**WHO, "pid": "x"}),
        joining(who={**WHO, "more": 1}),
        joining(who=[1]),
    ],
)
def test_who_joins_with_nonsense_has_not_come(writer: Any, insider: Any, value: Any) -> None:
    insider.send(frames.plain(QueueFrameKind.JOIN, value))
    insider.send(frames.plain(QueueFrameKind.READY))
    assert not insider.poll(200)
    assert not writer.feed.came
    goes_on(writer)


def test_a_frame_that_is_too_long_ends_the_connection(writer: Any, insider: Any) -> None:
    insider.send(frames.plain(QueueFrameKind.JOIN, joining()))
    assert insider.poll(10_000)
    insider.send(bytes(1 << 20))
    writer.feed.until(lambda: writer.feed.gone)
    assert writer.feed.gone == {0: ("its connection ended", True)}
    goes_on(writer)
