"""A writer that proves itself over the network of a queue and lies: a reader's calls end, within bounds."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest
import zmq

import shm_remote_ends as ends
from kvplug import CapacityError, ConfigError, KvplugError, TimeoutError, TransportError
from kvplug.transport import WireError
from kvplug_shm.queue import remote_assembly, remote_frames as frames
from kvplug_shm.queue.remote_contact import new_contact
from kvplug_shm.queue.remote_door import FrontDoor
from kvplug_shm.queue.remote_frames import QueueFrameKind
from kvplug_testing.waits import Call, until

SECRET = "a secret that these tests share"
ODD = "no room\n\x1b[2J" + "x" * 5000
ONE_MIB = 1 << 20


class LyingWriter:
    """The writer's socket, with the right keys."""

    def __init__(self) -> None:
        credentials = ends.context(secret=SECRET).credentials
        self._door = FrontDoor("127.0.0.1", credentials)
        contact = new_contact(self._door.contact, self._door.address, credentials)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        keys = contact.keys(credentials).writer
        self._socket.curve_server = 1
        self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
        name = f"kvplug-test-{secrets.token_hex(12)}"
        self._socket.bind(f"ipc://@{name}")
        self._door.open(name)
        self.data = contact.as_plain()
        self.reader = b""

    def meet(self) -> Any:
        """The JOIN of the reader."""
        assert self._socket.poll(10_000)
        self.reader, frame = self._socket.recv_multipart()
        return frames.read([memoryview(frame)])

    def say(self, *all_of: bytes | list[bytes]) -> None:
        for each in all_of:
            self._socket.send_multipart([self.reader, *(each if isinstance(each, list) else [each])])

    def close(self) -> None:
        self._door.close(0)
        self._socket.close()
        self._context.term()


@pytest.fixture
def writer() -> Iterator[LyingWriter]:
    made = LyingWriter()
    yield made
    made.close()


def welcome(**lies: Any) -> bytes:
    said = {"version": frames.VERSION, "who": ends.WHO, "patience_s": 10.0, "published": 0, **lies}
    return frames.plain(QueueFrameKind.WELCOME, said)


def first(number: int, nbytes: int, payload: bytes = b"", *, head: int = 0) -> bytes:
    return frames._MESSAGE.pack(QueueFrameKind.MESSAGE, True, number, head, nbytes) + payload


@pytest.fixture
def source(writer: LyingWriter) -> Iterator[Any]:
    joining = Call(lambda: ends.joined(ends.context(secret=SECRET), writer.data))
    writer.meet()
    writer.say(welcome())
    made = joining.result()
    yield made
    made.leave(died=True)


def test_a_refusal_is_one_printable_line(writer: LyingWriter) -> None:
    joining = Call(lambda: ends.joined(ends.context(secret=SECRET), writer.data))
    writer.meet()
    writer.say(frames.plain(QueueFrameKind.REFUSED, ODD[:1500]))
    error = joining.outcome()
    assert isinstance(error, ConfigError) and "no room" in str(error)
    assert str(error).isprintable() and len(str(error)) < 1500


def test_why_a_reader_was_evicted_is_one_printable_line(writer: LyingWriter, source: Any) -> None:
    writer.say(frames.evicted(7, 3, ODD))
    with pytest.raises(TransportError, match="no room") as caught:
        ends.taken(source)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1500


@pytest.mark.parametrize(
    "lie",
    [
        first(0, 2**63),
        first(0, 2**64 - 1, head=2**64 - 1),
        first(5, 3, b"abc"),
        first(2**64 - 1, 3, b"abc"),
        first(0, 9, b"abc"),
        welcome(),  # again
        frames.plain(QueueFrameKind.JOIN, {}),
        frames.taken(1, 2, 3),
        b"\xff" * 50,
        [b"a", b"b", b"c"],
    ],
    ids=range(10),
)
def test_what_cannot_be_is_an_error_of_the_reader_and_takes_no_memory(
    writer: LyingWriter, source: Any, lie: Any
) -> None:
    writer.say(lie)
    for _ in range(2):
        with pytest.raises((WireError, TransportError)):
            ends.taken(source, 10)


def test_welcomes_without_end_open_no_descriptors(writer: LyingWriter, source: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mine = {**ends.WHO, **_me()}
    writer.say(*(welcome(who=mine) for _ in range(50)))
    with pytest.raises((WireError, TransportError)):
        ends.taken(source, 10)
    until(lambda: len(os.listdir("/proc/self/fd")) <= before)


def _me() -> dict[str, Any]:
    import attrs

    from kvplug.transport import this_process

    return attrs.asdict(this_process())


@pytest.mark.parametrize("patience_s", [1e-9, 1e-300])
def test_an_impatient_writer_does_not_make_a_reader_send_all_the_time(
    writer: LyingWriter, patience_s: float
) -> None:
    joining = Call(lambda: ends.joined(ends.context(secret=SECRET), writer.data))
    writer.meet()
    writer.say(welcome(patience_s=patience_s))
    source: Any = joining.result()
    assert source._patience_s >= 0.05
    source.leave(died=True)


def test_unread_messages_are_no_more_than_this_process_can_have(
    writer: LyingWriter, source: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 20 * ONE_MIB

    def check_room(nbytes: int, what: str, most: Any = None) -> None:
        if nbytes > limit:
            raise CapacityError(f"{what} has {nbytes} bytes")

    monkeypatch.setattr(remote_assembly, "check_room", check_room)
    payload = bytes(ONE_MIB)
    for number in range(40):
        writer.say([first(number, ONE_MIB), payload])
    found = 0
    error: KvplugError | None = None
    until(lambda: source._inbox.ended)
    while error is None:
        try:
            ends.taken(source, 10)
            found += 1
        except KvplugError as e:
            error = e
    assert found == 20
    assert isinstance(error, CapacityError) and "was not read" in str(error)


def test_reading_gives_room_back(writer: LyingWriter, source: Any) -> None:
    for number in range(3):
        writer.say([first(number, 1000, head=24), bytes(1024)])
        source.receive(ends.wait_for("a message"), lambda: None)
        assert source._inbox.nbytes == 1024
        source.advance()
        assert source._inbox.nbytes == 0


def test_a_writer_that_says_nothing_more_is_waited_for_until_the_deadline(
    writer: LyingWriter, source: Any
) -> None:
    writer.say(first(0, 5 * ONE_MIB))  # and never a piece
    with pytest.raises(TimeoutError):
        ends.taken(source, 0.2)
