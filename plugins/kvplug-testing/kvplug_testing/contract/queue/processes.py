"""Ends in several processes that are killed or stopped."""

from __future__ import annotations

import random
import threading
import time
from typing import Any, Final

from kvplug import PeerGoneError, TimeoutError
from kvplug.transport import MessageQueue
from kvplug_testing import waits
from kvplug_testing.comparison import assert_same
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.chunks import read
from kvplug_testing.contract.queue.readers import check_named
from kvplug_testing.contract.queue.suite import (
    CHUNK,
    CHUNKS,
    MIB,
    QueueSuite,
    RemoteEnd,
    all_received,
    fill,
    received,
    sent,
)
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises, until

_SIZES: Final = (10, CHUNK // 2, 3000, 3 * CHUNK, 100)
"""Bytes of the messages when a reader is killed at any moment, used in turn."""


class Processes(QueueSuite):
    """One queue with ends in several processes."""

    @law("QUEUE-2", "ALL-2", needs="other_processes")
    def test_a_reader_that_is_killed_with_a_chunk_in_use_is_evicted_and_the_others_go_on(self) -> None:
        writer = self.writer(3)
        others = [self.reader(writer, rank) for rank in (0, 2)]
        victim = self.remote_reader(writer.export_handle(), 1)
        with writer.acquire_write(8, timeout=waits.patience_s) as view:
            view[:] = b"in place"
        assert victim.begin(hold).result() == "holding"
        assert [read(reader) for reader in others] == [b"in place"] * 2
        for number in range(CHUNKS - 1):
            sent(writer, number)
        waiting = Call(lambda: writer.enqueue(CHUNKS - 1, timeout=waits.patience_s))
        assert waiting.is_blocked()
        victim.child.kill()
        waiting.result(waits.patience_s + 1)
        for number in range(3 * CHUNKS):
            if number >= CHUNKS:
                sent(writer, number)
            assert [received(reader) for reader in others] == [number] * 2
        dead = writer.readers[1]
        assert dead.gone and dead.died, f"reader rank 1 was killed, and this is known of it: {dead}"
        assert f"pid {victim.child.pid}" in str(dead), f"the dead reader's process is not named: {dead}"

    @law("ALL-2", "ALL-5", "QUEUE-1", needs="other_processes")
    def test_of_a_writer_that_is_killed_all_it_had_sent_is_received_and_half_a_chunk_never_is(self) -> None:
        handle, child = self.remote_writer(2)
        readers = [self.attach(handle, rank) for rank in range(2)]
        assert child.begin(write_half).result() == "half written"
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
        stops.child.stop()
        held = fill(writer)
        assert [received(local) for _ in range(held)] == [*range(held)]
        error = raises(TimeoutError, lambda: writer.enqueue("x", timeout=0.5))
        check_named(str(error), 1, f"pid {stops.child.pid}", held)
        assert not writer.readers[1].gone, "a reader that is only stopped was evicted"
        stops.child.cont()
        assert stops.run(dequeue, held) == [*range(held)]

    @law("QUEUE-2", needs="other_processes", level="long", timeout_s=300)
    def test_whenever_a_reader_is_killed_the_others_get_everything(self) -> None:
        rng = random.Random(5)
        values = [bytes([number]) * _SIZES[number % len(_SIZES)] for number in range(60)]
        for delay_s in [0.0005 * 2 ** rng.uniform(0, 6) for _ in range(24)]:
            with self.scope():
                writer = self.writer(3)
                local = all_received(self.reader(writer, 0), len(values))
                victim, remote = (self.remote_reader(writer.export_handle(), rank) for rank in (1, 2))
                for end in (victim, remote):
                    end.begin(dequeue, len(values))
                killing = threading.Timer(delay_s, victim.child.kill)
                killing.start()
                for value in values:
                    sent(writer, value)
                killing.join()
                for got in (local.result(), remote.result()):
                    assert_same(values, got, f"killed after {delay_s:.4f} s")


class OtherHost(QueueSuite):
    """Ends on two hosts, which share no memory (capability ``cross_host``), see :mod:`kvplug_testing.hosts`.

    The writer and the reader of rank 0 are on host 0, the reader of rank 1 is on host 1.
    """

    @law("QUEUE-1", needs="another_host")
    def test_readers_on_both_hosts_get_each_message_once_and_in_order(self) -> None:
        writer, readers = self._queue()
        for number in range(50):
            writer.run(enqueue, number)
            assert [reader.run(dequeue) for reader in readers] == [[number], [number]]
        nbytes = min(4 * MIB, self.most_bytes) - 4096  # leaves room for headers
        for number in range(3):
            for reader in readers:
                reader.begin(dequeue)
            writer.run(enqueue, bytes([number]), nbytes)
            for reader in readers:
                assert_same([bytes([number]) * nbytes], reader.result())

    @law("QUEUE-2", "ALL-2", needs="another_host")
    def test_a_reader_that_is_killed_on_another_host_is_evicted_and_the_others_go_on(self) -> None:
        writer, (near, far) = self._queue()
        far.child.kill()
        until(lambda: writer.run(gone) == [1], what="that the killed reader is evicted")
        for number in range(20):
            writer.run(enqueue, number)
            assert near.run(dequeue) == [number]

    def _queue(self) -> tuple[RemoteEnd, list[RemoteEnd]]:
        context: dict[str, Any] = {"local_reader_ranks": [] if self.over_network else [0]}
        handle, writer = self.remote_writer(2, at_host=0, **context)
        return writer, [
            self.remote_reader(handle, host, at_host=host, n_reader=2, **context) for host in (0, 1)
        ]


# -- what ends in other processes run ------------------------------------------------------------------


def dequeue(parent: Parent, reader: MessageQueue, count: int = 1) -> list[Any]:
    return [reader.dequeue(timeout=waits.patience_s) for _ in range(count)]


def enqueue(parent: Parent, writer: MessageQueue, value: Any, times: int = 1) -> None:
    writer.enqueue(value * times, timeout=waits.patience_s)


def hold(parent: Parent, reader: MessageQueue) -> None:
    """Never leave the block of a chunk."""
    with reader.acquire_read(timeout=waits.patience_s):
        parent.send(["", "holding"])
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


def gone(parent: Parent, writer: MessageQueue) -> list[int]:
    return [reader.rank for reader in writer.readers if reader.gone]
