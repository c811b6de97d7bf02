"""Ends in several processes that are killed or stopped."""

from __future__ import annotations

import os
import time
from typing import Any

from kvplug import ConfigError, PeerGoneError, TimeoutError
from kvplug.transport import MessageQueue, QueueHandle
from kvplug_testing import waits
from kvplug_testing.contract.base import law
from kvplug_testing.contract.queue.chunks import read
from kvplug_testing.contract.queue.suite import CHUNKS, QueueSuite, fill, received, sent, wrong
from kvplug_testing.contract.queue.waiting import check_named
from kvplug_testing.peers import Parent
from kvplug_testing.waits import Call, raises


def drain(parent: Parent, reader: MessageQueue, count: int) -> Any:
    """Read ``count`` values and return them."""
    parent.send("attached")
    return [reader.dequeue(timeout=waits.patience_s) for _ in range(count)]


def add_up(parent: Parent, reader: MessageQueue, count: int) -> Any:
    """Read numbers, and check their order."""
    parent.send("attached")
    for number in range(count):
        got = reader.dequeue(timeout=waits.patience_s)
        if got != number:
            return f"{got!r} came where {number} was expected"
    return ""


def sit(parent: Parent, queue: MessageQueue) -> Any:
    """Wait for commands of the parent, and carry them out."""
    parent.send(os.getpid())
    while (word := parent.recv(timeout=waits.patience_s)) != "end":
        if word == "read":
            parent.send(queue.dequeue(timeout=waits.patience_s))
        elif word == "hold":
            with queue.acquire_read(timeout=waits.patience_s):
                parent.send("holding")
                time.sleep(1000)
    return "ended"


def give(parent: Parent, writer: MessageQueue, count: int, pause_s: float = 0.0) -> Any:
    """Enqueue numbers, report it, and wait for the command to end."""
    parent.recv(timeout=waits.patience_s)
    for number in range(count):
        writer.enqueue(number, timeout=waits.patience_s)
        time.sleep(pause_s)
    parent.send("enqueued")
    parent.recv(timeout=waits.patience_s)
    return "ended"


def give_without_end(parent: Parent, writer: MessageQueue) -> Any:
    number = 0
    while True:
        writer.enqueue((number, b"x" * 3000), timeout=waits.patience_s)
        number += 1


def give_chunks(parent: Parent, writer: MessageQueue) -> Any:
    """Send chunks filled with their number, and stop in the middle of writing another one."""
    parent.recv(timeout=waits.patience_s)
    for number in range(CHUNKS - 1):
        with writer.acquire_write(1000, timeout=waits.patience_s) as view:
            view[:] = bytes([number]) * 1000
    with writer.acquire_write(1000, timeout=waits.patience_s) as view:
        view[:500] = b"h" * 500
        parent.send("half written")
        time.sleep(1000)


