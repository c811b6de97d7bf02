"""What comes over the network half of a queue: everything, in order, and not faster than it is read."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

import shm_remote_ends as ends
from kvplug import ConfigError, PeerGoneError, TimeoutError
from kvplug.transport import CancelledError, Deadline, Wait
from kvplug_shm.queue import reader_link
from kvplug_shm.queue.remote_frames import PIECE_BYTES, QueueFrameKind

REMOTE = str(Path(__file__).with_name("shm_remote_ends.py"))
context, joined, taken = ends.context, ends.joined, ends.taken


@pytest.fixture(params=["127.0.0.1", "::1"])
def host(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def writing() -> Iterator[Any]:
    made: list[Any] = []

    def make(*args: Any, **given: Any) -> Any:
        made.append(ends.Writing(*args, **given))
        return made[-1]

    yield make
    for each in made:
        each.network.abort()
        each.network.join(None)


def test_messages_of_all_sizes_arrive_as_they_were(writing: Any, host: str) -> None:
    sizes = [0, 1, 4096, (64 << 10) - 20, 64 << 10, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17, 2]
    writer = writing(context(host=host), places=2)
    reader = joined(context(host=host), writer.network.data)
    sent = [(bool(at % 2), os.urandom(at * 7), os.urandom(size)) for at, size in enumerate(sizes)]
    sent.append((False, os.urandom(2 * PIECE_BYTES), b"a head in pieces"))
    got: list[Any] = []
    reading = threading.Thread(target=lambda: got.extend(taken(reader) for _ in sent))
    reading.start()
    for raw, head, body in sent:
        writer.send(body, head, raw=raw)
    reading.join(ends.PATIENCE_S)
    assert got == sent
    reader.leave(died=False)


def test_a_frame_that_finds_no_room_is_sent_later_and_nothing_is_lost(
    writing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writing(context())
    reader = joined(context(), writer.network.data)
    put, tried = writer.network._put, itertools.count()

    def refuse_every_second(routing_id: bytes, parts: list[Any]) -> None:
        if (
            parts[0][0] in (QueueFrameKind.MESSAGE, QueueFrameKind.PIECE, QueueFrameKind.READY)
            and not next(tried) % 2
        ):
            raise zmq.Again
        put(routing_id, parts)

    monkeypatch.setattr(writer.network, "_put", refuse_every_second)
    sent = [b"small", os.urandom(3 * PIECE_BYTES + 17), b"last"]
    for body in sent:
        writer.send(body)
    assert [taken(reader)[2] for _ in sent] == sent
    writer.feed.writer_waits = True
    reader.wait_until_ready(ends.wait_for("all to be ready"), lambda: None)
    assert next(tried) > 2 * (len(sent) + 4)
    reader.leave(died=False)


def test_what_a_reader_says_finds_no_room_and_is_said_later(
    writing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writing(context(), places=1)
    reader: Any = joined(context(), writer.network.data)
    put, refused = reader._put, set[bytes]()

    def refuse_once(frame: bytes) -> None:
        if frame not in refused:
            refused.add(frame)
            raise zmq.Again
        put(frame)

    monkeypatch.setattr(reader, "_put", refuse_once)
    for number in range(3):
        writer.send(b"%d" % number)
        assert taken(reader)[2] == b"%d" % number
    writer.feed.until(lambda: writer.feed.read[0] == 3)
    writer.feed.writer_waits = True
    reader.wait_until_ready(ends.wait_for("all to be ready"), lambda: None)
    reader.leave(died=False)


def test_each_reader_gets_everything_in_order_whatever_its_pace(writing: Any) -> None:
    count, pauses = 300, (0.0, 0.0005, 0.002)
    writer = writing(context(), range(3))
    readers = [joined(context(), writer.network.data, rank) for rank in range(3)]
    got: list[list[bytes]] = [[], [], []]

    def read(rank: int) -> None:
        for _ in range(count):
            got[rank].append(taken(readers[rank])[2])
            time.sleep(pauses[rank])

    threads = [threading.Thread(target=read, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for number in range(count):
        writer.send(b"%d" % number)
    for thread in threads:
        thread.join(ends.PATIENCE_S)
    assert got == [[b"%d" % number for number in range(count)]] * 3
    for reader in readers:
        reader.leave(died=False)


def test_who_comes_late_gets_everything_from_the_first(writing: Any) -> None:
    writer = writing(context())
    for number in range(4):
        writer.send(b"%d" % number)
    reader = joined(context(), writer.network.data)
    writer.network.abort()  # it had come, so all that there was is its own
    assert [taken(reader)[2] for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    reader.leave(died=False)


def test_room_comes_back_as_the_reader_reads_and_not_before(writing: Any) -> None:
    writer = writing(context(), places=10)
    reader = joined(context(), writer.network.data)
    for number in range(10):
        writer.send(b"%d" % number)
    assert writer.feed.read[0] == 0  # all of it has arrived, since send() waits for that
    for number in range(1, 4):
        taken(reader)
        writer.feed.until(lambda number=number: writer.feed.read[0] == number)
    reader.leave(died=False)


def test_a_message_has_arrived_when_the_writer_goes_on(writing: Any) -> None:
    writer = writing(context())
    reader = joined(context(), writer.network.data)
    for number in range(4):
        writer.send(b"%d" % number)
        assert reader._assembly.arrived == number + 1
    reader.leave(died=False)


def test_a_reader_that_is_stopped_holds_the_writer_up_once_and_costs_bounded_memory(fork_server: Any) -> None:
    writer = ends.Writing(context(), places=200)
    with fork_server.start(f"{REMOTE}:idle_reader", dict(writer.network.data)) as child:
        child.recv()
        child.stop()
        began = time.monotonic()
        for _ in range(100):
            writer.send(bytes(PIECE_BYTES))
        assert time.monotonic() - began < ends.PATIENCE_S
        (link,) = writer.network._links.values()
        assert link._bytes_under_way <= reader_link.WINDOW_BYTES + PIECE_BYTES + 4096
        child.cont()
        writer.feed.until(lambda: link.arrived == 100)
        assert link.answers
        writer.close()
        child.send("read")
        *messages, end = child.result()
        assert len(messages) == 100 and end.startswith("PeerGoneError")


@pytest.mark.full
def test_a_reader_that_pauses_4_s_under_20_000_messages_gets_all_of_them(fork_server: Any) -> None:
    count = 20_000
    writer = ends.Writing(context(), places=10)
    with fork_server.start(
        f"{REMOTE}:remote_reader", dict(writer.network.data), count, timeout_s=100
    ) as child:
        child.recv()
        sending = threading.Thread(target=lambda: [writer.send(b"%d" % at) for at in range(count)])
        sending.start()
        writer.feed.until(lambda: writer.feed.read[0] > 500)
        child.stop()
        time.sleep(4.0)
        child.cont()
        sending.join(90)
        assert child.result(90) == ""
    writer.close()
    assert writer.feed.gone == {0: ("has left", False)}


def test_all_are_ready_when_all_have_said_so(writing: Any) -> None:
    writer = writing(context(), range(2))
    readers = [joined(context(), writer.network.data, rank) for rank in range(2)]
    with pytest.raises(TimeoutError, match="the writer"):
        readers[0].wait_until_ready(ends.wait_for("all", 0.2), lambda: None)
    writer.feed.writer_waits = True
    writer.network.changed(Deadline.after(ends.PATIENCE_S))
    waiting = threading.Thread(target=readers[1].wait_until_ready, args=(ends.wait_for("all"), lambda: None))
    waiting.start()
    readers[0].wait_until_ready(ends.wait_for("all"), lambda: None)
    waiting.join(ends.PATIENCE_S)
    assert not waiting.is_alive()
    for reader in readers:
        reader.leave(died=False)


def test_a_rank_joins_once(writing: Any) -> None:
    writer = writing(context())
    reader = joined(context(), writer.network.data)
    with pytest.raises(ConfigError, match="attached already"):
        joined(context(), writer.network.data)
    reader.leave(died=False)


def test_a_wait_ends_by_its_deadline_its_cancelling_and_its_end(writing: Any) -> None:
    writer = writing(context())
    reader = joined(context(), writer.network.data)
    assert reader.poll() is None
    with pytest.raises(TimeoutError):
        taken(reader, 0.05)
    cancel = threading.Event()
    cancel.set()
    wait = Wait("a message", lambda: "the writer", Deadline.after(None), cancel=cancel)
    with pytest.raises(CancelledError):
        reader.receive(wait, lambda: None)
    closed = threading.Event()

    def check() -> None:
        if closed.is_set():
            raise ZeroDivisionError

    errors: list[BaseException] = []

    def wait_on() -> None:
        try:
            reader.receive(ends.wait_for("a message"), check)
        except ZeroDivisionError as e:
            errors.append(e)

    waiting = threading.Thread(target=wait_on)
    waiting.start()
    closed.set()
    reader.wake()
    waiting.join(ends.PATIENCE_S)
    assert errors
    reader.leave(died=False)


@pytest.mark.timing
def test_an_end_where_nothing_happens_costs_nothing(writing: Any) -> None:
    writer = writing(context())
    reader = joined(context(), writer.network.data)
    used = time.process_time()
    time.sleep(2.0)
    assert time.process_time() - used < 0.1
    reader.leave(died=False)


def test_a_writer_that_closes_says_so_after_everything_else(writing: Any) -> None:
    writer = writing(context())
    reader = joined(context(), writer.network.data)
    for number in range(4):
        writer.send(b"%d" % number)
    writer.close()
    assert [taken(reader)[2] for _ in range(4)] == [b"0", b"1", b"2", b"3"]
    for _ in range(2):
        with pytest.raises(PeerGoneError, match=f"pid {os.getpid()}.*closed"):
            taken(reader)
    reader.leave(died=False)


def test_what_a_writer_said_last_is_heard_by_a_reader_that_looks_after_the_connection_has_ended(
    writing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writing(context())
    reader: Any = joined(context(), writer.network.data)
    writer.send(b"first")
    turn, busy, go_on = reader._turn, threading.Event(), threading.Event()

    def late(now: float) -> Any:
        busy.set()
        assert go_on.wait(ends.PATIENCE_S)
        return turn(now)

    monkeypatch.setattr(reader, "_turn", late)
    reader.post()
    assert busy.wait(ends.PATIENCE_S)
    writer.close()
    time.sleep(0.2)  # ZeroMQ's thread at the reader's end sees both, what was said and the end
    go_on.set()
    assert taken(reader)[2] == b"first"
    with pytest.raises(PeerGoneError, match="has closed, and everything of it was received"):
        taken(reader)
    reader.leave(died=False)
