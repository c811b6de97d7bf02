"""What a peer of the same user can write into a queue's memory and onto its socket: an error, and no more."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import shm_queue_ends as ends
from kvplug import CapacityError, ConfigError, TransportError
from kvplug.net.wire import encode
from kvplug.transport import Connection, Credentials, Deadline, QueueEndpoint, WireError
from kvplug_shm.queue.join import PURPOSE
from kvplug_shm.ring import protocol
from kvplug_testing.pairs import accepting
from kvplug_testing.waits import Call, until

queue, memory_of = ends.queue, ends.memory_of


# -- words and entries ---------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 1 << 40, (1 << 63) - 1])
def test_a_head_or_a_tail_that_cannot_be_is_an_error(queue: Any, memory_of: Any, count: int) -> None:
    writer, (reader, another) = queue(3, attached=2)
    writer.enqueue("one")
    words = memory_of(writer, 2).words.words
    words[protocol.tail(1)] = count << 1
    with pytest.raises(WireError, match="a reader states"):
        writer.enqueue("two", timeout=1)
    assert reader.dequeue() == "one"
    words[protocol.HEAD] = count << 1
    for _ in range(2):
        with pytest.raises(WireError, match="more units than"):
            another.dequeue(timeout=1)


def test_bytes_that_do_not_decode_raise_and_the_message_stays(queue: Any, memory_of: Any) -> None:
    rng = random.Random(8)
    writer, (reader,) = queue(2, attached=1)
    writer.enqueue({"key": [1, 2, b"three"]})
    ring = memory_of(writer, 1)
    head = ring.get(0).head
    whole = bytes(head)
    for _ in range(500):
        head[:] = rng.randbytes(len(head))
        with pytest.raises(WireError):
            reader.dequeue(timeout=1)
    head[:] = whole
    assert reader.dequeue(timeout=1) == {"key": [1, 2, b"three"]}, "a damaged message was accepted"
    head.release()


@pytest.mark.parametrize("overflow", [False, True])
def test_a_pickle_in_the_ring_runs_nowhere(
    queue: Any, memory_of: Any, tmp_path: Path, overflow: bool
) -> None:
    """The root cause of CVE-2024-11041: a reader passes the bytes in the ring to ``pickle.loads``."""
    writer, (reader,) = queue(2, attached=1)
    payload = ends.evil(tmp_path / "made").ljust(3 * ends.CHUNK if overflow else 0, b" ")
    writer.enqueue(bytes(len(payload)))
    with memory_of(writer, 1).get(0).head as head:
        head[:] = payload.ljust(len(head), b".")
    with pytest.raises(WireError):
        reader.dequeue(timeout=5)
    writer.enqueue(payload)  # bytes that look like one are bytes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("decoder", ["decode", "decode_out_of_band"])
def test_a_reader_that_was_evicted_during_a_copy_gets_the_reason(
    queue: Any, memory_of: Any, monkeypatch: pytest.MonkeyPatch, decoder: str
) -> None:
    writer, readers = queue(3, attached=2)
    ring = memory_of(writer, 2)
    writer.enqueue("small" if decoder == "decode" else torch.ones(100_000))

    def overwritten(*_: Any, **__: Any) -> Any:
        ends.evict(ring, 1)
        raise WireError("not the bytes of a value")

    monkeypatch.setattr(f"kvplug_shm.queue.reader.{decoder}", overwritten)
    with pytest.raises(TransportError, match="evicted this reader, and at least 1 "):
        readers[1].dequeue(timeout=5)


def test_every_call_of_an_evicted_reader_raises(queue: Any, memory_of: Any) -> None:
    writer, readers = queue(3, attached=2)
    ring = memory_of(writer, 2)
    with writer.acquire_write(4) as view:
        view[:] = b"here"
    writer.enqueue("value")
    with pytest.raises(TransportError, match="evicted"), readers[1].acquire_read() as view:
        ends.evict(ring, 1)  # and the chunk may have been overwritten
    with pytest.raises(TransportError, match="evicted this reader"):
        readers[1].dequeue(timeout=5)  # another kind
    for index in (None, 0):
        ring.words.words[ring.ready_word(index)] = 1
    with pytest.raises(TransportError, match="evicted this reader"):
        readers[1].wait_until_ready(timeout=5)
    readers[0].wait_until_ready(timeout=5)


# -- the socket --------------------------------------------------------------------------------------


@pytest.fixture
def writer(queue: Any) -> Any:
    return queue(3, attached=0)[0]


def goes_on(writer: Any, rank: int = 2) -> None:
    with ends.endpoint().create_from_handle(writer.export_handle(), rank) as reader:
        writer.enqueue("goes on", timeout=5)
        assert reader.dequeue(timeout=5) == "goes on"


def insider(writer: Any) -> Any:
    """An authenticated connection, on which the test sends any bytes."""
    return Connection.dial(writer.export_handle().data["contact"], Credentials(), PURPOSE, 10)


def frame(value: object) -> bytes:
    data = encode(value)
    return (len(data).to_bytes(2, "little") + data).ljust(1024, b"\0")


def test_bytes_of_strangers_reach_no_decoder(writer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[Any] = []
    name = writer.export_handle().data["contact"].removeprefix("unix:@")
    with monkeypatch.context() as patch:
        patch.setattr("kvplug_shm.joining.decode", lambda *given, **_: decoded.append(given))
        for data in (b"", b"\x80\x04" * 200, frame({"rank": 0}), random.Random(5).randbytes(4096)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(f"\0{name}")
                stranger.settimeout(20)
                with contextlib.suppress(OSError):  # it may hang up first
                    stranger.sendall(data)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(4096):
                        pass
    assert not decoded
    goes_on(writer)


def test_a_reader_that_disconnects_with_the_memory_may_join_again(writer: Any) -> None:
    with insider(writer), insider(writer) as connection:  # the first one sends nothing
        asks = {"queue": writer.export_handle().data["queue"], "rank": 0, "terms": [True, 5000]}
        connection.send(frame(asks), Deadline.after(5))
        _, fds = connection.receive_fds(1024, 1, Deadline.after(10))
        os.close(fds[0])
        with pytest.raises(ConfigError, match="attached to this queue already"):
            ends.endpoint().create_from_handle(writer.export_handle(), 0)
    until(lambda: "not come" in writer.readers[0].process)
    goes_on(writer, 0)


def answered(writer: Any, answer: bytes) -> Any:
    """The outcome of a join whose writer answers so."""
    handle = writer.export_handle()
    with accepting("unix:", Credentials(), PURPOSE) as listener:
        false = {**handle.as_plain(), "data": {**handle.data, "contact": listener.contact}}
        joining = Call(
            lambda: ends.endpoint().create_from_handle(QueueEndpoint.Handle.from_plain(false), 0, 10)
        )
        with listener.accept(10) as connection:
            connection.receive(1024, Deadline.after(10))
            connection.send(answer, Deadline.after(10))
            return joining.outcome()


def welcome(index: int, *sizes: int) -> bytes:
    return frame({"index": index, "sizes": [*sizes], "terms": [True, 1000]})


@pytest.mark.parametrize(
    "answer",
    [
        frame("hello"),
        welcome(3, 1, 4, 100, 100),
        welcome(0, 1, 0, 0, 0),
        welcome(0, 1, 4, 100, 100),  # without memory
        welcome(0, 1, 4, 100, -100),
        welcome(0, 2**62, 4, 100, 100),
        welcome(0, 1, 2**62, 2**62, 2**62),
        b"\xff" * 1024,
    ],
)
def test_an_invalid_answer_is_refused(writer: Any, answer: bytes) -> None:
    assert isinstance(answered(writer, answer), WireError)


def test_a_message_larger_than_all_memory_is_refused_first(queue: Any, memory_of: Any) -> None:
    """The pages of the ring that the writer has not used take no memory, however many it states."""
    writer, (reader,) = queue(2, attached=1, options={"max_message_bytes": 1 << 44})
    writer.enqueue("value")
    ring = memory_of(writer, 1)
    with ring.get(0).head as view:
        head = len(view)
    for entry in ((0, 1, 0, 1 << 44, 0), (0, 1, 0, head, 1 << 44)):
        ring.put(*entry)
        for _ in range(2):
            with pytest.raises(CapacityError, match="remains unreceived, since it has 17592186044"):
                reader.dequeue(timeout=5)
    ring.put(0, 1, 0, head, 0)
    assert reader.dequeue(timeout=5) == "value"