class Processes(QueueSuite):
    """One queue with ends in several processes."""

    @law("QUEUE-1", needs="other_processes", level="long")
    def test_readers_in_other_processes_get_every_message_in_order(self) -> None:
        count = 2_000
        writer = self.writer(3)
        local = self.reader(writer, 0)
        remote = [self.remote_reader(writer, rank, add_up, count) for rank in (1, 2)]
        for child in remote:
            assert child.recv() == "attached"
        call = Call(lambda: [local.dequeue(timeout=waits.patience_s) for _ in range(count)])
        for number in range(count):
            sent(writer, number)
        assert not wrong(call.result(), range(count))
        assert [child.result() for child in remote] == ["", ""]

    @law("QUEUE-1", needs="other_processes")
    def test_a_writer_in_another_process_is_heard_from_the_first_message(self) -> None:
        handle, child = self.remote_writer(1, give, CHUNKS)
        child.send("go")
        assert child.recv() == "enqueued"
        reader = self.attach(handle)
        self.later(reader.abort)
        assert not wrong([received(reader) for _ in range(CHUNKS)], range(CHUNKS))

    @law("QUEUE-1", needs="other_processes")
    def test_a_second_process_of_one_rank_is_refused(self) -> None:
        writer = self.writer(1)
        child = self.remote_reader(writer, 0, sit)
        child.recv()
        raises(ConfigError, lambda: self.attach(writer.export_handle()))

    @law("QUEUE-2", "ALL-2", needs="other_processes")
    def test_a_reader_that_is_killed_is_evicted_by_name_and_the_others_go_on(self) -> None:
        writer = self.writer(3)
        local = self.reader(writer, 0)
        victim, other = self.remote_reader(writer, 1, sit), self.remote_reader(writer, 2, drain, 3 * CHUNKS)
        victim.recv()
        other.recv()
        sent(writer, 0)
        assert received(local) == 0
        victim.kill()
        for number in range(1, 3 * CHUNKS):
            sent(writer, number)
            assert received(local) == number
        assert other.result() == list(range(3 * CHUNKS))
        dead = writer.readers[1]
        assert dead.gone and dead.died, f"reader rank 1 was killed, and this is known of it: {dead}"
        assert f"pid {victim.pid}" in str(dead), f"the dead reader's process is not named: {dead}"

    @law("QUEUE-2", needs="other_processes")
    def test_a_writer_blocked_by_a_reader_goes_on_when_that_is_killed(self) -> None:
        writer = self.writer(2)
        local = self.reader(writer, 0)
        victim = self.remote_reader(writer, 1, sit)
        victim.recv()
        held = fill(writer)
        for _ in range(held):
            received(local)
        call = Call(lambda: writer.enqueue("on", timeout=waits.patience_s))
        assert call.is_blocked()
        victim.kill()
        call.result(waits.patience_s + 1)
        assert received(local) == "on"

    @law("QUEUE-2", needs="other_processes")
    def test_a_reader_that_is_killed_while_it_holds_a_chunk_blocks_nobody(self) -> None:
        writer = self.writer(2)
        local = self.reader(writer, 0)
        victim = self.remote_reader(writer, 1, sit)
        victim.recv()
        with writer.acquire_write(8, timeout=waits.patience_s) as view:
            view[:] = b"in place"
        victim.send("hold")
        assert victim.recv() == "holding"
        victim.kill()
        with local.acquire_read(timeout=waits.patience_s) as view:
            assert bytes(view) == b"in place"
        for number in range(3 * CHUNKS):
            sent(writer, number)
            assert received(local) == number

    @law("ALL-2", "ALL-5", needs="other_processes")
    def test_of_a_writer_that_is_killed_everything_it_had_enqueued_is_received_first(self) -> None:
        handle, child = self.remote_writer(2, give, CHUNKS)
        readers = [self.attach(handle, rank) for rank in range(2)]
        for reader in readers:
            self.later(reader.abort)
        child.send("go")
        assert child.recv() == "enqueued"
        child.kill()
        for reader in readers:
            assert not wrong([received(reader) for _ in range(CHUNKS)], range(CHUNKS))
            raises(PeerGoneError, lambda reader=reader: reader.dequeue(timeout=waits.patience_s))  # type: ignore[misc]
            raises(PeerGoneError, lambda reader=reader: reader.dequeue(timeout=waits.patience_s))  # type: ignore[misc]

    @law("ALL-2", "ALL-5", needs="other_processes")
    def test_of_a_writer_that_is_killed_whole_chunks_are_read_and_half_a_one_never_is(self) -> None:
        handle, child = self.remote_writer(2, give_chunks)
        readers = [self.attach(handle, rank) for rank in range(2)]
        for reader in readers:
            self.later(reader.abort)
        child.send("go")
        assert child.recv() == "half written"
        with readers[0].acquire_read(timeout=waits.patience_s) as view:
            child.kill()
            assert bytes(view) == bytes(1000), "what is being read went away with its writer"
        assert [read(readers[0]) for _ in range(2)] == [bytes([at]) * 1000 for at in (1, 2)]
        assert [read(readers[1]) for _ in range(3)] == [bytes([at]) * 1000 for at in (0, 1, 2)]
        for reader in readers:
            for call in (read, received, read):
                raises(PeerGoneError, lambda call=call, reader=reader: call(reader))  # type: ignore[misc]

    @law("ALL-2", needs="other_processes")
    def test_of_a_writer_killed_in_the_middle_only_whole_messages_are_received(self) -> None:
        handle, child = self.remote_writer(1, give_without_end)
        reader = self.attach(handle)
        self.later(reader.abort)
        for number in range(50):
            assert received(reader) == (number, b"x" * 3000)
        child.kill()

        def rest() -> int:
            number = 50
            while True:
                try:
                    got = reader.dequeue(timeout=waits.patience_s)
                except PeerGoneError:
                    return number
                assert got == (number, b"x" * 3000), f"{got!r} came where message {number} was expected"
                number += 1

        assert Call(rest).result(waits.patience_s + 5) <= 50 + 1000

    @law("ALL-3", "QUEUE-3", needs="other_processes")
    def test_a_reader_that_is_stopped_is_named_with_its_process_and_not_evicted(self) -> None:
        writer = self.writer(2)
        local = self.reader(writer, 0)
        child = self.remote_reader(writer, 1, sit)
        child.recv()
        child.stop()
        held = fill(writer)
        for _ in range(held):
            received(local)
        error = raises(TimeoutError, lambda: writer.enqueue("x", timeout=0.5))
        check_named(error, 1, f"pid {child.pid}", held)
        assert not writer.readers[1].gone, "a reader that is only stopped was evicted"
        child.cont()
        for number in range(held):
            child.send("read")
            assert child.recv() == number, "what came while it was stopped is lost"
        sent(writer, "after")
        child.send("read")
        assert child.recv() == "after"

    @law("QUEUE-1", needs="other_processes")
    def test_a_handle_whose_writer_was_killed_is_refused_in_time(self) -> None:
        handle, child = self.remote_writer(1, give, 1)
        child.kill()
        raises(PeerGoneError, lambda: self.attach(QueueHandle.from_plain(handle.as_plain())))
