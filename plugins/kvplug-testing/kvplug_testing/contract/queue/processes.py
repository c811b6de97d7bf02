"""Ends in several processes that are killed or stopped."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.chunks import read
from kvplug_testing.contract.queue.suite import CHUNK, CHUNKS, QueueSuite, RemoteEnd, fill, received, sent
from kvplug_testing.contract.queue.waiting import check_named
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises, until

_SIZES: Final = (10, CHUNK // 2, 3000, 3 * CHUNK, 100)
"""Sizes of the messages in bytes, used in turn."""
_MOMENTS: Final = 24
_MORE: Final = 50
"""Messages after the kill: more than there are chunks."""
_LAST: Final = "the last"
_NUMBER: Final = 8


class Processes(QueueSuite):
    """One queue with ends in several processes."""

    @law("QUEUE-2", "ALL-2", needs="other_processes")
    def test_a_reader_that_is_killed_with_a_chunk_in_use_is_evicted_and_the_others_go_on(self) -> None:
        writer = self.writer(3)
        local = self.reader(writer, 0)
        victim, other = (self.remote_reader(writer.export_handle(), rank) for rank in (1, 2))
        with writer.acquire_write(8, timeout=waits.patience_s) as view:
            view[:] = b"in place"
        victim.begin(hold)
        pid = victim.result()
        other.begin(read_chunk)
        assert [read(local), other.result()] == [b"in place"] * 2
        for number in range(CHUNKS - 1):
            sent(writer, number)
        waiting = Call(lambda: writer.enqueue(CHUNKS - 1, timeout=waits.patience_s))
        assert waiting.is_blocked()
        victim.child.kill()
        waiting.result(waits.patience_s + 1)
        for number in range(3 * CHUNKS):
            if number >= CHUNKS:
                sent(writer, number)
            assert [received(local), other.run(dequeue)] == [number, number]
        dead = writer.readers[1]
        assert dead.gone and dead.died, f"reader rank 1 was killed, and this is known of it: {dead}"
        assert f"pid {pid}" in str(dead), f"the dead reader's process is not named: {dead}"

    @law("ALL-2", "ALL-5", "QUEUE-1", needs="other_processes")
    def test_of_a_writer_that_is_killed_all_it_had_sent_is_received_and_half_a_chunk_never_is(self) -> None:
        handle, child = self.remote_writer(2)
        readers = [self.attach(handle, rank) for rank in range(2)]
        child.begin(write_half)
        assert child.result() == "half written"
        with readers[0].acquire_read(timeout=waits.patience_s) as view:
            child.child.kill()
            assert bytes(view) == bytes(1000), "what is being read went away with its writer"
        assert read(readers[1]) == bytes(1000)
        for reader in readers:
            assert [received(reader) for _ in range(CHUNKS - 2)] == [*range(1, CHUNKS - 1)]
            for call in (read, received, read):
                raises(PeerGoneError, lambda call=call, reader=reader: call(reader))  # type: ignore[misc]
        raises(PeerGoneError, lambda: self.attach(handle))

    @law("ALL-3", "QUEUE-3", needs="other_processes")
    def test_a_reader_that_is_stopped_is_named_with_its_process_and_not_evicted(self) -> None:
        writer = self.writer(2)
        local = self.reader(writer, 0)
        stops = self.remote_reader(writer.export_handle(), 1)
        pid = stops.run(pid_of)
        stops.child.stop()
        held = fill(writer)
        assert [received(local) for _ in range(held)] == [*range(held)]
        error = raises(TimeoutError, lambda: writer.enqueue("x", timeout=0.5))
        check_named(str(error), 1, f"pid {pid}", held)
        assert not writer.readers[1].gone, "a reader that is only stopped was evicted"
        stops.child.cont()
        assert [stops.run(dequeue) for _ in range(held)] == [*range(held)]
        sent(writer, "after")
        assert stops.run(dequeue) == "after"

    @law("ALL-2", "ALL-5", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_the_writer_is_killed_readers_get_what_it_had_enqueued_and_nothing_else(self) -> None:
        for delay_s in _delays():
            with self.scope(), tempfile.NamedTemporaryFile() as noted:
                handle, child = self.remote_writer(2)
                readers = [self.attach(handle, rank) for rank in range(2)]
                calls = [Call(partial(read_all, None, reader)) for reader in readers]
                child.begin(write_and_note, noted.name)
                until(lambda file=noted: os.fstat(file.fileno()).st_size, what="the first message")  # type: ignore[misc]
                _kill(child, delay_s)
                enqueued = int.from_bytes(os.pread(noted.fileno(), _NUMBER, 0), "little")
                for call in calls:
                    # One more may be enqueued by a call that has not returned yet.
                    count = call.result(waits.patience_s + 5)
                    assert count in (enqueued, enqueued + 1), f"killed after {delay_s:.4f} s"

    @law("QUEUE-2", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_a_reader_is_killed_the_others_get_everything(self) -> None:
        for delay_s in _delays():
            with self.scope():
                writer = self.writer(3)
                local = Call(partial(read_all, None, self.reader(writer, 0)))
                victim, remote = (self.remote_reader(writer.export_handle(), rank) for rank in (1, 2))
                for end in (victim, remote):
                    end.begin(read_all)
                killing = Call(partial(_kill, victim, delay_s))
                count = Call(partial(_write_until, writer, partial(getattr, killing, "ended"))).result(60)
                got = [local.result(), remote.result()]
                assert got == [count] * 2, f"killed after {delay_s:.4f} s"


def _message(number: int) -> tuple[int, bytes]:
    return number, bytes([number % 251]) * _SIZES[number % len(_SIZES)]


def _delays() -> Iterator[float]:
    """Delays before a kill: short and longer ones."""
    rng = random.Random(5)
    for _ in range(_MOMENTS):
        yield 0.0005 * 2 ** rng.uniform(0, 9)


def _kill(end: RemoteEnd, delay_s: float) -> None:
    time.sleep(delay_s)
    end.child.kill()


def _write_until(writer: MessageQueue, over: Callable[[], bool]) -> int:
    """Send messages until ``over()``, then some more and the last one. Returns their number."""
    number, more = 0, _MORE
    while more:
        writer.enqueue(_message(number), timeout=waits.patience_s)
        number += 1
        more -= over()
    writer.enqueue(_LAST, timeout=waits.patience_s)
    return number


# -- what ends in other processes run ------------------------------------------------------------------


def pid_of(parent: Parent, queue: MessageQueue) -> int:
    return os.getpid()


def dequeue(parent: Parent, reader: MessageQueue) -> Any:
    return reader.dequeue(timeout=waits.patience_s)


def enqueue(parent: Parent, writer: MessageQueue, value: Any) -> None:
    writer.enqueue(value, timeout=waits.patience_s)


def read_chunk(parent: Parent, reader: MessageQueue) -> bytes:
    return read(reader)


def hold(parent: Parent, reader: MessageQueue) -> None:
    """Report its pid from the block of a chunk that it never leaves."""
    with reader.acquire_read(timeout=waits.patience_s):
        parent.send(["", os.getpid()])
        time.sleep(1000)


def write_half(parent: Parent, writer: MessageQueue) -> None:
    """Send a chunk and values, and stop in the middle of writing another chunk."""
    with writer.acquire_write(1000, timeout=waits.patience_s) as view:
        view[:] = bytes(1000)
    for number in range(1, CHUNKS - 1):
        writer.enqueue(number, timeout=waits.patience_s)
    with writer.acquire_write(1000, timeout=waits.patience_s) as view:
        view[:500] = b"h" * 500
        parent.send(["", "half written"])
        time.sleep(1000)


def write_and_note(parent: Parent, writer: MessageQueue, path: str) -> None:
    """Send messages until killed; a file holds the number of enqueued messages."""
    noted = os.open(path, os.O_WRONLY)
    number = 0
    while True:
        writer.enqueue(_message(number), timeout=waits.patience_s)
        number += 1
        os.pwrite(noted, number.to_bytes(_NUMBER, "little"), 0)


def read_all(parent: Parent | None, reader: MessageQueue) -> int:
    """Read messages up to the last one, or the end of the writer. Returns their number."""
    number = 0
    while True:
        try:
            got = reader.dequeue(timeout=waits.patience_s)
        except PeerGoneError:
            return number
        if got == _LAST:
            return number
        assert_same(_message(number), got, f"message {number}")
        number += 1
